"""Gradients that do not come through the loss that `loss_fn` returns: right with the factor, refused without it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.backward.loss_scale import LossScale
from bpipe.errors import ConfigurationError, StageError
from bpipe.fill.fence import Fence
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

M = 4
Factor = Callable[[], float]


class Inject(torch.autograd.Function):
    """An auxiliary loss that begins its backward with 1, as in DeepSeek's models."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        ctx.shape = auxiliary.shape
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.ones(ctx.shape)


class InjectLater(torch.autograd.Function):
    """An auxiliary loss whose factor is asked for in the backward, as in Megatron-LM, which keeps it in the class."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor, factor: Factor) -> torch.Tensor:
        ctx.save_for_backward(auxiliary)
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full_like(ctx.saved_tensors[0], ctx.factor()), None


class Base(nn.Module):
    """Two layers, the second of which has a loss of its own."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.layer, self.router, self.factor = nn.Linear(4, 4), nn.Linear(4, 4), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined(self.layer(x))

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class ByFunction(Base):
    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return Inject.apply(x, self.router(x).square().mean() * self.factor())


class ByRows(Base):
    """One auxiliary loss for each row, in place of a number."""

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return Inject.apply(x, self.router(x).square().mean(1) * self.factor())


class InTheBackward(Base):
    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return InjectLater.apply(x, self.router(x).square().mean(), self.factor)


class ByHook(Base):
    """A hook on an activation adds to its gradient."""

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        x = self.router(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient + 0.1 * self.factor())
        return x


class ByParameterHook(Base):
    """A hook on a parameter adds its weight's decay to each gradient."""

    def __init__(self, factor: Factor) -> None:
        super().__init__(factor)
        weight = self.router.weight
        weight.register_hook(lambda gradient: gradient + 0.1 * factor() * weight.detach())

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x)


class Checkpointed(ByFunction):
    """The factor is asked for again while the backward computes the layer again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class LocalBackward(Base):
    """The forward runs the backward of a loss of its own, of which nothing else is left."""

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled():
            (self.router(x.detach()).square().mean() * self.factor()).backward()
        return x


class ByHand(Base):
    """The forward adds to `.grad`."""

    def joined(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight = self.router.weight
            added = self.factor() * x.detach().T @ x.detach()
            weight.grad = added if weight.grad is None else weight.grad + added
        return x


class _Known(torch.autograd.Function):
    """A loss whose gradients are known already."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None, None


class ChunkedLoss(nn.Module):
    """A loss with the head inside, which runs the head's backward chunk by chunk, so that the logits are never whole."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.head, self.factor = nn.Linear(4, 3), factor

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        leaf, losses = hidden.detach().requires_grad_(), list[torch.Tensor]()
        for rows, goal in zip(leaf.chunk(2), target.chunk(2)):
            loss = nn.functional.mse_loss(self.head(rows), goal) / 2
            (loss * self.factor()).backward()
            losses.append(loss.detach())
        assert leaf.grad is not None
        return _Known.apply(hidden, torch.stack(losses).sum(), leaf.grad / self.factor())


class KnownLoss(ChunkedLoss):
    """As above, but the head's gradients wait until the backward, as in Liger's kernels: these need no factor."""

    def forward(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = hidden.detach().requires_grad_()
            loss = nn.functional.mse_loss(self.head(leaf), target)
            gradient, weight, bias = torch.autograd.grad(loss, [leaf, self.head.weight, self.head.bias])
        parts = zip([hidden, self.head.weight, self.head.bias], [gradient, weight, bias])
        return sum((_Known.apply(one, loss.detach() / 3, of) for one, of in parts), torch.zeros(()))


STAGES = [ByFunction, ByRows, InTheBackward, ByHook, ByParameterHook, Checkpointed, LocalBackward, ByHand]
LOSSES = [ChunkedLoss, KnownLoss]
SCHEDULES = [bpipe.GPipe, bpipe.OneFOneB, bpipe.BalancedOneFOneB, bpipe.ZBH1]


def plain_loss(factor: Factor) -> Callable[..., torch.Tensor]:
    return nn.functional.mse_loss


def trained(
    stage: type[nn.Module] | None, make_loss: Any, schedule: Any, factor: Factor = bpipe.loss_scale, m: int = M, **options: Any
) -> list[torch.Tensor]:
    """Train two stages and a loss for two steps; return all gradients."""
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)] if stage is None else [stage(factor), stage(factor)]
    loss_fn = make_loss(factor)
    loopback = bpipe.Loopback(2)
    schedules = [
        schedule(bpipe.PipelineStage(part, i, 2, "cpu", group=loopback.rank(i)), m, loss_fn=loss_fn, **options)
        for i, part in enumerate(parts)
    ]
    for x, target in batches(loss_fn):
        loopback.step(schedules, x, target=target)
    return gradients(parts, loss_fn)


def batches(loss_fn: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        width = 3 if isinstance(loss_fn, nn.Module) else 4
        yield torch.randn(16, 4, generator=generator), torch.randn(16, width, generator=generator)


def gradients(parts: list[nn.Module], loss_fn: Any) -> list[torch.Tensor]:
    owners = [*parts, *([loss_fn] if isinstance(loss_fn, nn.Module) else [])]
    return [parameter.grad for owner in owners for parameter in owner.parameters() if parameter.grad is not None]


def in_a_loop(stage: type[nn.Module] | None, make_loss: Any) -> list[torch.Tensor]:
    """Train the same without a pipeline, each microbatch with the factor 1/m."""
    torch.manual_seed(0)
    parts = [nn.Linear(4, 4), nn.Linear(4, 4)] if stage is None else [stage(lambda: 1 / M), stage(lambda: 1 / M)]
    loss_fn = make_loss(lambda: 1 / M)
    for x, target in batches(loss_fn):
        for rows, goal in zip(x.chunk(M), target.chunk(M)):
            loss_fn(parts[1](parts[0](rows)), goal).backward(torch.tensor(1 / M))
    return gradients(parts, loss_fn)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: one.rule)
@pytest.mark.parametrize("stage, make_loss", [*((one, plain_loss) for one in STAGES), *((None, one) for one in LOSSES)])
def test_with_the_factor_gradients_are_those_of_a_loop(stage: Any, make_loss: Any, schedule: Any) -> None:
    got, right = trained(stage, make_loss, schedule), in_a_loop(stage, make_loss)
    assert len(got) == len(right) > 0
    assert all(map(torch.equal, got, right))


@pytest.mark.parametrize("stage", [ByFunction, InTheBackward, Checkpointed])
def test_a_forward_that_runs_twice_asks_twice(stage: Any) -> None:
    def recomputing(*args: Any, **options: Any) -> bpipe.Balanced:
        return bpipe.Balanced(bpipe.OneFOneB(*args, **options), "lowest", by="recompute")

    assert all(map(torch.equal, trained(stage, plain_loss, recomputing), in_a_loop(stage, plain_loss)))


def one() -> float:
    return 1.0


UNSCALED = [
    (ByFunction, plain_loss, "Inject brings in a gradient of 1"),
    (ByRows, plain_loss, "Inject brings in a gradient of 1"),
    (InTheBackward, plain_loss, "InjectLater brings in a gradient of 1"),
    (Checkpointed, plain_loss, "Inject brings in a gradient of 1"),
    (LocalBackward, plain_loss, "gradient of router.weight has changed during the forward or loss_fn"),
    (ByHand, plain_loss, "gradient of router.weight has changed during the forward or loss_fn"),
    (None, ChunkedLoss, "gradient of head.weight has changed during the forward or loss_fn"),
]


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.ZBH1], ids=lambda one: one.rule)
@pytest.mark.parametrize("stage, make_loss, message", UNSCALED)
def test_what_nobody_has_scaled_is_refused(stage: Any, make_loss: Any, message: str, schedule: Any) -> None:
    with pytest.raises(StageError, match=message) as caught:
        trained(stage, make_loss, schedule, one)
    assert "bpipe.loss_scale()" in str(caught.value) and "0.25" in str(caught.value)


@pytest.mark.parametrize("stage, make_loss, message", [case for case in UNSCALED if case[0] is not InTheBackward])
def test_what_is_scaled_by_hand_looks_the_same(stage: Any, make_loss: Any, message: str) -> None:
    """Its gradients would be right, so that the message says what to write instead."""
    with pytest.raises(StageError, match=message) as caught:
        trained(stage, make_loss, bpipe.OneFOneB, lambda: 1 / M)
    assert "also where you divide it by the number of microbatches yourself (in place of that)" in str(caught.value)


@pytest.mark.parametrize("stage, make_loss", [(stage, make_loss) for stage, make_loss, _ in UNSCALED])
@pytest.mark.parametrize("options", [{"m": 1}, {"scale_grads": False}], ids=str)
def test_where_losses_count_whole_nothing_has_to_be_scaled(stage: Any, make_loss: Any, options: dict[str, Any]) -> None:
    assert trained(stage, make_loss, bpipe.OneFOneB, one, **options)


def test_a_function_may_hand_on_a_gradient_of_one() -> None:
    """Whose loss is a sum over m microbatches times m, and begins with 1: nothing is brought in."""

    class Passing(Base):
        def joined(self, x: torch.Tensor) -> torch.Tensor:
            return Inject.apply(x, self.router(x).detach().sum())

    got = trained(Passing, lambda _: lambda output, target: M * output.sum(), bpipe.OneFOneB, one)
    assert got


def test_functions_of_torch_run_once() -> None:
    """A reentrant checkpoint runs a backward within its own, here one that returns ones and gives the bias its gradient."""
    x, bias, seen = torch.ones(4, requires_grad=True), nn.Parameter(torch.zeros(4)), list[float]()
    bias.register_hook(lambda gradient: seen.append(gradient[0].item()))
    y = checkpoint(lambda x: 2 * x + bias, x, use_reentrant=True)
    LossScale(0.25).watch([GradientEdge(y.grad_fn, 0)], "here")
    y.backward(torch.full([4], 0.5))
    assert (x.grad == 1).all() and seen == [0.5]


def test_what_has_no_backward_is_dropped_at_once() -> None:
    """As where a half of a backward goes round it: the watch makes no cycle that only the garbage collector would find."""
    x = torch.randn(4, requires_grad=True)
    auxiliary = x * 2
    saved = weakref.ref(auxiliary)
    y = InjectLater.apply(x, auxiliary, one)
    LossScale(0.25).watch([GradientEdge(y.grad_fn, 0)], "here")
    gc.disable()
    try:
        del y, auxiliary
        assert saved() is None
    finally:
        gc.enable()


def test_the_loss_of_a_sequence_in_slices_has_a_factor() -> None:
    """A stage that takes slices has none, nor has the loss of one slice, before it is known what it is divided by."""
    asked = list[float]()

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        asked.append(bpipe.loss_scale())
        return nn.functional.mse_loss(output, target)

    def of_slices(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return loss_fn(output, target), 1

    class Stage(nn.Module):
        def __init__(self, *, asks: bool) -> None:
            super().__init__()
            self.layer, self.asks = nn.Linear(4, 4), asks

        def forward(self, x: torch.Tensor, past: Any = None) -> Any:
            return self.layer(x) * (bpipe.loss_scale() if self.asks else 1), None

    def step(*, asks: bool, **options: Any) -> None:
        asked.clear()
        loopback = bpipe.Loopback(2)
        stages = [bpipe.PipelineStage(Stage(asks=asks), i, 2, "cpu", group=loopback.rank(i)) for i in range(2)]
        schedules = [bpipe.Seq1F1B(stage, 2, slices=2, **{"loss_fn": loss_fn, **options}) for stage in stages]
        loopback.step(schedules, torch.randn(4, 6, 4), target=torch.randn(4, 6, 4))

    step(asks=False)
    assert asked == [0.5, 0.5]
    with pytest.raises(ConfigurationError, match="cut into slices"):
        step(asks=True)
    for scale_grads in (True, False):
        with pytest.raises(ConfigurationError, match="cut into slices"):
            step(asks=False, loss_fn=of_slices, scale_grads=scale_grads, options=bpipe.Options(loss_of_slices=True))
    step(asks=True, scale_grads=False)
    assert asked == [1.0, 1.0]


def test_outside_of_a_step_the_factor_is_one() -> None:
    assert bpipe.loss_scale() == 1
    trained(ByFunction, plain_loss, bpipe.OneFOneB)
    with pytest.raises(StageError):
        trained(ByFunction, plain_loss, bpipe.OneFOneB, one)
    assert bpipe.loss_scale() == 1


def test_a_fill_job_is_no_part_of_the_step_beside_it() -> None:
    with LossScale(0.25).in_force():
        assert (bpipe.loss_scale(), Fence(torch.device("cpu")).run(bpipe.loss_scale), bpipe.loss_scale()) == (0.25, 1, 0.25)


class Compiled(Base):
    compiled = 0

    def __init__(self, factor: Factor) -> None:
        super().__init__(factor)
        self.run = torch.compile(lambda x: self.layer(x) * bpipe.loss_scale(), backend=self.backend, fullgraph=True)

    @classmethod
    def backend(cls, module: Any, inputs: Any) -> Any:
        cls.compiled += 1
        return module.forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(x)


class SlicedLinear(nn.Linear):
    def forward(self, x: torch.Tensor, past: Any = None) -> Any:
        return super().forward(x), None


def num_compiled(rank: int) -> int:
    trained(Compiled, plain_loss, bpipe.OneFOneB)
    return Compiled.compiled


def test_a_compiled_stage_asks_without_a_break() -> None:
    """And is compiled once a stage, not for each microbatch; in a process of its own, so that nothing compiled is left behind."""
    assert run_ranks(num_compiled, 1) == [2]


def losses_of_compiled(rank: int, num_ranks: int) -> list[float] | str:
    """Of sequences in slices, in a loopback: what it returns is its factor."""
    loss = torch.compile(lambda output, target: 0 * (output * target).mean() + bpipe.loss_scale(), backend="eager", fullgraph=True)
    loopback, found, x = bpipe.Loopback(num_ranks), list[torch.Tensor](), torch.randn(4, 6, 4)
    stages = [bpipe.PipelineStage(SlicedLinear(4, 4), i, num_ranks, "cpu", group=loopback.rank(i)) for i in range(num_ranks)]
    try:
        loopback.step([bpipe.Seq1F1B(stage, 2, loss, slices=2) for stage in stages], x, target=x, losses=found)
    except torch._dynamo.exc.Unsupported as error:  # with the ConfigurationError in its text
        return str(error)
    return [one.item() for one in found]


def test_a_compiled_loss_of_slices_asks_without_a_break() -> None:
    """With other ranks in its process, one of which has no factor, it cannot tell whose it is."""
    assert run_ranks(losses_of_compiled, 1, 1) == [[0.5, 0.5]]
    assert "cut into slices" in run_ranks(losses_of_compiled, 1, 2)[0]
