"""The bytes that a plan says are the bytes that a rank has, after every action: counted by storages, whatever the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import Destinations, Op
from tests.models import KINDS, WIDTH, batch_of, modules_of, mse
from tests.occupied import Counting, Moment, Whose
from tests.over import Over, pipeline
from tests.ranks import run_ranks
from tests.storages import StorageCount
from tests.test_memory_use import live_tensors, resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

P, M = 4, 8
SCHEDULES = {
    bpipe.OneFOneB: 1,
    bpipe.GPipe: 1,
    bpipe.ZBH1: 1,
    bpipe.Interleaved1F1B: 2,
    bpipe.BreadthFirst: 2,
    bpipe.ZBV: 2,
    bpipe.DualPipeV: 2,
}


class EndsInReLU(nn.Module):
    """Saves its output, and in place what it received where `is_first` says so."""

    def __init__(self, *, is_first: bool) -> None:
        super().__init__()
        self.linear, self.is_first = nn.Linear(WIDTH, WIDTH), is_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.relu_() if x.requires_grad else x) if self.is_first else self.linear(x).relu_()


class Returns(nn.Module):
    """A stage that returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


MODELS: dict[str, Callable[[int], nn.Module]] = {
    **KINDS,
    "ends in relu": lambda i: EndsInReLU(is_first=False),
    "relu in place": lambda i: EndsInReLU(is_first=True),
    "returns its input": lambda i: Returns() if i in (1, 2) else nn.Linear(WIDTH, WIDTH),
}
EXACT = ["quiet", "conv", "lstm", "views", "autocast", "tied", "ends in relu", "relu in place"]
MESSAGES = {"nested": 5, "pair": 2, "frozen": 1, "returns its input": 1}  # tensors of a message that may not be there, or twice


def counted(
    schedule: type[bpipe.Schedule], kind: str, num_stages: int, num_ranks: int, *, m: int = M, steps: int = 3, **options: Any
) -> tuple[list[Any], list[Counting]]:
    """The schedules of some steps in a loopback, and the counts of the last one."""
    torch.manual_seed(0)
    modules = [MODELS[kind](stage) for stage in range(num_stages)]
    loopback, schedules = pipeline(Over(schedule, options), modules, m, mse, num_ranks)
    whose = Whose()
    counts = [Counting(one, whose) for one in schedules]
    for step in range(steps):
        x, y = batch_of(kind, 2 * m, step)
        for count in counts:
            count.batch = (x, y)
        with whose:
            loopback.step(schedules, x, target=y, return_outputs=False)
    return schedules, counts


def assert_exact(moment: Moment) -> None:
    assert moment.counted_after == moment.planned_after, moment
    assert moment.counted_during in (None, moment.planned_during), moment


def num_evicted(schedules: list[Any]) -> int:
    return sum(len(schedules[0].plan.evicted(rank)) for rank in range(len(schedules)))


def assert_peaks(schedules: list[Any], counts: list[Counting]) -> None:
    """Predicted, used and counted peaks agree: counted to the gradients that live inside a backward alone, and no more."""
    plan = schedules[0].plan
    for rank, (schedule, count) in enumerate(zip(schedules, counts, strict=True)):
        stats = schedule.stats
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"] == plan.peak_bytes[rank]
        own = [plan.sizes.stages[stage] for stage, owner in enumerate(plan.stage_ranks) if owner == rank]
        inside = max(sizes.received + sizes.sent * (schedule.ledger is not None) for sizes in own)
        assert 0 <= stats["device_peak_bytes"] - stats["static_bytes"] - count.peak <= inside


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.rule)
@pytest.mark.parametrize("parts", [1, 4])
def test_every_action_leaves_what_the_plan_says(schedule, parts):
    schedules, counts = counted(schedule, "quiet", P * SCHEDULES[schedule], P, budget="lowest", parts=parts)
    for moment in (moment for count in counts for moment in count.moments()):
        assert_exact(moment)
    assert_peaks(schedules, counts)


@pytest.mark.parametrize("schedule, num_stages", [(bpipe.OneFOneB, 4), (bpipe.ZBH1, 4), (bpipe.DualPipeV, 4)])
@pytest.mark.parametrize("kind", EXACT)
def test_whatever_a_stage_saves_of_its_messages(schedule, num_stages, kind):
    if schedule is bpipe.DualPipeV and kind in ("conv", "lstm", "ends in relu"):
        pytest.skip("its turn has a bound of its own")
    schedules, counts = counted(schedule, kind, num_stages, P // SCHEDULES[schedule], budget="lowest")
    for moment in (moment for count in counts for moment in count.moments()):
        assert_exact(moment)
    assert_peaks(schedules, counts)
