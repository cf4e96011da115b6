"""Random models, plans and features take what their plans say, at every action; `random_memory` runs more of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.flow.shaping import shaped
from bpipe.schedules import finish
from bpipe.schedules.any_flow import computations_for
from tests.occupied import Counting, Whose
from tests.together.random_memory import WIDTH, differences

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(60))
def test_a_random_model_takes_what_its_plan_says(seed: int) -> None:
    assert not differences(seed)


class Pair(nn.Module):
    """Stages that hand on two tensors, of which one is their output, too; users take one of both."""

    def __init__(self, makes: bool, takes: str) -> None:
        super().__init__()
        self.linear, self.own, self.makes, self.takes = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), makes, takes

    def forward(self, x: torch.Tensor, pair: Any = None) -> Any:
        x = x if pair is None else x + torch.tanh(pair[self.takes]) * pair[self.takes].sin()
        y = self.linear(torch.tanh(x))
        return (y, {"pair": {"own": self.own(x), "out": y}}) if self.makes else y


@pytest.mark.parametrize("takes", [("own", "own"), ("out", "own"), ("own", "out")])
@pytest.mark.parametrize("ranks, skip", [((0, 1, 0), (0, 2)), ((0, 1, 0, 1), (0, 2, 3)), ((0, 1, 2, 0, 1, 2), (1, 3, 4))])
@pytest.mark.parametrize("m", [1, 3])
def test_a_plan_never_counts_less_of_what_stages_use_in_part(
    ranks: tuple[int, ...], skip: tuple[int, ...], takes: Sequence[str], m: int
) -> None:
    torch.manual_seed(0)
    plan = finish(computations_for(shaped(shaped(None, "chain", ranks, m), "skips", (skip,))))
    loopback, whose = bpipe.Loopback(plan.num_ranks), Whose()
    part = dict(zip(skip[1:], takes))
    modules = [Pair(i == skip[0], part.get(i, "own")) for i in range(len(ranks))]
    how: dict[str, Any] = {"device": "cpu", "skips": {"pair": skip}}
    held = [
        [bpipe.PipelineStage(modules[i], i, len(ranks), group=loopback.rank(rank), **how) for i in plan.stages_of(rank)]
        for rank in range(plan.num_ranks)
    ]
    schedules = [bpipe.Balanced(bpipe.FromPlan(some, plan, nn.functional.mse_loss), budget=2**40) for some in held]
    counts, x = [Counting(one, whose) for one in schedules], torch.randn(2 * m, WIDTH)
    for step in range(3):
        for count in counts:
            count.batch, count.looks = (x,), step == 2
        with whose:
            loopback.step(schedules, x, target=x, return_outputs=False)
    assert all(moment.counted_after <= moment.planned_after for count in counts for moment in count.moments())


class Detached(nn.Module):
    """Detaches its output until it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.detaches = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.linear(x))
        return y.detach() if self.detaches else y


def test_gradients_that_come_for_the_first_time_in_a_later_step_have_room() -> None:
    loopback, first = bpipe.Loopback(2), Detached()
    modules = [first, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    stages = [bpipe.PipelineStage(module, rank, 2, "cpu", loopback.rank(rank)) for rank, module in enumerate(modules)]
    schedules = [bpipe.Balanced(bpipe.OneFOneB(stage, 4, loss_fn=nn.functional.mse_loss)) for stage in stages]
    x = torch.randn(8, WIDTH)
    for step in range(7):
        first.detaches = step < 4
        loopback.step(schedules, x, target=x, return_outputs=False)
        for schedule in schedules if step else ():
            assert schedule.stats["device_peak_bytes"] <= schedule.stats["predicted_device_peak_bytes"], step
