"""Hooks in backwards: each runs as often as in a single process, and sees and changes the same gradients, split backwards too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn import functional as F

from bpipe.errors import StageError
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M, pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS = 6, 3
SOME = ["1f1b", "zb_h1", "dualpipe_v"]
T = torch.Tensor


def batch(step: int) -> Batch:
    x, y = torch.randn(2, M * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
    return Batch((x,), y)


class Stage(nn.Module):
    """Two products; what hooks see is noted, and what they keep is looked at when a step is over."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[tuple[str, list[float]]] = []
        self.kept: list[T] = []
        self.hook()

    def see(self, name: str, *gradients: T | None) -> None:
        self.seen.append((name, [float("inf") if one is None else float(one.double().sum()) for one in gradients]))

    def hook(self) -> None:
        """Register what is registered once."""

    def between(self, x: T) -> T:
        return x

    def forward(self, x: T) -> T:
        return self.second(torch.tanh(self.between(self.first(x))))


class Scales(Stage):
    def between(self, x: T) -> T:
        x.register_hook(lambda gradient: self.see("scales", gradient))
        x.register_hook(lambda gradient: gradient * 0.5)
        return x


class Retains(Stage):
    def between(self, x: T) -> T:
        x.retain_grad()
        self.kept.append(x)
        return x


class All(Stage):
    def between(self, x: T) -> T:
        y = x * 2
        register_multi_grad_hook([x, y], lambda gradients: self.see("all", *gradients))
        return x + y


class First(Stage):
    def between(self, x: T) -> T:
        y = x * 2
        register_multi_grad_hook([x, y], lambda gradient: self.see("any", gradient), mode="any")
        return x + y


class AllParameters(Stage):
    def hook(self) -> None:
        register_multi_grad_hook(list(self.parameters()), lambda gradients: self.see("parameters", *gradients))


class AnyParameter(Stage):
    def hook(self) -> None:
        register_multi_grad_hook(list(self.parameters()), lambda gradient: self.see("parameter", gradient), mode="any")


class Modules(Stage):
    def hook(self) -> None:
        self.first.register_full_backward_hook(lambda _, given, arriving: self.see("module", *given, *arriving))
        self.second.register_full_backward_hook(lambda _, given, arriving: (given[0] * 2,))
        self.second.register_full_backward_pre_hook(lambda _, arriving: (arriving[0] * 3,))


class OldModules(Stage):
    def hook(self) -> None:
        self.first.register_backward_hook(lambda _, given, arriving: self.see("module", *given, *arriving))


class Nodes(Stage):
    """A hook on all that a product's backward computes changes the gradients of weights, too."""

    def between(self, x: T) -> T:
        assert x.grad_fn is not None and x.grad_fn.name() == "AddmmBackward0"
        x.grad_fn.register_prehook(lambda arriving: (arriving[0] * 2,))
        x.grad_fn.register_hook(lambda given, arriving: self.see("node", *given, *arriving))
        x.grad_fn.register_hook(lambda given, _: tuple(None if one is None else one * 0.5 for one in given))
        return x


class Prehooks(Stage):
    def between(self, x: T) -> T:
        assert x.grad_fn is not None
        x.grad_fn.register_prehook(lambda arriving: self.see("before", *arriving))
        x.grad_fn.register_prehook(lambda arriving: (arriving[0] * 2,))
        return x


class Leaves(Stage):
    def hook(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.see(name, gradient))
            parameter.register_hook(lambda gradient: gradient * 2)
            parameter.register_post_accumulate_grad_hook(lambda one, name=name: self.see("after " + name, one.grad))


class BesideTheTrunk(Stage):
    """Hooks between a product and its weight."""

    def forward(self, x: T) -> T:
        weight = self.first.weight * 2
        weight.register_hook(lambda gradient: self.see("weight", gradient))
        weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        assert weight.grad_fn is not None
        weight.grad_fn.register_hook(lambda given, arriving: self.see("times two", *given[:1], *arriving))
        return self.second(torch.tanh(F.linear(x, weight)))


class InPlace(Stage):
    """As torch asks not to do, and as it works in one backward."""

    def between(self, x: T) -> T:
        if x.requires_grad:
            x.register_hook(halve)
        return x


def halve(gradient: T) -> None:
    gradient.mul_(0.5)


class SeveralOutputs(Stage):
    def between(self, x: T) -> T:
        q, k = (x @ self.second.weight).chunk(2, -1)
        q.register_hook(lambda gradient: self.see("q", gradient))
        k.retain_grad()
        self.kept.append(k)
        return torch.cat([k, q.detach()], -1) + x


class Unused(Stage):
    """No gradient comes to some hooks."""

    def between(self, x: T) -> T:
        unused = self.second(x)
        unused.register_hook(lambda gradient: self.see("unused", gradient))
        unused.retain_grad()
        self.kept.append(unused)
        return x


class Checkpointed(Stage):
    def between(self, x: T) -> T:
        x.register_hook(lambda gradient: self.see("outside", gradient))
        return torch.utils.checkpoint.checkpoint(self.inside, x, use_reentrant=False)

    def inside(self, x: T) -> T:
        y = self.second(x)
        y.register_hook(lambda gradient: gradient * 3)
        return y


KINDS = [
    *(Scales, Retains, All, First, AllParameters, AnyParameter, Modules, OldModules, Nodes, Prehooks, Leaves),
    *(BesideTheTrunk, InPlace, SeveralOutputs, Unused, Checkpointed),
]


def seen_by(modules: list[Any]) -> list[Any]:
    """What hooks of each stage have seen since the last time; microbatches may come in another order, their halves do."""
    found = [sorted(module.seen) for module in modules]
    kept = [[None if one.grad is None else one.grad.tolist() for one in module.kept] for module in modules]
    for module in modules:
        module.seen.clear()
        module.kept.clear()
    return [*found, *kept]


@pytest.mark.filterwarnings("ignore:(Using a non-f|F)ull backward hook")
@pytest.mark.parametrize("kind", KINDS)
def test_hooks_run_as_often_and_see_the_same(kind: type[Stage]) -> None:
    runs: list[list[Any]] = []
    case = Case(
        lambda: [kind() for _ in range(NUM_STAGES)],
        batch,
        F.mse_loss,
        steps=1,
        after=lambda modules, step: runs.append(seen_by(modules)),
    )
    names = list(SCHEDULES) if kind is Scales else SOME
    case.check(names)
    alone, *others = runs
    assert any(alone) or kind is InPlace
    for name, found in zip(names, others, strict=True):
        assert found == alone, name


class Shared(Stage):
    """Two products get one gradient, and a hook of the one that comes later changes it."""

    def forward(self, x: T) -> T:
        early, late = self.first(x), self.second(x)
        if x.requires_grad:
            early.register_hook(halve)
        return early + late


def test_a_gradient_that_is_changed_while_it_waits_is_refused() -> None:
    modules = [Shared() for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES["zb_h1"], modules, F.mse_loss)
    x, y = torch.randn(2, M * ROWS, WIDTH)
    with pytest.raises(
        StageError, match="a gradient was changed in place between backward_input and backward_weight, probably by a hook"
    ):
        loopback.step(schedules, x, target=y)


class Spoilt(torch.autograd.Function):
    """What the next product saves of it is no number; the gradient is."""

    @staticmethod
    def forward(ctx: Any, x: T) -> T:
        return x * float("nan")

    @staticmethod
    def backward(ctx: Any, gradient: T) -> T:
        return torch.zeros_like(gradient)


class Steep(Stage):
    """Of the two products of a node, only the weight's is no number."""

    def forward(self, x: T) -> T:
        return self.second(torch.tanh(x)) + torch.nan_to_num(self.first(Spoilt.apply(x)))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", ["1f1b", "zb_h1"])
def test_anomaly_detection_sees_a_weight_s_gradient(name: str) -> None:
    """It looks at what a node computes."""
    modules = [Steep() for _ in range(NUM_STAGES)]
    loopback, schedules = pipeline(SCHEDULES[name], modules, F.mse_loss)
    x, y = torch.randn(2, M * ROWS, WIDTH)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="AddmmBackward0' returned nan values in its 2th"):
        loopback.step(schedules, x, target=y)
