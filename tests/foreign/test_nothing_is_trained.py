"""Where nothing would be trained: refused, or warned of, before an optimizer steps; and where it only looks so, trained."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError, ConfigurationError, StageError
from tests.ranks import run_ranks

M, B, W = 4, 8, 4


class Cuts(nn.Module):
    """A stage whose output needs no gradient, for one of many reasons."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(W, W), how
        self.register_buffer("table", torch.randn(16, W))
        if how == "a frozen inner part under no_grad by a decorator":
            self.linear.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return {
            "argmax": lambda: self.table[y.argmax(-1)],
            "a round trip through numpy": lambda: torch.from_numpy(y.detach().numpy().copy()),
            "a round trip through a list": lambda: torch.tensor(y.tolist()),
            "comparison": lambda: (y > 0).float(),
            "torch.inference_mode within": lambda: _in_inference(self.linear, x),
            "no_grad as a decorator": lambda: _no_grad(self.linear, x),
            "integers, quantised": lambda: (y * 8).round().to(torch.int8).float() / 8,
            "a Function that marks its output as not differentiable": lambda: _Marked.apply(y),
            "a sampled token's embedding": lambda: self.table[torch.multinomial(y.softmax(-1), 1).squeeze(-1)],
            "a frozen inner part under no_grad by a decorator": lambda: _no_grad(self.linear, x),
        }[self.how]()


def _in_inference(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        y = layer(x)
    return y.clone()


@torch.no_grad()
def _no_grad(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x)  # type: ignore[no-any-return]


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        ctx.mark_non_differentiable(y)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0]


CUTS = [
    "argmax",
    "a round trip through numpy",
    "a round trip through a list",
    "comparison",
    "torch.inference_mode within",
    "no_grad as a decorator",
    "integers, quantised",
    "a Function that marks its output as not differentiable",
    "a sampled token's embedding",
    "a frozen inner part under no_grad by a decorator",
]


def _pipeline(
    modules: list[nn.Module], loss_fn: Any = F.mse_loss, schedule: type[bpipe.Schedule] = bpipe.OneFOneB, **options: Any
) -> tuple[bpipe.Loopback, list[Any]]:
    loopback = bpipe.Loopback(len(modules))
    stages = [bpipe.PipelineStage(one, i, len(modules), "cpu", loopback.rank(i)) for i, one in enumerate(modules)]
    return loopback, [schedule(stage, M, loss_fn=loss_fn, **options) for stage in stages]


def _grads(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.ZBH1])
@pytest.mark.parametrize("how", CUTS)
def test_a_stage_that_cuts_off_the_gradients_of_earlier_ones_is_refused(how: str, schedule: type[bpipe.Schedule]) -> None:
    """Whatever cuts the graph in the middle, the stages before it would train nothing: an error that names the stage."""
    torch.manual_seed(0)
    modules = [nn.Linear(W, W), Cuts(how), nn.Linear(W, W)]
    loopback, ranks = _pipeline(modules, schedule=schedule)
    x = torch.randn(B, W)
    with pytest.raises(StageError, match=r"stage 1"):
        loopback.step(ranks, x, target=x)


@pytest.mark.parametrize("how", CUTS[:4])
def test_the_same_stage_behind_frozen_ones_trains_what_follows(how: str) -> None:
    """Where nothing before wants a gradient, a stage may cut: the last stage's gradients are those of a loop."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(W, W).requires_grad_(False), Cuts(how), nn.Linear(W, W)]
    right = nn.Linear(W, W)
    right.load_state_dict(modules[2].state_dict())
    loopback, ranks = _pipeline(modules)
    x = torch.randn(B, W)
    loopback.step(ranks, x, target=x)
    for rows in x.chunk(M):
        with torch.no_grad():
            hidden = modules[1](modules[0](rows))
        (F.mse_loss(right(hidden), rows) / M).backward()
    assert torch.allclose(modules[2].weight.grad, right.weight.grad, atol=1e-6)  # type: ignore[arg-type, union-attr]


class Straight(nn.Module):
    """Rounds, and lets the gradient through, as vector quantisation does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y + (y.round() - y).detach()


class Sometimes(nn.Module):
    """Cuts in one microbatch of several, as a gate does that takes another path."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(W, W), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x).detach() if self.calls % M == 1 else self.linear(x)


class Reversed(nn.Module):
    """A gradient that a Function makes in spite of a detached output."""

    class _Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.detach().sign()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(W, W)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._Again.apply(self.linear(x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Straight, Sometimes, Reversed])
def test_a_stage_that_only_looks_as_if_it_cut_trains_as_in_a_loop(make: Callable[[], nn.Module]) -> None:
    """A straight-through estimator, a gate that cuts one microbatch, a sign with a gradient of its own."""
    torch.manual_seed(0)
    modules = [nn.Linear(W, W), make(), nn.Linear(W, W)]
    torch.manual_seed(0)
    right = [nn.Linear(W, W), make(), nn.Linear(W, W)]
    loopback, ranks = _pipeline(modules)
    x = torch.randn(B, W)
    loopback.step(ranks, x, target=x)
    for rows in x.chunk(M):
        (F.mse_loss(nn.Sequential(*right)(rows), rows) / M).backward()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(_grads(modules), _grads(right), strict=True))


LOSSES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "accuracy": lambda y, t: (y.argmax(-1) == t.argmax(-1)).float().mean(),
    "a loss that was detached for a log": lambda y, t: F.mse_loss(y, t).detach(),
    "a number": lambda y, t: F.mse_loss(y, t).item(),
    "computed on numpy": lambda y, t: torch.tensor(float(((y.detach().numpy() - t.numpy()) ** 2).mean())),
    "under no_grad": torch.no_grad()(lambda y, t: F.mse_loss(y, t)),
    "of the target alone": lambda y, t: t.square().mean(),
    "of the inputs that it kept": lambda y, t: torch.zeros(()),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_without_a_gradient_is_refused(name: str) -> None:
    """No backward could run: an error on the last stage, not a step without gradients."""
    torch.manual_seed(0)
    modules: list[nn.Module] = [nn.Linear(W, W), nn.Linear(W, W)]
    loopback, ranks = _pipeline(modules, LOSSES[name])
    x = torch.randn(B, W)
    with pytest.raises((BPipeError, RuntimeError), match=r"(?i)loss|grad"):
        loopback.step(ranks, x, target=x)
    assert not _grads(modules)


class LogCapture(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage()


def _without_a_loss(how: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Linear(W, W), torch.randn(B, W)
    stage = bpipe.PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    if how == "target_mbs":
        bpipe.GPipe(stage, M).step(x, target_mbs=list(x.chunk(M)))
    if how == "loss_kwargs":
        bpipe.OneFOneB(stage, M).step(x, loss_kwargs={"weight": x})
    if how == "an empty list of losses":
        losses: list[torch.Tensor] = []
        bpipe.OneFOneB(stage, M).step(x, losses=losses)
    if how == "Balanced with an optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        bpipe.Balanced(bpipe.OneFOneB(stage, M), optimizer=optimizer).step(x)
    if how == "optimizer steps in the waits":
        schedule = bpipe.OneFOneB(stage, M)
        schedule.fill = bpipe.fill.OptimizerSteps({0: torch.optim.SGD(module.parameters(), lr=0.1)})
        schedule.step(x)
    if how == "backward of the outputs":
        bpipe.OneFOneB(stage, M).step(x).sum().backward()
    if how == "auto with an optimizer":
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        bpipe.auto(stage, M, optimizer=optimizer).step(x, target=x)


@pytest.mark.parametrize(
    "how",
    [
        "target_mbs",
        "loss_kwargs",
        "an empty list of losses",
        "Balanced with an optimizer",
        "backward of the outputs",
        "auto with an optimizer",
    ],
)
def test_a_forgotten_loss_function_is_refused_whoever_shows_that_training_was_meant(how: str) -> None:
    """Without `loss_fn` a step evaluates: whatever says that it should train makes it an error that names `loss_fn`."""
    with pytest.raises(ConfigurationError, match="loss_fn"):
        _without_a_loss(how)


def _streams(rank: int, learns: list[bool], accumulates: bool) -> list[bool]:
    """For each tick: whether this stage's weights (or its gradients) have changed."""
    torch.manual_seed(rank)
    module = nn.Linear(W, W)
    optimizer = None if accumulates else torch.optim.SGD(module.parameters(), lr=0.1)
    stream = bpipe.Stream(bpipe.PipelineStage(module, rank, 3, "cpu"), F.mse_loss, optimizer)
    changed = []
    for learn in learns:
        before = module.weight.detach().clone(), None if module.weight.grad is None else module.weight.grad.clone()
        x = torch.randn(2, W, generator=torch.Generator().manual_seed(len(changed)))
        stream.push(x, target=1 - x, learn=learn)
        grad = module.weight.grad
        same_grad = grad is None if before[1] is None else grad is not None and torch.equal(before[1], grad)
        changed.append(not same_grad if accumulates else not torch.equal(before[0], module.weight))
    stream.drain()
    stream.close()
    return changed


ORDERS: dict[str, list[bool]] = {
    "one tick without": [True] * 5 + [False] + [True] * 8,
    "two in a row": [True] * 5 + [False] * 2 + [True] * 8,
    "every other": [True, False] * 8,
    "at the very beginning": [False] * 4 + [True] * 8,
    "longer than the pipeline": [True] * 5 + [False] * 6 + [True] * 8,
    "while it fills": [True, False] + [True] * 10,
}


def _all_streams(rank: int, accumulates: bool) -> dict[str, list[bool]]:
    return {name: _streams(rank, learns, accumulates) for name, learns in ORDERS.items()}


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_stream_learns_on_all_stages_after_ticks_without_learning(accumulates: bool) -> None:
    """Wherever ticks that do not learn fall, every stage learns again behind them, and none learns in them."""
    for ticks in run_ranks(_all_streams, 3, accumulates):
        for name, learns in ORDERS.items():
            assert not any(changed for changed, learn in zip(ticks[name], learns) if not learn), name
            assert any(ticks[name][-2:]) and sum(ticks[name]) >= sum(learns) // 2 - 2, name
