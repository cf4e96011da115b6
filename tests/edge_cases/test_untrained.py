"""Steps that would train nothing, or not all that they should, are refused by name: outputs cut off, a loss_fn forgotten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError, ConfigurationError, StageError
from tests.edge_cases.case import SCHEDULES, pipeline
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, P, M = 4, 4, 4
X, Y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(0))


class Stage(nn.Module):
    """A stage with a layer, and what it does with it."""

    def __init__(self, body: Callable[[Callable[[Tensor], Tensor], Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(WIDTH, WIDTH), body

    def forward(self, x: Tensor) -> Any:
        return self.body(self.layer, x)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.round()
        ctx.mark_non_differentiable(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise AssertionError("there is none")


@torch.no_grad()
def without_grad(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return layer(x)


def written_into(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    result = torch.empty_like(x)
    result.detach().copy_(layer(x).detach())
    return result


def two_of_which_none_is_needed(layer: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    return layer(x).detach(), (x > 0)


CUTS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "detach": lambda layer, x: layer(x).detach(),
    "data": lambda layer, x: layer(x).data,
    "no_grad": without_grad,
    "integers": lambda layer, x: layer(x).topk(WIDTH).indices,
    "a comparison": lambda layer, x: layer(x) > 0,
    "numpy": lambda layer, x: torch.from_numpy(layer(x).detach().numpy().copy()),
    "a list": lambda layer, x: torch.tensor(layer(x).tolist()),
    "a Function": lambda layer, x: Rounded.apply(layer(x)),
    "memory of its own": written_into,
    "a constant": lambda layer, x: torch.ones_like(x),
    "two outputs": two_of_which_none_is_needed,
}
UNDER = ("1f1b", "gpipe", "zb_h1", "recompute", "bytes", "parts", "zbv", "interleaved", "dualpipe_v")


class Next(nn.Module):
    """Goes on with whatever comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        result: Tensor = torch.tanh(self.layer(x.float()))
        return result


def stages(cut: str | None, at: int = 1) -> list[nn.Module]:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Next() for _ in range(P)]
    if cut is not None:
        modules[at] = Stage(CUTS[cut])
    return modules


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [one.grad for module in modules for one in module.parameters()]


NO_LOSS: Any = None
CUT_OFF = "no output needs a gradient, but the input does, so the stages before it would train nothing"


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("schedule", UNDER)
def test_a_stage_that_cuts_off_what_earlier_ones_want_is_refused(schedule: str, cut: str) -> None:
    """Where a single process would train the last stages alone; and no gradient has come back to the stages before."""
    modules = stages(cut)
    loopback, schedules = pipeline(SCHEDULES[schedule], modules, F.mse_loss, M)
    with pytest.raises(StageError, match=rf"^stage 1, all microbatches: {CUT_OFF}.*requires_grad_\(False\)"):
        loopback.step(schedules, X, target=Y)
    assert all(gradient is None for gradient in gradients(modules[:2]))


def alone(modules: list[nn.Module]) -> list[Tensor | None]:
    for x, y in zip(X.chunk(M), Y.chunk(M)):
        value: Any = (x,)
        for module in modules:
            value = module(*value) if isinstance(value, tuple) else module(value)
        (F.mse_loss(value, y) / M).backward()
    return gradients(modules)


def frozen_before(modules: list[nn.Module]) -> None:
    modules[0].requires_grad_(False)


def without_grad_at_first(modules: list[nn.Module]) -> None:
    modules[0], modules[1] = Stage(without_grad), Next()


def frozen_to_the_last(modules: list[nn.Module]) -> None:
    for module in modules[:-1]:
        module.requires_grad_(False)


def frozen_after(modules: list[nn.Module]) -> None:
    """Frozen, but gradients pass it."""
    modules[1], modules[2] = Next().requires_grad_(False), Next().requires_grad_(False)


def without_parameters(modules: list[nn.Module]) -> None:
    modules[1] = nn.Tanh()


def nothing_but_its_input(modules: list[nn.Module]) -> None:
    modules[1], modules[2] = nn.Identity(), nn.Dropout(0.0)


RIGHT = [
    frozen_before,
    without_grad_at_first,
    frozen_to_the_last,
    frozen_after,
    without_parameters,
    nothing_but_its_input,
]


@pytest.mark.parametrize("change", RIGHT)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "recompute"])
def test_what_is_frozen_or_passed_through_trains_as_in_a_single_process(
    schedule: str, change: Callable[[list[nn.Module]], None]
) -> None:
    ours, theirs = stages(None), stages(None)
    for modules in (ours, theirs):
        torch.manual_seed(1)
        change(modules)
    loopback, schedules = pipeline(SCHEDULES[schedule], ours, F.mse_loss, M)
    loopback.step(schedules, X, target=Y)
    for one, other in zip(gradients(ours), alone(theirs), strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))


@pytest.mark.parametrize("cut", ["detach", "no_grad", "integers"])
def test_the_way_out_and_evaluations(cut: str) -> None:
    """With the stages before frozen, the rest trains; and an evaluation cuts nothing off."""
    modules = stages(cut)
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, F.mse_loss, M)
    assert loopback.eval(schedules, X).shape == X.shape
    modules[0].requires_grad_(False)
    loopback.step(schedules, X, target=Y)
    expected = stages(cut)
    expected[0].requires_grad_(False)
    assert [one is None for one in gradients(modules)] == [True] * 4 + [False] * 4
    assert all(one is None or torch.equal(one, other) for one, other in zip(gradients(modules), alone(expected), strict=True))


def test_it_may_happen_in_any_step() -> None:
    modules = stages(None)
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, F.mse_loss, M)
    for _ in range(2):
        loopback.step(schedules, X, target=Y)
    modules[2].register_forward_hook(lambda module, args, output: output.detach())
    with pytest.raises(StageError, match=f"^stage 2, all microbatches: {CUT_OFF}"):
        loopback.step(schedules, X, target=Y)


class Alternating(Next):
    """Trains, or runs without gradients, by a flag of its own."""

    is_frozen = False

    def forward(self, x: Tensor, *rest: Tensor) -> Tensor:
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            return super().forward(x, *rest)


def frozen_later(schedule: Any) -> Callable[[], Any]:
    """A step in which stage 2 cuts off what stage 1 wants, by a flag, which nobody sees before it runs."""
    modules: list[nn.Module] = [Alternating() for _ in range(P)]
    loopback, schedules = pipeline(schedule, modules, F.mse_loss, M)
    loopback.step(schedules, X, target=Y)
    modules[2].is_frozen = True  # type: ignore[assignment]
    return lambda: loopback.step(schedules, X, target=Y)


def test_what_another_rank_wanted_at_first_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    step = frozen_later(bpipe.OneFOneB)
    step()
    step()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"stage 2, all microbatches: {CUT_OFF}") and "only in earlier steps" in said


def test_what_this_rank_wants_is_known_in_each_step() -> None:
    with pytest.raises(StageError, match=f"^stage 2, all microbatches: {CUT_OFF}"):
        frozen_later(SCHEDULES["zbv"])()


@pytest.mark.parametrize("num_frozen", [1, 2, 3])
def test_stages_that_train_in_turn(num_frozen: int, caplog: pytest.LogCaptureFixture) -> None:
    """Stage 1 was blamed, because stage 0's output once needed a gradient."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [Alternating() for _ in range(P)]
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, F.mse_loss, M)
    for frozen in (0, num_frozen, 0, num_frozen):
        for i, module in enumerate(modules):
            module.is_frozen = i < frozen
            module.zero_grad()
        loopback.step(schedules, X, target=Y)
        found = gradients(modules)
        for module in modules:
            module.zero_grad()
        for one, other in zip(found, alone(modules), strict=True):
            assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    assert len(caplog.records) == num_frozen - 1


class Makes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return self.layer(x), {"more": self.other(x)}


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, more: Tensor) -> Tensor:
        result: Tensor = self.layer(x) + more
        return result


@pytest.mark.parametrize("users", [(2,), (1, 2), (2, 3)])
def test_a_skip_that_leads_past_the_stage_trains_the_first_one(users: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    modules: list[nn.Module] = [Makes(), *(Uses() if i in users else Next() for i in range(1, P))]
    modules[1].register_forward_hook(lambda module, args, output: output.detach())
    loopback = bpipe.Loopback(P)
    made = [bpipe.PipelineStage(one, i, P, "cpu", loopback.rank(i), skips={"more": (0, *users)}) for i, one in enumerate(modules)]
    loopback.step([bpipe.OneFOneB(one, M, loss_fn=F.mse_loss) for one in made], X, target=Y)
    found = [None if one is None else one.clone() for one in gradients(modules)]
    for module in modules:
        module.zero_grad()
    for x, y in zip(X.chunk(M), Y.chunk(M)):
        value, skip = modules[0](x)
        for i, module in enumerate(modules[1:], 1):
            value = module(value, **skip) if i in users else module(value)
        (F.mse_loss(value, y) / M).backward()
    for one, other in zip(found, gradients(modules), strict=True):
        assert (one is None) == (other is None) and (one is None or torch.equal(one, other))
    assert found[2] is not None and found[0] is None


def told(call: Callable[[], Any]) -> str:
    try:
        call()
    except BPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def on_processes(rank: int) -> list[str]:
    """What this rank hears: of a stage that cuts off, and of a target or losses on one rank where there is no loss_fn."""
    module = stages("detach", at=2)[rank]
    heard = []
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, rank, P, "cpu"), M, loss_fn=F.mse_loss)
    heard.append(told(lambda: schedule.step(X, target=Y)))
    schedule.close()
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(stages(None)[rank], rank, P, "cpu"), M)
    heard.append(told(lambda: schedule.step(X, target=Y if rank == P - 1 else None)))
    heard.append(told(lambda: schedule.step(X, losses=[] if rank == 1 else None)))
    heard.append(told(lambda: schedule.step(X)))
    schedule.close()
    stream = bpipe.Stream(bpipe.PipelineStage(module, rank, P, "cpu"), F.mse_loss)
    heard.append(told(lambda: [stream.push(X, target=Y) for _ in range(P + 2)]))
    stream.close()
    return heard


def test_all_ranks_hear_of_it() -> None:
    for rank, (cut, no_loss, losses, nothing, stream) in enumerate(run_ranks(on_processes, P)):
        text = f"stage 2, all microbatches: {CUT_OFF}"
        assert cut.startswith(f"StageError: {text}") if rank == 2 else text in cut and cut.startswith("RankFailedError: rank 2")
        text = "step() got target=, but there is no loss_fn, so nothing would be trained"
        assert no_loss.startswith(f"ConfigurationError: {text}") if rank == P - 1 else text in no_loss and no_loss != "no error"
        text = "step() got losses=, but there is no loss_fn"
        assert losses.startswith(f"ConfigurationError: {text}") if rank == 1 else text in losses
        assert nothing == "no error"
        assert CUT_OFF in stream and stream.startswith("StageError: stage 2, tick 2" if rank == 2 else "RankFailedError: rank 2")


GIVEN: dict[str, dict[str, Any]] = {
    "target": {"target": Y},
    "target_mbs": {"target_mbs": list(Y.chunk(M))},
    "losses": {"losses": []},
    "target and losses": {"target": Y, "losses": []},
    "losses alone, in a list that is not empty": {"losses": [torch.zeros(())]},
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("is_alone", [True, False])
def test_a_forgotten_loss_fn(given: str, is_alone: bool) -> None:
    """Refused before anything is sent, so that the pipeline goes on."""
    if is_alone:
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), M)
        step = schedule.step
    else:
        loopback, schedules = pipeline(bpipe.OneFOneB, stages(None), NO_LOSS, M)
        step = lambda *args, **kwargs: loopback.step(schedules, *args, **kwargs)  # noqa: E731
    names = " and ".join(f"{name}=" for name in GIVEN[given])
    with pytest.raises(ConfigurationError, match=rf"^step\(\) got {names}, but there is no loss_fn, .*: give loss_fn="):
        step(X, **GIVEN[given])
    assert step(X).shape == X.shape


def balanced(optimizer: Any) -> Any:
    _, schedules = pipeline(bpipe.OneFOneB, stages(None), NO_LOSS, M)
    return bpipe.Balanced(schedules[0], budget="lowest", optimizer=optimizer)


def auto(optimizer: Any) -> Any:
    return bpipe.auto(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"), M, optimizer=optimizer)


@pytest.mark.parametrize("make", [balanced, auto])
def test_an_optimizer_without_a_loss(make: Callable[[Any], Any]) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ConfigurationError, match=r"got optimizer=, but there is no loss_fn"):
        make(optimizer)
    make(None)


def test_a_stream_without_a_loss_takes_no_target() -> None:
    stream = bpipe.Stream(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), 0, 1, "cpu"))
    stream.push(X)
    with pytest.raises(ConfigurationError, match=r"^push\(\) got target=, but there is no loss_fn"):
        stream.push(X, target=Y)
