"""States that are views, the stage's input or output, parameters, handed on, expanded or detached; and frozen stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Seq1F1B
from tests.pairs import pairs
from tests.slices.models import WIDTH, batch_of, stages_of
from tests.slices.test_run import by_themselves, furthest, run, taken

P, M, K = 4, 4, 3


class Summing(nn.Module):
    """A layer that needs the sum of all positions before, and says how it carries that on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out, self.start = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(WIDTH))

    def so_far(self, x: torch.Tensor, before: torch.Tensor | float = 0.0) -> torch.Tensor:
        return before + self.inner(x).cumsum(1)

    def result(self, x: torch.Tensor, so_far: torch.Tensor) -> torch.Tensor:
        return x + self.out(torch.tanh(so_far + self.start))


class View(Summing):
    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        so_far = self.so_far(x, past[-1].mT if past else 0.0)
        return self.result(x, so_far), so_far[:, -1:].mT


class Overlapping(Summing):
    """The same tensor twice, and a part of it."""

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        so_far = self.so_far(x, past[-1][0][:, -1:] + past[-1][1][:, -1:] - past[-1][2] if past else 0.0)
        return self.result(x, so_far), [so_far, so_far, so_far[:, -1:]]


class Input(Summing):
    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        return self.result(x, self.so_far(x, sum(self.inner(one).sum(1, keepdim=True) for one in past))), x


class Output(Summing):
    """The output has a use of its own, so that two gradients meet."""

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        so_far = self.so_far(x, past[-1][:, -1:] if past else self.start) + 0 * self.out(x)
        return so_far, so_far


class Parameter(Summing):
    """Later slices use the parameters that the first one has handed on."""

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        start, weight = past[-1]["parameters"] if past else (self.start, self.out.weight)
        so_far = self.so_far(x, past[-1]["sum"] if past else 0.0)
        return x + torch.tanh(so_far + start) @ weight.T + self.out.bias, {"parameters": (start, weight), "sum": so_far[:, -1:]}


class HandedOn(Summing):
    """Each position needs the first one, which each slice hands on as it is."""

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        first = past[-1] if past else self.inner(x[:, :1])
        return self.result(x, self.inner(x) * first), first


class Expanded(Summing):
    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        so_far = self.so_far(x, past[-1].mean(1, keepdim=True) if past else 0.0)
        return self.result(x, so_far), so_far[:, -1:].expand(-1, 4, -1)


class Detached(Summing):
    """No gradient goes to the positions before."""

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        own, so_far = self.inner(x), self.so_far(x, past[-1] if past else 0.0).detach()
        return self.result(x, so_far - own.detach() + own), so_far[:, -1:]


def plain(stage: Any, m: int, **options: Any) -> Any:
    return Seq1F1B(stage, m, **options)


def balanced(stage: Any, m: int, **options: Any) -> Any:
    return bpipe.Balanced(Seq1F1B(stage, m, **options), budget="lowest")


def in_parts(stage: Any, m: int, **options: Any) -> Any:
    return bpipe.Balanced(Seq1F1B(stage, m, **options), budget="lowest", options=bpipe.Options(parts=3))


def recomputed(stage: Any, m: int, **options: Any) -> Any:
    return bpipe.Balanced(Seq1F1B(stage, m, **options), budget="lowest", by="recompute")


STATES = [View, Overlapping, Input, Output, Parameter, HandedOn, Expanded, Detached]
RULES = [plain, balanced, in_parts, recomputed]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", STATES)
def test_states(kind: type[nn.Module], rule: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    modules, batch = [kind().double() for _ in range(P)], batch_of(M)
    for module in modules:
        nn.init.normal_(module.inner.weight, std=0.1)  # sums of sums stay small
    agree(modules, batch, rule)


def agree(modules: list[Any], batch: Any, rule: Callable[..., Any]) -> None:
    """Compare gradients with those of whole sequences, and used bytes with predicted ones."""
    trained = [Trained(module) for module in modules]
    expected = by_themselves(trained, M, batch)
    schedules, _ = run(modules, rule, M, batch, slices=K)
    for _ in range(0 if rule is plain else 2):  # the first step measures, and the last follows a plan that is known
        assert furthest(taken(trained), expected) < 1e-12
        schedules[0].group.loopback.step(schedules, batch[0], target=batch[1])
    assert furthest(taken(trained), expected) < 1e-12
    if rule is not plain:
        assert all(schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"] for schedule in schedules)


class Trained(nn.Module):
    """A module that names those of its parameters that are trained."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        return self.module(x, past)

    def parameters(self, recurse: bool = True) -> Any:
        return (parameter for parameter in super().parameters(recurse) if parameter.requires_grad)


FROZEN: dict[str, Callable[[list[Any]], list[nn.Parameter]]] = {
    "first": lambda modules: [*modules[0].parameters()],
    "middle": lambda modules: [*modules[1].parameters(), *modules[2].parameters()],
    "last": lambda modules: [*modules[-1].parameters()],
    "keys and values": lambda modules: [one for module in modules for layer in module.layers for one in layer.kv.parameters()],
}
WITHOUT = ("keys and values", "lstm")
FROZEN_CASES = pairs(FROZEN, ["attention", "lstm"], RULES, are_some=lambda which, kind, _: (which, kind) != WITHOUT)


@pytest.mark.parametrize("which, kind, rule", FROZEN_CASES)
def test_frozen_stages(which: str, kind: str, rule: Callable[..., Any]) -> None:
    modules = stages_of(kind, P)
    for parameter in FROZEN[which](modules):
        parameter.requires_grad_(False)
    agree(modules, batch_of(M), rule)
