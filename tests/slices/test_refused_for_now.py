"""Losses, random numbers and layers that slices cannot follow: refused when they show, in the first step or in a later one.

The strict xfails pin the gradients of whole sequences, which losses of other kinds than a mean over positions will have to get.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from bpipe import GPipe, Loopback, PipelineStage, Seq1F1B
from bpipe.errors import BPipeError, ConfigurationError, StageError
from tests.slices.models import WIDTH, Stage, batch_of
from tests.slices.test_losses import Head, cross_entropy
from tests.slices.test_run import furthest, taken

pytestmark = pytest.mark.usefixtures("one_thread")

M, ROWS, LENGTH, WORDS, PADDING = 2, 2, 12, 7, 6
F = nn.functional


def words(*, padding: int | None = -100, rows: tuple[int, ...] = (0, 5, 3, 9)) -> torch.Tensor:
    """Words of four sequences, of which so many positions at the end are padding; the word for it is in no other place."""
    found = torch.randint(0, PADDING, (M * ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    for row, count in enumerate(rows):
        if padding is not None and count:
            found[row, LENGTH - count :] = padding
    return found


def tokens(logits: torch.Tensor, target: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(logits.mT, target, reduction="none", **how)


def masked(logits: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    labels, mask = target
    return (tokens(logits, labels) * mask).sum() / mask.sum()


def mean_of_sequences(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    counts = (target != -100).sum(1)
    return (tokens(logits, target).sum(1) / counts).mean()


def sequences_with_words(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A sum over positions, by how many sequences have any that count."""
    return tokens(logits, target).sum() / (target != -100).any(1).sum()


def of_positives(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """As detectors do: a sum over everything, by the number of positive entries."""
    return F.binary_cross_entropy_with_logits(logits, target, reduction="sum") / target.sum().clamp(min=1)


def regularised(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, target) + 0.1 * logits.pow(2).mean()


def with_z_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, target) + 0.1 * logits.logsumexp(-1).pow(2).mean()


def smallest_of_sequences(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Part of it is of one position in each sequence."""
    return cross_entropy(logits, target) + 0.1 * tokens(logits, target).amax(1).mean()


def ignoring(index: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda logits, target: F.cross_entropy(logits.mT, target, ignore_index=index)


def mask() -> torch.Tensor:
    found = torch.ones(M * ROWS, LENGTH, dtype=torch.bool)
    found[0, 5:], found[1, 9:], found[3, :6] = False, False, False
    return found


def positives() -> torch.Tensor:
    found = torch.zeros(M * ROWS, LENGTH, WORDS, dtype=torch.float64)
    found[:, ::5, 2] = 1.0
    found[1, 7:9, 1] = 1.0
    return found


class Case(NamedTuple):
    """A loss that is no mean over positions, and a target with which that shows."""

    loss: Callable[..., torch.Tensor]
    target: Any


CASES = {
    "a mask": Case(masked, (words(padding=None), mask())),
    "weights of positions": Case(masked, (words(padding=None), mask().double() + 0.5)),
    "ignore_index, with padding": Case(ignoring(PADDING), words(padding=PADDING)),
    "ignore_index=0, with padding before the words": Case(ignoring(PADDING), words(padding=PADDING).flip(1)),
    "means of sequences": Case(mean_of_sequences, words()),
    "the number of sequences that count": Case(sequences_with_words, words(rows=(0, 12, 3, 12))),
    "the number of positive entries": Case(of_positives, positives()),
    "a regulariser": Case(regularised, words()),
    "a regulariser, and slices in which nothing counts": Case(regularised, words(rows=(8, 8, 8, 8))),
    "a z-loss of all positions": Case(with_z_loss, words()),
    "the largest of each sequence": Case(smallest_of_sequences, words()),
}


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Stage("attention").double(), Head().double()]


def part(value: Any, index: int) -> Any:
    return tuple(one.chunk(M)[index] for one in value) if isinstance(value, tuple) else value.chunk(M)[index]


def whole(case: Case) -> list[torch.Tensor]:
    """The gradients of a loop over whole sequences."""
    first, last = both = modules()
    x, _ = batch_of(M)
    for index in range(M):
        (case.loss(last(first(x.chunk(M)[index])[0])[0], part(case.target, index)) / M).backward()
    return taken(both)


class Pipeline:
    """Two stages in a loopback, three slices."""

    def __init__(self, loss: Callable[..., torch.Tensor], parts: list[nn.Module] | None = None, cls: Any = Seq1F1B) -> None:
        self.modules, self.loopback = modules() if parts is None else parts, Loopback(2)
        how: dict[str, Any] = {} if cls is GPipe else {"slices": 3}
        self.stages = [PipelineStage(one, i, 2, "cpu", self.loopback.rank(i)) for i, one in enumerate(self.modules)]
        self.schedules = [cls(stage, M, loss_fn=loss, **how) for stage in self.stages]

    def step(self, target: Any) -> None:
        x, _ = batch_of(M)
        self.loopback.step(self.schedules, x, target=target, return_outputs=False)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.xfail(strict=True, raises=StageError, reason="slices have means over positions alone yet")
def test_slices_give_the_gradients_of_whole_sequences(name: str) -> None:
    pipeline = Pipeline(CASES[name].loss)
    pipeline.step(CASES[name].target)
    assert furthest(taken(pipeline.modules), whole(CASES[name])) < 1e-12


LATE = [name for name, case in CASES.items() if isinstance(case.target, torch.Tensor) and not case.target.is_floating_point()]


@pytest.mark.parametrize("name", [name for name in LATE if name != "the number of sequences that count"])
def test_it_is_refused_in_the_step_in_which_it_shows(name: str) -> None:
    """Without padding these are means over positions, but for those of one position, which the first step shows."""
    pipeline, case = Pipeline(CASES[name].loss), CASES[name]
    is_mean = name != "the largest of each sequence"
    for _ in range(2 if is_mean else 0):
        pipeline.step(words(padding=None))
    with pytest.raises(StageError, match="gradients would not be those of whole sequences"):
        pipeline.step(case.target)


MEANS: dict[str, Case] = {
    "a mean over words that count": Case(cross_entropy, words()),
    "slices in which nothing counts": Case(cross_entropy, words(rows=(8, 12, 9, 10))),
    "a mask of ones": Case(masked, (words(padding=None), torch.ones(M * ROWS, LENGTH, dtype=torch.bool))),
    "label smoothing": Case(lambda y, t: F.cross_entropy(y.mT, t, label_smoothing=0.1), words()),
    "a regulariser without padding": Case(regularised, words(padding=None)),
    "words that repeat at the end": Case(cross_entropy, torch.full((M * ROWS, LENGTH), 2)),
    "zeros in a target of numbers": Case(lambda y, t: F.mse_loss(y, t), positives()),
}


@pytest.mark.parametrize("name", MEANS)
def test_means_over_positions_are_not_refused(name: str) -> None:
    """Whatever their targets look like."""
    pipeline = Pipeline(MEANS[name].loss)
    pipeline.step(MEANS[name].target)
    assert furthest(taken(pipeline.modules), whole(MEANS[name])) < 1e-12


@pytest.mark.parametrize("name", ["a mask", "ignore_index, with padding", "a regulariser"])
def test_a_sum_over_a_count_of_ones_own_is_not_refused(name: str) -> None:
    """The way out: the parts of a sum are added up."""
    case, count = CASES[name], float(M * ROWS * LENGTH)

    def loss(logits: torch.Tensor, target: Any) -> torch.Tensor:
        labels, kept = target if isinstance(target, tuple) else (target, (target != PADDING) & (target != -100))
        return ((tokens(logits, labels.clamp(min=0)) * kept).sum() + 0.1 * logits.pow(2).sum()) / count

    pipeline = Pipeline(loss)
    stages = [PipelineStage(one, i, 2, "cpu", pipeline.loopback.rank(i)) for i, one in enumerate(pipeline.modules)]
    pipeline.schedules = [Seq1F1B(stage, M, loss_fn=loss, slices=3, scale_grads=False) for stage in stages]
    pipeline.step(case.target)
    found = taken(pipeline.modules)
    assert furthest(found, whole(Case(lambda y, t: M * loss(y, t), case.target))) < 1e-12


OF_THE_MODULE = torch.Generator().manual_seed(0)


class Drawing(nn.Module):
    """A stage that begins to draw random numbers in its third step."""

    def __init__(self, draw: Callable[[Drawing], Any]) -> None:
        super().__init__()
        self.stage, self.draw, self.step = Stage("attention").double(), draw, 0
        self.own, self.several = np.random.default_rng(0), {"mine": random.Random(0)}
        self.holder = SimpleNamespace(several=[{"mine": np.random.default_rng(0)}])

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        if self.step == 3:
            x = x * float(self.draw(self))
        output: tuple[torch.Tensor, Any] = self.stage(x, past)
        return output


DRAWS: dict[str, Callable[[Drawing], Any]] = {
    "torch": lambda module: torch.rand(()),
    "python": lambda module: random.random(),
    "numpy": lambda module: np.random.rand(),
    "a generator of the module": lambda module: module.own.random(),
    "a generator in a dict": lambda module: module.several["mine"].random(),
    "a generator deep inside": lambda module: module.holder.several[0]["mine"].random(),
    "a bernoulli in place": lambda module: torch.empty(()).bernoulli_(0.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("no_other_threads")
def test_random_numbers_that_are_drawn_late(name: str) -> None:
    drawing = Drawing(DRAWS[name])
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(3):
        pipeline.step(words())
    drawing.step = 3
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


def test_a_generator_that_a_module_has_got_since() -> None:
    """What an earlier step has found counts no longer."""
    drawing = Drawing(lambda module: module.own.random())
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(3):
        pipeline.step(words())
    drawing.step, drawing.own = 3, np.random.default_rng(1)
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


class WithGlobal(Drawing):
    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        if self.step == 3:
            x = x * torch.rand((), generator=OF_THE_MODULE, dtype=x.dtype)
        output: tuple[torch.Tensor, Any] = self.stage(x, past)
        return output


def test_a_generator_beside_the_class_is_found_late() -> None:
    drawing = WithGlobal(DRAWS["torch"])
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(4):
        if drawing.step < 3:
            pipeline.step(words())
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


@pytest.mark.parametrize("kind", ["a closure", "numpy", "python"])
@pytest.mark.usefixtures("no_other_threads")
def test_a_loss_that_draws_late(kind: str) -> None:
    generator, number = torch.Generator().manual_seed(0), [0]
    draws = {"a closure": lambda: torch.rand((), generator=generator), "numpy": np.random.rand, "python": random.random}

    def loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        late = number[0] == 3
        drawn = (torch.rand((), generator=generator) if kind == "a closure" else draws[kind]()) if late else 1.0
        return cross_entropy(logits, target) * float(drawn)

    pipeline = Pipeline(loss)
    for number[0] in range(3):
        pipeline.step(words())
    number[0] = 3
    with pytest.raises(StageError, match="drew random numbers"):
        pipeline.step(words())


def swap_norm(stage: PipelineStage) -> None:
    stage.submod.stage.norm = nn.BatchNorm1d(WIDTH)


def put_in_front(stage: PipelineStage) -> None:
    stage.submod.head = nn.Sequential(nn.InstanceNorm1d(LENGTH), stage.submod.head)


def replace_all(stage: PipelineStage) -> None:
    stage.submod = nn.Sequential(nn.Linear(WIDTH, WORDS))


def groups(stage: PipelineStage) -> None:
    stage.submod.add_module("extra", nn.GroupNorm(2, WIDTH))


def synchronised(stage: PipelineStage) -> None:
    stage.submod.head.register_module("norm", nn.SyncBatchNorm(WORDS))


def forward_of_its_own(stage: PipelineStage) -> None:
    stage.submod.forward = lambda x: (x, None)  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [swap_norm, put_in_front, replace_all, groups, synchronised, forward_of_its_own])
def test_a_layer_that_mixes_positions_is_refused_when_it_is_put_in(change: Callable[[PipelineStage], None]) -> None:
    """Before anything is sent, in the step behind the change; without it, the next step would be exact."""
    pipeline = Pipeline(cross_entropy)
    pipeline.step(words())
    before = taken(pipeline.modules)
    change(pipeline.stages[1])
    with pytest.raises(ConfigurationError, match="does not take slices"):
        pipeline.step(words())
    assert all(one.grad is None for module in pipeline.modules for one in module.parameters()) and before
    assert issubclass(ConfigurationError, BPipeError)
