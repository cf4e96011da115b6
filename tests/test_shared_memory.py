"""Modules whose gradients, outputs or inputs share memory with what others still use: right to the bit, or a clear error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from tests.models import mse
from tests.over import Over, pipeline

WIDTH, M = 8, 8

pytestmark = pytest.mark.usefixtures("one_thread")

WHOLE = [(bpipe.OneFOneB, 4), (bpipe.GPipe, 4), (bpipe.Interleaved1F1B, 2), (bpipe.BreadthFirst, 2), (bpipe.BreadthFirst, 1)]
SPLIT = [(bpipe.ZBH1, 4), (bpipe.ZBH2, 4), (bpipe.ZBV, 2), (bpipe.VMin, 2), (bpipe.DualPipeV, 2)]


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.index = index
        self.linear, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


def batch(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, M, *(shape or (WIDTH,)), generator=generator)
    return x, y


def gradients(schedule: Any, num_ranks: int, modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    modules = copy.deepcopy(modules)
    loopback, schedules = pipeline(schedule, modules, M, mse, num_ranks)
    loopback.step(schedules, x, target=y, return_outputs=False)
    return [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def of_one_process(modules: list[nn.Module], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    """Each microbatch's gradients by themselves, added in order: so that nothing shares memory."""
    parameters = [p for module in modules for p in module.parameters()]
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for xi, yi in zip(x.split(1), y.split(1)):
        loss = mse(nn.Sequential(*modules)(xi), yi)
        found = torch.autograd.grad(loss, parameters, torch.full_like(loss, 1 / M), allow_unused=True)
        sums = [s if g is None else g.clone() if s is None else s + g for s, g in zip(sums, found)]
    return [s for s in sums if s is not None]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


# A parameter's gradient that is a view of the stage's.


class AddsPositions(Stage):
    """With one row a microbatch, the gradient of the positions is a view of the input's."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.positions = nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x + self.positions.unsqueeze(0)))


class AddsPositionsFirst(AddsPositions):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.positions.unsqueeze(0) + 0 * self.linear(x)


class AddsBias(Stage):
    """The gradient of the bias is a view of the output's, which waits for the weight half."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(x)) + self.bias.unsqueeze(0)


@pytest.mark.parametrize("kind, shape", [(AddsPositions, (4, WIDTH)), (AddsPositionsFirst, (4, WIDTH)), (AddsBias, (WIDTH,))])
@pytest.mark.parametrize("schedule, num_ranks", [*WHOLE, *SPLIT])
def test_gradients_that_are_views_of_others(schedule: Any, num_ranks: int, kind: Any, shape: tuple[int, ...]) -> None:
    modules, (x, y) = [kind(index) for index in range(4)], batch(*shape)
    expected = of_one_process(modules, x, y)
    assert equal(gradients(schedule, num_ranks, modules, x, y), expected)
    assert equal(
        gradients(Over(schedule, {"budget": "lowest", "options": bpipe.Options(parts=2)}), num_ranks, modules, x, y), expected
    )


# What a stage hands to the next one on its rank.


class Residual(Stage):
    """Passes on (hidden, residual), which are one tensor at first, and adds to the residual in place."""

    def forward(self, *args: torch.Tensor) -> Any:
        if self.index == 0:
            hidden = self.linear(args[0])
            return hidden, hidden
        hidden, residual = args
        residual += torch.tanh(self.linear(hidden))
        return (residual, residual) if self.index < 3 else residual


class PassesOn(Stage):
    """Stage 0 saves its output, stage 1 returns it as it is, stage 2 changes it in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.index == 0:
            return torch.tanh(self.linear(x))
        if self.index == 1:
            return x
        return self.linear(x.mul_(2) if self.index == 2 else x)


@pytest.mark.parametrize("kind", [Residual, PassesOn])
@pytest.mark.parametrize("schedule, num_ranks", [*WHOLE[2:], *SPLIT[2:]])
def test_neighbours_on_a_rank_are_as_far_apart_as_others(schedule: Any, num_ranks: int, kind: Any) -> None:
    modules, (x, y) = [kind(index) for index in range(4)], batch()
    expected = gradients(bpipe.OneFOneB, 4, modules, x, y)
    assert equal(gradients(schedule, num_ranks, modules, x, y), expected)


def test_evaluation_hands_on_the_same() -> None:
    modules, (x, _) = [Residual(index) for index in range(4)], batch()
    outputs = []
    for num_ranks in (4, 2):
        loopback, schedules = pipeline(bpipe.OneFOneB if num_ranks == 4 else bpipe.BreadthFirst, modules, M, mse, num_ranks)
        outputs.append(loopback.eval(schedules, x))
    assert torch.equal(*outputs)


# Backwards in two halves.


def halve(gradient: torch.Tensor) -> None:
    """A hook of the kind that torch's documentation forbids."""
    gradient.mul_(0.5)


class Hooked(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.linear(x)
        if hidden.requires_grad:
            hidden.register_hook(halve)
        return self.second(torch.tanh(hidden))


def test_a_hook_that_changes_a_gradient_in_place_counts_once() -> None:
    modules, (x, y) = [Hooked(index) for index in range(4)], batch()
    expected = of_one_process(modules, x, y)
    assert all(equal(gradients(schedule, 4, modules, x, y), expected) for schedule in (bpipe.OneFOneB, bpipe.ZBH1))


class Deepens(Stage):
    """How often a layer is used depends on the data: its gradient waits for the weight half only where that is once."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1 + int(x.detach().abs().sum().mul(10)) % 3):
            x = torch.tanh(self.linear(x))
        return self.second(x)


class SometimesRecomputed(Stage):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1

        def inner(x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.linear(x))

        return self.second(checkpoint(inner, x, use_reentrant=False) if self.calls % 3 == 0 else inner(x))


@pytest.mark.parametrize("kind", [Deepens, SometimesRecomputed])
@pytest.mark.parametrize("schedule, num_ranks", SPLIT)
def test_gradients_add_up_in_one_order_even_if_graphs_differ(schedule: Any, num_ranks: int, kind: Any) -> None:
    modules, (x, y) = [kind(index) for index in range(4)], batch()
    assert equal(gradients(schedule, num_ranks, modules, x, y), gradients(bpipe.OneFOneB, 4, modules, x, y))


class OwnCheckpointFunction(torch.autograd.Function):
    """As training libraries have: its backward runs another, which autograd allows in a backward of the whole graph alone."""

    @staticmethod
    def forward(ctx: Any, function: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if not torch.autograd._is_checkpoint_valid():
            raise RuntimeError("Checkpointing is not compatible with .grad()")
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, x.grad


class Recomputed(Stage):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(OwnCheckpointFunction.apply(lambda x: torch.tanh(self.linear(x)), x))


def test_checkpoints_of_other_libraries() -> None:
    modules, (x, y) = [Recomputed(index) for index in range(4)], batch()
    expected = gradients(bpipe.OneFOneB, 4, modules, x, y)
    assert equal(gradients(bpipe.ZBH1, 4, modules, x, y), expected)
