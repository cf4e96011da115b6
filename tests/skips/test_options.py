"""Skips together with slices, recomputation, balancing by count, evaluation, and modules whose needs change."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import Op, build
from tests.skips.models import WIDTH, by_itself, gradients_by_itself, model_of
from tests.skips.test_equality import assert_close, gradients_of, mse, schedules_of

pytestmark = pytest.mark.usefixtures("one_thread")

SKIPS = {"far": (0, 2, 3), "near": (0, 1), "late": (2, 3)}


class Sums(nn.Module):
    """A causal stage: each position [batch, positions, channels] gets the sum of all up to it, and what earlier stages hand on."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.made = [name for name, (source, *_) in SKIPS.items() if source == index]

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, ...] = (), **skips: torch.Tensor) -> Any:
        for name in sorted(skips):
            x = x + torch.sin(skips[name])
        sums = torch.tanh(self.linear(x)).cumsum(1) + (past[-1] if past else 0.0)
        y = x + sums.cos()
        made = {name: y if name == "near" else sums for name in self.made}
        return ((y, made) if made else y), sums[:, -1:]


class Whole(nn.Module):
    """The same stage for whole sequences."""

    def __init__(self, stage: Sums) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: torch.Tensor, **skips: torch.Tensor) -> Any:
        return self.stage(x, **skips)[0]


@pytest.mark.parametrize("slots", [None, 6])
def test_slices_hand_on_skips(slots: int | None) -> None:
    m, k = 4, 4
    torch.manual_seed(0)
    stages: Sequence[Sums] = [Sums(index).double() for index in range(4)]
    alone = [Whole(deepcopy(stage)) for stage in stages]
    x, target = torch.randn(2, 2 * m, 3 * k, WIDTH, dtype=torch.float64)
    loopback = bpipe.Loopback(4)
    schedules = [
        bpipe.Seq1F1B(
            bpipe.PipelineStage(one, i, 4, "cpu", loopback.rank(i), skips=SKIPS),
            m,
            mse,
            slices=k,
            options=bpipe.Options(slots=slots),
        )
        for i, one in enumerate(stages)
    ]
    assert slots is None or schedules[0].plan.evicted(0)
    output = loopback.step(schedules, x, target=target)
    for one, wanted in zip(x.chunk(m), target.chunk(m)):
        (mse(by_itself(alone, SKIPS, one, {}), wanted) / m).backward()
    torch.testing.assert_close(output, by_itself(alone, SKIPS, x, {}), rtol=0, atol=1e-12)
    assert_close(gradients_of(schedules), [p.grad for stage in alone for p in stage.parameters()])


@pytest.mark.parametrize("kind", ["unet", "residuals"])
@pytest.mark.parametrize("by", ["recompute", "evict"])
def test_balanced_by_count(kind: str, by: Any) -> None:
    """Stages that share a skip with another one on their rank are not recomputed, and here each rank has one stage."""
    model = model_of(kind, 8, 16)
    plan = build("1f1b", 8, 8, skips=model.skips.values())
    loopback, plain = schedules_of(model, plan)
    schedules = [bpipe.Balanced(one, budget=None, by=by) for one in plain]
    moved = {action.op for lane in schedules[0].plan.actions for action in lane}
    assert (Op.R in moved) == (by == "recompute") and (Op.EVICT in moved) == (by == "evict")
    for _ in range(2):
        loopback.step(schedules, model.x, target=model.target, return_outputs=False)
    gradients_by_itself(model, 8)
    assert_close(gradients_of(schedules), gradients_by_itself(model, 8))


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_evaluation_holds_nothing(mode: Any) -> None:
    model = model_of("residuals", 8, 8)
    loopback, schedules = schedules_of(model, build("zbv", 8, 4, num_ranks=4, skips=model.skips.values()))
    with mode():
        output = loopback.eval(schedules, model.x)
    with torch.no_grad():
        torch.testing.assert_close(output, by_itself(model.stages, model.skips, model.x, {}), rtol=0, atol=1e-12)


class Needs(nn.Module):
    """Hands on a value that trains something only while its gate is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.linear = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return torch.tanh(self.linear(x)), {"value": self.gate(x)}


class Uses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, value: torch.Tensor | None = None) -> torch.Tensor:
        return torch.tanh(self.linear(x)) * (1 if value is None else value)


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
@pytest.mark.parametrize("ranks", [(0, 1, 2), (0, 1, 0)])
def test_what_needs_a_gradient_may_change_from_step_to_step(order: Sequence[bool], ranks: Sequence[int]) -> None:
    torch.manual_seed(0)
    stages, skips = [Needs().double(), Uses().double(), Uses().double(), Uses().double()], {"value": (0, 2)}
    alone = deepcopy(stages)
    x, target = torch.randn(2, 8, WIDTH, dtype=torch.float64)
    rule, p = ("1f1b", 4) if len(set(ranks)) == 3 else ("interleaved_1f1b", 2)
    plan = build(rule, 4, 4, num_ranks=p, skips=skips.values())
    loopback = bpipe.Loopback(p)
    held = [
        [bpipe.PipelineStage(stages[i], i, 4, "cpu", loopback.rank(r), skips=skips) for i in plan.stages_of(r)] for r in range(p)
    ]
    schedules: list[bpipe.Schedule] = [bpipe.FromPlan(of_rank, plan, mse) for of_rank in held]
    for is_trained in order:
        for of_run in (stages, alone):
            of_run[0].gate.requires_grad_(is_trained)  # type: ignore[union-attr]
        loopback.step(schedules, x, target=target)
        for one, wanted in zip(x.chunk(4), target.chunk(4)):
            (mse(by_itself(alone, skips, one, {}), wanted) / 4).backward()
    assert_close(gradients_of(schedules), [p.grad for stage in alone for p in stage.parameters()])
