"""Microbatches that save more or less than the one that was measured, moved in parts: gradients are right, and statistics come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
import tests.edge_cases.case as cases
from bpipe.memory.saved.footprint import Footprint
from bpipe.schedules import Amount, Destinations, Sizes, StageSizes
from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M
from tests.models import WIDTH, batch_of
from tests.over import Over

pytestmark = pytest.mark.usefixtures("one_thread")

HOST = {"budget": "lowest", "options": bpipe.Options(parts=4), "to": Destinations(host="only")}
MOVING: dict[str, Any] = {
    "parts": SCHEDULES["parts"],
    "host": Over(bpipe.GPipe, HOST),
    "halves": Over(bpipe.ZBH1, HOST),
}


class Layers(nn.Module):
    """As many layers as a subclass says, call by call or by what it gets; each saves two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.calls = 0

    def depth(self, x: torch.Tensor) -> int:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for layer in list(self.layers)[: self.depth(x)]:
            x = torch.tanh(layer(x)) * 0.5
        return x


class ByValue(Layers):
    def depth(self, x: torch.Tensor) -> int:
        return 1 + int(1000 * x.detach().abs().sum()) % 6


class Growing(Layers):
    """More layers in each step."""

    def depth(self, x: torch.Tensor) -> int:
        return 1 + self.calls // M


class GrowingInside(Layers):
    """More layers in each microbatch of a step."""

    def depth(self, x: torch.Tensor) -> int:
        return 1 + self.calls % 6


class Shrinking(Layers):
    def depth(self, x: torch.Tensor) -> int:
        return 6 - min(5, self.calls % M)


class LargeThenSmall(Layers):
    """Larger than planned in the second step; measured again in the third, with fewer parts than the plan, which covers both."""

    def depth(self, x: torch.Tensor) -> int:
        return (3, 6, 1, 1)[min(3, (self.calls - 1) // M)]


class EmptyFirst(Layers):
    """The first microbatch of all saves nothing: its graph is an addition."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.layers[0].bias

    def depth(self, x: torch.Tensor) -> int:
        return 0 if self.calls == 1 else 6


class Skipping(Layers):
    """Stochastic depth by a tensor's value; where all is skipped, little is saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.layers[0].bias

    def depth(self, x: torch.Tensor) -> int:
        return 6 * (int(1000 * x.detach().abs().sum()) % 2)


class Experts(Layers):
    """Routed by value: every expert saves other sizes each time, or is not used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, WIDTH)
        which, mixed = (100 * flat.detach().abs().sum(-1)).long() % 8, torch.tanh(flat)
        for index, layer in enumerate(self.layers):
            chosen = (which == index).nonzero().squeeze(-1)
            mixed = mixed.index_add(0, chosen, torch.tanh(layer(flat[chosen])))
        return mixed.view_as(x)


class Recursive(Layers):
    """Calls itself, through its hooks."""

    def forward(self, x: torch.Tensor, left: int | None = None) -> torch.Tensor:
        left = 1 + int(1000 * x.detach().abs().sum()) % 5 if left is None else left
        x = torch.tanh(self.layers[left](x))
        return x if left == 0 else self(x, left - 1)


class GradientInside(Layers):
    """Asks for a gradient inside its forward, with its graph, of as many layers as its value says."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x
        for layer in list(self.layers)[: 1 + int(1000 * x.detach().abs().sum()) % 5]:
            hidden = torch.tanh(layer(hidden))
        (slope,) = torch.autograd.grad(hidden.square().sum(), x, create_graph=True)
        return torch.tanh(x + slope) * hidden


class First(nn.Module):
    """Lets the stage after it need a gradient of what it gets, by a layer that saves what it got."""

    def __init__(self, then: nn.Module) -> None:
        super().__init__()
        self.enter, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.then(self.enter(x))


def batch(step: int) -> Batch:
    x, y = batch_of("quiet", M, step)
    return Batch((x,), y)


def case_of(make: Callable[[], nn.Module], steps: int = 3) -> Case:
    return Case(lambda: [First(make()) for _ in range(NUM_STAGES)], batch, F.mse_loss, steps)


def check(case: Case, monkeypatch: pytest.MonkeyPatch, names: Any = tuple(MOVING)) -> None:
    monkeypatch.setattr(cases, "ONE_STAGE", {**cases.ONE_STAGE, **MOVING})
    monkeypatch.setattr(cases, "SCHEDULES", {**cases.SCHEDULES, **MOVING})
    case.check(names)


# Modules, the steps that it takes, and the schedules that they run under: each of these for some.
KINDS: list[tuple[Any, int, list[str]]] = [
    (ByValue, 3, ["parts"]),
    (Growing, 3, ["host"]),
    (GrowingInside, 2, ["parts", "halves"]),
    (Shrinking, 2, ["host"]),
    (LargeThenSmall, 4, ["host"]),
    (EmptyFirst, 2, ["parts", "host"]),
    (Skipping, 2, ["parts", "halves"]),
    (Experts, 2, ["parts", "host"]),
    (Recursive, 2, ["parts"]),
    (GradientInside, 2, ["parts", "halves"]),
]


@pytest.mark.parametrize("make, steps, names", KINDS)
def test_microbatches_that_save_other_parts_than_planned(
    make: Any, steps: int, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    check(case_of(make, steps), monkeypatch, names)


def test_growth_is_measured_anew_and_then_evicted_as_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grown once, between steps: the step after that is planned with too little, then all fits again."""

    class Once(Layers):
        def depth(self, x: torch.Tensor) -> int:
            return 2 if self.calls <= 2 * M else 6

    monkeypatch.setattr(cases, "ONE_STAGE", {**cases.ONE_STAGE, **MOVING})
    torch.manual_seed(0)
    loopback, schedules = cases.pipeline(MOVING["host"], [First(Once()) for _ in range(NUM_STAGES)], F.mse_loss)
    planned = []
    for step in range(5):
        x, y = batch_of("quiet", M, step)
        loopback.step(schedules, x, target=y, return_outputs=False)
        planned.append(schedules[0].plan.sizes.stages[0].saved)
    assert planned[0] == planned[1] == planned[2] < planned[3] == planned[4]
    assert schedules[0].stats["device_peak_bytes"] == schedules[0].stats["predicted_device_peak_bytes"]


def test_an_evaluation_between_steps_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "ONE_STAGE", {**cases.ONE_STAGE, **MOVING})

    def trained(evaluates: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        modules = [First(ByValue()) for _ in range(NUM_STAGES)]
        loopback, schedules = cases.pipeline(MOVING["parts"], modules, F.mse_loss)
        for step in range(2):
            x, y = batch_of("quiet", M, step)
            if evaluates:
                loopback.eval(schedules, x)
            loopback.step(schedules, x, target=y, return_outputs=False)
        return [p.grad for module in modules for p in module.parameters() if p.grad is not None]

    assert all(map(torch.equal, trained(evaluates=True), trained(evaluates=False)))


@pytest.mark.parametrize("num_parts", [1, 2, 9])
def test_sizes_by_hand_with_other_parts_than_are_found(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = StageSizes(parts=(100_000,) * num_parts, amounts=(Amount("in", 2048), Amount("out", 2048)))
    given = Sizes(stages=(sizes,) * NUM_STAGES, static=(0,) * NUM_STAGES)
    options = {"budget": "lowest", "sizes": given, "options": bpipe.Options(parts=9), "to": Destinations(host="only")}
    monkeypatch.setitem(MOVING, "by hand", Over(bpipe.GPipe, options))
    check(case_of(ByValue, 2), monkeypatch, ["by hand"])


@pytest.mark.parametrize("parts, counted", [((1, 2, 3, 4), (1, 9)), ((1, 2), (1, 2)), ((5,), (5, 0)), ((), (10, 0))])
def test_a_footprint_is_counted_in_the_parts_of_the_plan(parts: tuple[int, ...], counted: tuple[int, ...]) -> None:
    assert Footprint(own_bytes=10, movable_bytes=10, shared_bytes=0, parts=parts).sizes(2).parts == counted
