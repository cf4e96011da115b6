"""All steps of `Balanced` are plain's to the bit; `auto`'s first one, too, or it is refused: what its order decides is noticed."""

from __future__ import annotations

import copy
import enum
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.errors import ConfigurationError, StageError
from bpipe.schedules import Destinations
from tests.edge_cases.case import NUM_STAGES, Batch, Case, M, pipeline
from tests.models import KINDS, TOKENS, WIDTH, Block, Result, as_rank, assert_same, batch_of, in_loopback, joined
from tests.over import Over
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

LOWEST = {"budget": "lowest"}
WAYS: dict[str, dict[str, Any]] = {
    "whole": LOWEST,
    "parts": {**LOWEST, "parts": 4},
    "host": {**LOWEST, "to": Destinations(host="only")},
    "recompute": {**LOWEST, "by": "recompute"},
}


def batch(step: int) -> Batch:
    x, y = batch_of("quiet", M, step)
    return Batch((x,), y)


def seeded(make: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    """Modules, made when Python's and NumPy's random numbers begin again."""
    random.seed(0)
    np.random.seed(0)
    return make()


def case_of(make: Callable[[], list[nn.Module]], **options: Any) -> Case:
    return Case(partial(seeded, make), options.pop("batch", batch), options.pop("loss_fn", F.mse_loss), steps=2, **options)


def assert_equal(one: Result, other: Result) -> None:
    one.outputs = other.outputs = [torch.zeros(1)]
    assert_same(one, other)


def assert_plains(case: Case, schedule: type[bpipe.Schedule], **options: Any) -> Result:
    """Compare the schedule balanced with the schedule as it is."""
    result = case.piped(Over(schedule, {**LOWEST, **options}))
    assert_equal(result, case.piped(schedule))
    return result


@dataclass(frozen=True)
class Auto:
    """`auto` for the stages of a schedule class, to be used like a schedule class."""

    schedule: type[bpipe.Schedule]

    @property
    def rule(self) -> str:
        return self.schedule.rule

    def __call__(self, stages: Any, m: int, **options: Any) -> bpipe.Schedule:
        return bpipe.auto(stages, m, start=self.rule, **options)


def first_step(case: Case, schedule: type[bpipe.Schedule]) -> None:
    """Run the first step of `auto`, which measures one microbatch at a time."""
    loopback, schedules = pipeline(Auto(schedule), case.make(), case.loss_fn)
    first = case.batch(0)
    loopback.step(schedules, *first.args, target=first.target, **first.kwargs)


def first_step_fails(case: Case, schedule: type[bpipe.Schedule], match: str) -> None:
    with pytest.raises(StageError, match=match) as caught:
        first_step(case, schedule)
    assert "measure='in_order'" in str(caught.value)


# Stages, one on a rank, whose backward draws or writes.


class Inner(nn.Module):
    """A block whose backward does something with its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = torch.tanh(self.linear(x)) * self.scale() + self.noise(x)
        if y.requires_grad:
            y.register_hook(self.seen)
        return y

    def scale(self) -> float | torch.Tensor:
        return 1.0

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Torchs(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(x) * 0.1

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient + torch.randn_like(gradient) * 1e-3


class Pythons(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(random.random())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * random.uniform(0.9, 1.1)


class NumPys(Inner):
    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(np.random.rand(), dtype=x.dtype)

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float(np.random.uniform(0.9, 1.1))


class Own(Inner):
    """Draws from a generator of its own, one of torch's, Python's or NumPy's."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.made = {
            "torch": torch.Generator().manual_seed(3),
            "python": random.Random(3),
            "numpy": np.random.default_rng(3),
        }[kind]

    def drawn(self) -> float:
        return float(torch.rand((), generator=self.made) if isinstance(self.made, torch.Generator) else self.made.random())

    def noise(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tensor(self.drawn())

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.drawn()


class Recomputed(Inner):
    """Draws other random numbers when its region is recomputed, as preserve_rng_state=False lets it."""

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = checkpoint(lambda x: F.dropout(self.linear(x), 0.2), x, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(y, torch.Tensor)
        return y


class RecomputedNorm(Inner):
    """Its statistics are those of each forward, and of each recomputation in a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        y = checkpoint(lambda x: self.norm(self.linear(x).flatten(0, 1)).view_as(x), x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        return y


class Amax(Inner):
    """Scales as delayed scaling does: by a buffer that backwards write."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("amax", torch.ones(4))

    def scale(self) -> torch.Tensor:
        return self.amax.max()  # type: ignore[no-any-return, operator]

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.amax = self.amax.roll(1)  # type: ignore[assignment, operator]
        self.amax[0] = 1 + gradient.abs().max()  # type: ignore[index]
        return gradient


class Attribute(Inner):
    """The same in a plain attribute: a number."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = 1.0

    def scale(self) -> float:
        return self.norm

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.norm = 0.9 * self.norm + 0.1 * (1 + float(gradient.norm()))
        return gradient


class Meter(SimpleNamespace):
    def __init__(self) -> None:
        super().__init__()
        self.norms: dict[str, list[float]] = {"seen": [1.0]}


class Inside(Attribute):
    """The same deep in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meter = Meter()

    def scale(self) -> float:
        return self.meter.norms["seen"][-1]

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.meter.norms["seen"][-1] = 1 + float(gradient.norm())
        return gradient


class Slotted(Inner):
    """The same in a private slot."""

    __slots__ = ("__norm",)

    def __init__(self) -> None:
        super().__init__()
        self.__norm = 1.0

    def scale(self) -> float:
        return self.__norm

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.__norm = 0.9 * self.__norm + 0.1 * (1 + float(gradient.norm()))
        return gradient


class Logged(Inner):
    """Keeps a log of its gradients, which no forward reads, and work that is put off."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[torch.Tensor] = []
        self.work: Callable[[], None] | None = None
        self.by_name: dict[str, float] = {}

    def seen(self, gradient: torch.Tensor) -> torch.Tensor:
        self.log.append(gradient.norm())
        self.work = None if self.work else gradient.sum
        self.by_name[f"{len(self.log)}"] = 0.5
        return gradient


class OptimizerInBackward(Inner):
    """Its weights are updated as soon as a microbatch's gradient is there."""

    def __init__(self, *, is_counted: bool = False) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_update, is_counted=is_counted))


@torch.no_grad()
def _update(parameter: torch.Tensor, *, is_counted: bool) -> None:
    """Through `.data`, autograd does not notice that saved weights change."""
    assert parameter.grad is not None
    (parameter if is_counted else parameter.data).add_(parameter.grad, alpha=-0.1)


DRAWING: dict[str, Callable[[], nn.Module]] = {
    "torch": Torchs,
    "Python": Pythons,
    "NumPy": NumPys,
    "its own, torch": partial(Own, "torch"),
    "its own, Python": partial(Own, "python"),
    "its own, NumPy": partial(Own, "numpy"),
    "recomputed": Recomputed,
}
WRITING: dict[str, Callable[[], nn.Module]] = {
    "statistics, recomputed": RecomputedNorm,
    "buffer": Amax,
    "optimizer": OptimizerInBackward,
}


def at(index: int, make: Callable[[], nn.Module]) -> Case:
    """A stage of a kind among quiet ones."""
    return case_of(lambda: [make() if i == index else Block(dropout=0.0) for i in range(NUM_STAGES)])


@pytest.mark.parametrize("name", [*DRAWING, *WRITING])
def test_a_backward_that_draws_or_writes_is_plains_or_refused(name):
    make = {**DRAWING, **WRITING}[name]
    match = r"^stage 1, microbatch 0: the backward" + (" draws random numbers" if name in DRAWING else " changes the")
    first_step_fails(at(1, make), bpipe.OneFOneB, match)
    result = assert_plains(at(1, make), bpipe.OneFOneB)
    assert sum(stats["evicted_bytes"] for stats in result.stats) > 0


@pytest.mark.parametrize("schedule", [bpipe.GPipe, bpipe.ZBH1, bpipe.ZBH2, bpipe.BalancedOneFOneB], ids=lambda one: one.rule)
@pytest.mark.parametrize("make", [Torchs, Amax])
def test_other_schedules(schedule, make):
    assert_plains(at(2, make), schedule)


@pytest.mark.parametrize("way", [WAYS["parts"], WAYS["host"], WAYS["recompute"]], ids=["parts", "host", "recompute"])
def test_whatever_the_balance_is_by(way):
    assert_plains(at(1, Inside), bpipe.OneFOneB, **way)


@pytest.mark.parametrize("make", [Torchs, RecomputedNorm, partial(OptimizerInBackward, is_counted=True)])
def test_a_rank_whose_order_is_the_same_is_not_watched(make):
    """As the last stage's is under 1F1B."""
    first_step(at(NUM_STAGES - 1, make), bpipe.OneFOneB)
    first_step_fails(at(NUM_STAGES - 1, make), bpipe.GPipe, rf"^stage {NUM_STAGES - 1}, microbatch 0: the backward")


def test_halves_of_a_backward_are_watched():
    first_step_fails(at(1, OptimizerInBackward), bpipe.ZBH1, "the backward for the input changes the parameter linear")
    first_step_fails(at(1, Torchs), bpipe.ZBH1, "the backward for the input draws random numbers")


def test_what_comes_with_the_batch_is_watched():
    generator = torch.Generator().manual_seed(3)

    class Given(Inner):
        def forward(self, x: torch.Tensor, *, source: torch.Generator) -> torch.Tensor:
            y = torch.tanh(self.linear(x))
            y.register_hook(lambda gradient: gradient * torch.rand((), generator=source))
            return y

    def given(step: int) -> Batch:
        return replace(batch(step), kwargs={"source": generator})

    case = case_of(lambda: [Given() for _ in range(NUM_STAGES)], batch=given)
    first_step_fails(case, bpipe.OneFOneB, "draws random numbers")


class Keeps(Inner):
    """What is no reason to refuse: statistics of forwards, hooks that look on, checkpoints that restore, attributes of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.config = Meter()
        self.kept: dict[Any, Any] = {"nan": float("nan"), torch.float32: {1, 2}, "self": self, "array": np.zeros(3)}
        nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
        log = logging.getLogger("bpipe.tests")
        self.others = [random.SystemRandom(), torch.zeros(2, device="meta"), nested, object(), log, np, enum]
        self.forwards, self.last = 0, torch.zeros(1)

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        self.forwards += 1
        y = checkpoint(lambda x: F.dropout(torch.tanh(self.linear(x)), 0.2), x, use_reentrant=False)
        assert isinstance(y, torch.Tensor)
        y.register_hook(_logged)
        self.last = self.norm(y.flatten(0, 1)).view_as(y)
        return self.last


def _logged(gradient: torch.Tensor) -> torch.Tensor:
    """Loggers remember what they were asked."""
    logging.getLogger("bpipe.tests").isEnabledFor(int(gradient.abs().sum() * 1e9) % 97)
    return gradient


def test_what_the_order_does_not_change_is_left_alone():
    for schedule in (bpipe.OneFOneB, bpipe.ZBH1):
        assert_plains(case_of(lambda: [Keeps() for _ in range(NUM_STAGES)]), schedule)
        first_step(case_of(lambda: [Keeps() for _ in range(NUM_STAGES)]), schedule)


def test_attributes_that_a_backward_changes_are_warned_of(caplog):
    """They may be logs, which no forward reads."""
    caplog.set_level(logging.WARNING, logger="bpipe")
    for make in (Logged, Attribute, Inside, Slotted):
        assert_plains(at(1, make), bpipe.OneFOneB)
        first_step(at(1, make), bpipe.OneFOneB)
    warned = [record.getMessage().partition(". If")[0] for record in caplog.records]
    names = ("log's length", "norm", "meter.norms['seen'][0]", "_Slotted__norm")
    assert warned == [f"stage 1: a backward changes the attribute {name}" for name in names]


# Several stages on a rank.


@pytest.mark.parametrize("schedule, way", [(bpipe.OneFOneB, "parts"), (bpipe.GPipe, "recompute"), (bpipe.ZBV, "whole")])
def test_sizes_that_are_measured_are_those_that_were_predicted(schedule, way):
    found = [planned(schedule, {**WAYS[way], "measure": measure}) for measure in ("auto", "in_order")]
    assert found[0] == found[1]


def planned(schedule: type[bpipe.Schedule], options: dict[str, Any]) -> Any:
    loopback, schedules = pipeline(Over(schedule, options), [Block(dropout=0.0) for _ in range(NUM_STAGES)], F.mse_loss)
    for step in range(2):
        loopback.step(schedules, *batch(step).args, target=batch(step).target, return_outputs=False)
    return schedules[0].plan.sizes


class Shared(Inner):
    """A layer of another stage, and one of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.linear(torch.tanh(self.layer(x)))  # type: ignore[no-any-return]


class Loss(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layer(output), target)


HELD = {bpipe.ZBV: (0, 3), bpipe.DualPipeV: (1, 2), bpipe.Interleaved1F1B: (1, 3)}  # by one of two ranks


def sharing(kind: str, first: int, second: int) -> Case:
    """Two stages that share a layer, or one of them with the loss."""
    layer: nn.Module = nn.BatchNorm1d(TOKENS) if kind == "statistics" else nn.Linear(WIDTH, WIDTH)
    if kind == "buffer":
        layer = Averaging()
    state = copy.deepcopy(layer.state_dict())

    def make() -> list[nn.Module]:
        layer.zero_grad()
        layer.load_state_dict(state)
        return [Shared(layer) if i == first or (i == second and kind not in LOSSES) else Inner() for i in range(NUM_STAGES)]

    losses = {"loss": Loss(layer), "closure": lambda output, target: F.mse_loss(layer(output), target)}
    return case_of(make, loss_fn=losses.get(kind, F.mse_loss))


LOSSES = ("loss", "closure")


class Averaging(nn.Module):
    """Scales by the mean size of what it has seen, of whichever stage."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(x.detach().abs().mean(), 0.5)  # type: ignore[operator, union-attr]
        return x * self.mean.clone()  # type: ignore[operator]


@pytest.mark.parametrize("schedule", HELD, ids=lambda one: one.rule)
@pytest.mark.parametrize("kind", ["weight", "statistics", "buffer"])
def test_stages_of_a_rank_that_share_something(caplog, kind, schedule):
    caplog.set_level(logging.INFO, "bpipe")
    assert_plains(sharing(kind, *HELD[schedule]), schedule)
    first_step(sharing(kind, *HELD[schedule]), schedule)
    assert f"in the schedule's own order (stages {HELD[schedule][0]} and {HELD[schedule][1]} share" in caplog.text


def test_the_loss_shares_a_weight_with_a_stage_beside_the_last():
    assert_plains(sharing("loss", 0, 3), bpipe.ZBV)
    assert_plains(sharing("closure", 0, 3), bpipe.ZBV)
    first_step_fails(sharing("closure", 0, 3), bpipe.ZBV, "the forward uses a tensor of shape .* as stage 0 does")


class Scaled(Inner):
    def forward(self, x: torch.Tensor, *, by: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * by


def test_gradients_of_a_keyword_argument_add_up_in_order():
    def scaled() -> Case:
        by = torch.ones(M, 1, 1, requires_grad=True)
        return case_of(lambda: [Scaled() for _ in range(NUM_STAGES)], batch=lambda step: replace(batch(step), kwargs={"by": by}))

    first_step_fails(scaled(), bpipe.DualPipeV, "that needs a gradient, as stage")
    for schedule in (bpipe.OneFOneB, bpipe.DualPipeV):
        assert_plains(scaled(), schedule)


@pytest.mark.parametrize("make", [nn.Dropout, nn.RReLU, lambda: nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2)])
def test_stages_of_a_rank_that_draw_random_numbers(make):
    """As modules of torch's do: known before the step."""
    case = case_of(lambda: [nn.Sequential(nn.Linear(WIDTH, WIDTH), made, First()) for made in (make() for _ in range(NUM_STAGES))])
    for schedule in (bpipe.Interleaved1F1B, bpipe.VHalf):
        assert_plains(case, schedule)


class First(nn.Module):
    """What an LSTM returns first."""

    def forward(self, x: Any) -> Any:
        return x[0] if isinstance(x, tuple) else x


@pytest.mark.parametrize("make", [Torchs, Pythons, partial(Own, "numpy")])
def test_stages_of_a_rank_that_draw_random_numbers_unseen(make):
    """By functions: known when they have."""
    case = at(3, make)
    first_step_fails(case, bpipe.ZBV, "^stage 3, microbatch 0: the forward draws random numbers")
    assert_plains(case, bpipe.ZBV)


def test_ranks_of_a_loopback_that_share_random_numbers():
    loopback = bpipe.Loopback(2, own_random_state=False)
    stages = [bpipe.PipelineStage(Torchs(), i, 2, "cpu", loopback.rank(i)) for i in range(2)]
    schedules = [bpipe.auto(stage, M, F.mse_loss, start="gpipe") for stage in stages]
    with pytest.raises(StageError, match=r"^stage 0, microbatch 0: the forward draws random numbers"):
        loopback.step(schedules, *batch(0).args, target=batch(0).target)


@pytest.mark.parametrize("schedule", HELD, ids=lambda schedule: schedule.rule)
def test_quiet_stages_of_a_rank_are_measured_one_microbatch_at_a_time(schedule, caplog):
    caplog.set_level(logging.INFO, "bpipe")
    first_step(case_of(lambda: [Block(dropout=0.0) for _ in range(NUM_STAGES)]), schedule)
    assert "own order" not in caplog.text


def test_one_rank_that_needs_it_decides_for_all():
    """Over processes: the others have nothing that draws."""
    result = joined(run_ranks(in_process, 2))
    with patch.dict(KINDS, mixed=mixed):
        assert_same(result, in_loopback("mixed", NUM_STAGES, M, bpipe.ZBV, 2, num_ranks=2))


def in_process(rank: int) -> Result:
    with patch.dict(KINDS, mixed=mixed):
        return as_rank(rank, "mixed", NUM_STAGES, M, Over(bpipe.ZBV, LOWEST), 2, {}, num_ranks=2)  # type: ignore[arg-type]


def mixed(stage: int) -> nn.Module:
    """Dropout on the second of two ranks of a V alone."""
    return Block(dropout=0.1 if stage in (1, 2) else 0.0)


def test_a_wrong_way_to_measure_is_refused():
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"measure": "later"}, "choose 'auto' or 'in_order'"),
        ({"budget": None, "measure": "in_order"}, "counts microbatches and does not use measure"),
    ]
    for options, match in wrong:
        with pytest.raises(ConfigurationError, match=match):
            pipeline(Over(bpipe.OneFOneB, options), [Inner() for _ in range(NUM_STAGES)], F.mse_loss)
