"""An encoder whose forwards and backwards run in the waits of rank 0: the gradients are those of one process, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import Costs, Plan, build, finish, simulate, with_encoder
from tests.models import WIDTH, Block
from tests.ranks import run_ranks

P, M, PIECES, BATCH = 4, 8, 2, 2
pytestmark = pytest.mark.usefixtures("one_thread")
COSTS = Costs(forward_s=[0.1, 0.2, *[1.0] * P])


def modules() -> list[nn.Module]:
    torch.manual_seed(0)
    return [*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(PIECES)), *(Block(dropout=0.0) for _ in range(P))]


def batch() -> torch.Tensor:
    return torch.randn(M * BATCH, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def plan_of(rule: str) -> Plan:
    return finish(with_encoder(build(rule, P, M), PIECES, COSTS))


def trained(rank: int, rule: str, is_balanced: bool) -> tuple[dict[int, list[torch.Tensor]], list[tuple[float, float]]]:
    """The gradients of this rank's stages, and its peaks as measured and predicted."""
    plan, every = plan_of(rule), modules()
    held = plan.stages_of(rank)
    stages = [bpipe.PipelineStage(every[index], index, len(every), "cpu") for index in held]
    schedule: Any = bpipe.FromPlan(stages, plan, loss_fn=nn.functional.mse_loss)
    if is_balanced:
        schedule = bpipe.Balanced(schedule, budget="lowest")
    peaks = []
    for _ in range(3):
        for index in held:
            every[index].zero_grad()
        schedule.step(batch(), target=batch())
        peaks.append((schedule.stats["device_peak_bytes"], schedule.stats["predicted_device_peak_bytes"]))
    schedule.close()
    return {index: [p.grad for p in every[index].parameters() if p.grad is not None] for index in held}, peaks


@pytest.mark.parametrize(("rule", "is_balanced"), [("1f1b", False), ("1f1b", True), ("zb_h1", False)])
def test_gradients_are_those_of_one_process_to_the_bit(rule: str, is_balanced: bool) -> None:
    whole = nn.Sequential(*modules())
    for x in batch().chunk(M):
        (nn.functional.mse_loss(whole(x), x) / M).backward()
    found: dict[int, list[torch.Tensor]] = {}
    for gradients, peaks in run_ranks(trained, P, rule, is_balanced):
        found |= gradients
        assert all(used == predicted for used, predicted in peaks[1:])
    for index, module in enumerate(whole):
        expected = [p.grad for p in module.parameters()]
        assert len(expected) == len(found[index]) > 0 and all(map(torch.equal, found[index], expected))


def test_the_encoder_is_where_the_rank_waited() -> None:
    alone, plan = simulate(build("1f1b", P, M), Costs()), plan_of("1f1b")
    timeline = simulate(plan, COSTS)
    assert timeline.work_s(0) == pytest.approx(alone.work_s(0) + M * 0.9)
    assert timeline.makespan_s < alone.makespan_s + 0.5 * M * 0.9
