"""Gradients that do not come through the returned loss: 1/m of each, or a refusal by name before an optimizer sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError

M = 4


class Inject(torch.autograd.Function):
    """Brings in the gradient of an auxiliary loss, of any factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], torch.full((), ctx.factor), None


class InjectAndSave(torch.autograd.Function):
    """The auxiliary loss is saved, and gets a gradient of ones like it, as DeepSeek's AddAuxiliaryLoss does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
        ctx.dtype, ctx.wants = auxiliary.dtype, auxiliary.requires_grad
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], torch.ones(1, dtype=ctx.dtype).squeeze() if ctx.wants else None


class ScaledGradient(torch.autograd.Function):
    """Adds L2 decay of an activation to its gradient, a gradient that no loss has."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, decay: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.decay = decay
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradients[0] + ctx.decay * x, None


def _auxiliary(x: torch.Tensor) -> torch.Tensor:
    return x.square().mean()


class WithHook(nn.Linear):
    """An activation regulariser whose gradient a hook on the output adds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        y.register_hook(lambda g: g + 2 * y.detach() / y.numel() * bpipe.loss_scale())
        return y


class WithBackwardHook(nn.Module):
    """A full backward hook that adds to the gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.tap = nn.Linear(4, 4), nn.Identity()
        self.seen: list[torch.Tensor] = []
        self.tap.register_full_backward_hook(self._add)

    def _add(self, module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        return (grad_input[0] + 0.01 * bpipe.loss_scale(),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tap(self.linear(x))


class WithParameterHook(nn.Linear):
    """Weight decay that a hook on the parameter adds in each microbatch."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.weight.register_hook(lambda g: g + 0.1 * self.weight.detach() * bpipe.loss_scale())


class WithDecay(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledGradient.apply(super().forward(x), 0.1 * bpipe.loss_scale())  # type: ignore[no-any-return]


class WithInjection(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return Inject.apply(y, _auxiliary(y), bpipe.loss_scale())  # type: ignore[no-any-return]


class InBackward(nn.Linear):
    """Asks for the factor in the backward itself, as Megatron's scaler does through a class attribute."""

    class _Scaler(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, auxiliary: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            return gradients[0], torch.ones(()) * bpipe.loss_scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self._Scaler.apply(y, _auxiliary(y))  # type: ignore[no-any-return]


class Recomputed(nn.Module):
    """Injects within a checkpoint, whose second forward asks for the factor in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithInjection(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Compiled(nn.Module):
    """The factor is read in a function that vmap and functional_call run."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = WithInjection(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.inner, dict(self.inner.named_parameters()), (x,))  # type: ignore[no-any-return]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "a Function whose factor is an argument": lambda: WithInjection(4, 4),
    "a Function that asks in its backward": lambda: InBackward(4, 4),
    "a hook on an activation": lambda: WithHook(4, 4),
    "a full backward hook": WithBackwardHook,
    "a hook on a parameter": WithParameterHook,
    "a Function that changes the gradient that passes": lambda: WithDecay(4, 4),
    "within a checkpoint": Recomputed,
    "through functional_call": Compiled,
}


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def _train(modules: list[nn.Module], schedule: type[bpipe.Schedule]) -> list[torch.Tensor]:
    loopback = bpipe.Loopback(2)
    held = [[0, 3], [1, 2]] if schedule is bpipe.ZBV else [[0, 2], [1, 3]]
    if schedule is bpipe.OneFOneB:
        modules, held = [nn.Sequential(*modules[:2]), nn.Sequential(*modules[2:])], [[0], [1]]
    stages = [[bpipe.PipelineStage(modules[s], s, len(modules), "cpu", loopback.rank(r)) for s in of] for r, of in enumerate(held)]
    ranks = [schedule(of_rank, M, loss_fn=_loss) for of_rank in stages]
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    loopback.step(ranks, x, target=1 - x)
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def _model(make: Callable[[], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), make(), nn.Linear(4, 4), make()]


class _Plain:
    """A plain loop, which gives each microbatch's loss, and `bpipe.loss_scale`, its share by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch

    def train(self, modules: list[nn.Module]) -> list[torch.Tensor]:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
        with self._patch.context() as patch:
            patch.setattr(bpipe, "loss_scale", lambda: 1 / M)
            for rows in x.chunk(M):
                (_loss(nn.Sequential(*modules)(rows), 1 - rows) / M).backward()
        return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.Interleaved1F1B, bpipe.ZBV])
@pytest.mark.parametrize("name", KINDS)
def test_what_is_multiplied_by_the_factor_is_as_in_a_plain_loop(
    name: str, schedule: type[bpipe.Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, `bpipe.loss_scale()`, makes every way to bring in gradients right, in whole and in split backwards."""
    got, right = _train(_model(KINDS[name]), schedule), _Plain(monkeypatch).train(_model(KINDS[name]))
    assert len(got) == len(right)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, right))


class Unasked(nn.Linear):
    """Brings in the whole gradient of its auxiliary loss, in one of several ways, and asks for no factor."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 4)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.how == "a Function that saves it":
            return InjectAndSave.apply(y, _auxiliary(y))  # type: ignore[no-any-return]
        if self.how == "backward of it in the forward":
            _auxiliary(super().forward(x.detach())).backward()
        if self.how == "autograd.grad of it, added to .grad":
            (gradient,) = torch.autograd.grad(_auxiliary(super().forward(x.detach())), self.weight)
            self.weight.grad = gradient if self.weight.grad is None else self.weight.grad + gradient
        if self.how == "autograd.backward with inputs":
            torch.autograd.backward([_auxiliary(super().forward(x.detach()))], inputs=[self.weight, self.bias])
        if self.how == "two auxiliary losses in one Function":
            return InjectAndSave.apply(InjectAndSave.apply(y, _auxiliary(y)), y.abs().mean())  # type: ignore[no-any-return]
        return y


UNASKED = [
    "a Function that saves it",
    "backward of it in the forward",
    "autograd.grad of it, added to .grad",
    "autograd.backward with inputs",
    "two auxiliary losses in one Function",
]


@pytest.mark.parametrize("how", UNASKED)
def test_a_whole_gradient_that_nobody_scales_is_refused(how: str) -> None:
    """A Function that brings in ones, and a backward inside a forward, miss the 1/m: refused, with `loss_scale` as the way out."""
    with pytest.raises(BPipeError, match="loss_scale"):
        _train(_model(lambda: Unasked(how)), bpipe.OneFOneB)


class ChunkedHead(nn.Module):
    """A head whose cross entropy runs backward chunk by chunk inside the loss, in one of the ways of published kernels."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(8, 4) * 0.1), how

    def loss(self, hidden: torch.Tensor, target: torch.Tensor, factor: float) -> torch.Tensor:
        if self.how == "Liger: gradients made in the forward, given out in the backward":
            return _Fused.apply(hidden, self.weight, target)  # type: ignore[no-any-return]
        total, gradient = hidden.new_zeros(()), torch.zeros_like(hidden)
        for rows, goals, into in zip(hidden.detach().chunk(2), target.chunk(2), gradient.chunk(2)):
            rows.requires_grad_()
            loss = F.cross_entropy(rows @ self.weight.t(), goals, reduction="sum") / len(target)
            (loss * factor).backward()
            assert rows.grad is not None
            into.copy_(rows.grad)
            total += loss.detach()
        return _GivesOut.apply(hidden, total, gradient / factor)  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            h, w = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            loss = F.cross_entropy(h @ w.t(), target)
            ctx.save_for_backward(*torch.autograd.grad(loss, (h, w)))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        h, w = ctx.saved_tensors
        return h * gradients[0], w * gradients[0], None


class _GivesOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gradient)
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return ctx.saved_tensors[0] * gradients[0], None, None


def _head_step(how: str, factor: Callable[[], float]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    trunk, head, loopback = nn.Linear(4, 4), ChunkedHead(how), bpipe.Loopback(1)
    stage = bpipe.PipelineStage(trunk, 0, 1, "cpu", loopback.rank(0))
    schedule = bpipe.OneFOneB(stage, M, loss_fn=lambda hidden, target: head.loss(hidden, target, factor()))
    schedule.step(torch.randn(16, 4), target=torch.randint(8, (16,)), return_outputs=False)
    return [trunk.weight.grad, head.weight.grad]


def _head_plain() -> list[torch.Tensor]:
    torch.manual_seed(0)
    trunk, head = nn.Linear(4, 4), ChunkedHead("")
    x, target = torch.randn(16, 4), torch.randint(8, (16,))
    F.cross_entropy(trunk(x) @ head.weight.t(), target).backward()
    return [trunk.weight.grad, head.weight.grad]


def test_a_fused_head_that_gives_its_gradients_out_in_the_backward_is_right_as_it_stands() -> None:
    """Liger's kernel makes gradients in the loss and multiplies them by what arrives, so the factor is in them."""
    got = _head_step("Liger: gradients made in the forward, given out in the backward", bpipe.loss_scale)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _head_plain()))


def test_a_head_that_runs_backward_chunk_by_chunk_is_right_with_the_factor_and_refused_without() -> None:
    """A sum over chunks whose backward runs in the loss: right in one line, and refused if it asks for no factor."""
    got = _head_step("chunks", bpipe.loss_scale)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(got, _head_plain()))
    with pytest.raises(BPipeError, match="loss_scale"):
        _head_step("chunks", lambda: 1.0)


def test_the_factor_is_that_of_the_step_under_way() -> None:
    """With `scale_grads=False`, in an evaluation and behind a step it is 1; in nested training of another model, that one's."""
    seen: list[float] = []

    class Notes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(bpipe.loss_scale())
            return super().forward(x)

    for scale_grads, expected in ((True, 0.25), (False, 1.0)):
        stage = bpipe.PipelineStage(Notes(4, 4), 0, 1, "cpu", bpipe.Loopback(1).rank(0))
        schedule = bpipe.OneFOneB(stage, M, loss_fn=_loss, scale_grads=scale_grads)
        schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
        assert seen == [expected] * M
        seen.clear()
        with torch.no_grad():
            schedule.eval(torch.ones(8, 4))
        assert set(seen) == {1.0} or set(seen) == {expected}
        seen.clear()
        assert bpipe.loss_scale() == 1.0


class Trainer:
    """An object that is no module, with a head and a loss."""

    def __init__(self, head: ChunkedHead) -> None:
        self.parts = {"heads": [head]}

    def loss(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.parts["heads"][0].loss(hidden, target, 1.0)

    def __call__(self, hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.loss(hidden, target)


def _by_default(head: ChunkedHead) -> Any:
    def loss_fn(hidden: torch.Tensor, target: torch.Tensor, *, head: ChunkedHead = head) -> torch.Tensor:
        return head.loss(hidden, target, 1.0)

    return loss_fn


def _within_a_closure(head: ChunkedHead) -> Any:
    def inner(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return head.loss(hidden, target, 1.0)

    return lambda hidden, target: inner(hidden, target) * 1.0


HOLDERS: dict[str, Callable[[ChunkedHead], Any]] = {
    "a method of an object": lambda head: Trainer(head).loss,
    "an object that is called": Trainer,
    "a default": _by_default,
    "a function in a closure": _within_a_closure,
    "a partial": lambda head: functools.partial(lambda h, hidden, target: h.loss(hidden, target, 1.0), head),
    "a method of the head": lambda head: functools.partial(head.loss, factor=1.0),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_a_head_that_runs_backward_is_found_wherever_the_loss_has_it(name: str) -> None:
    """Its weights miss the 1/m, whatever leads from the loss function to them: refused in the first microbatch."""
    torch.manual_seed(0)
    trunk, head = nn.Linear(4, 4), ChunkedHead("chunks")
    stage = bpipe.PipelineStage(trunk, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    with pytest.raises(BPipeError, match="loss_scale"):
        bpipe.OneFOneB(stage, M, loss_fn=HOLDERS[name](head)).step(torch.randn(16, 4), target=torch.randint(8, (16,)))


def test_a_critic_that_the_loss_trains_and_clears_is_not_taken_for_one() -> None:
    """A discriminator with an optimizer of its own, whose gradients do not outlive the loss function, works."""
    torch.manual_seed(0)
    trunk, critic = nn.Linear(4, 4), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)

    def loss_fn(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        (critic(y.detach()) - critic(target)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            weight = critic.weight.clone()
        return -(y @ weight.t()).mean()

    stage = bpipe.PipelineStage(trunk, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    before = critic.weight.detach().clone()
    bpipe.OneFOneB(stage, M, loss_fn=loss_fn).step(torch.randn(16, 4), target=torch.randn(16, 4))
    assert not torch.equal(critic.weight, before)
