"""What a dry run says before the first step is what that step takes, to the byte, and nothing of the modules has changed."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpipe
from tests.models import KINDS, batch_of, directions_of, modules_of, mse
from tests.over import Over, pipeline

M = 4
# by schedule: the stages of a rank
SCHEDULES: dict[type[bpipe.Schedule], int] = {
    bpipe.OneFOneB: 1,
    bpipe.GPipe: 1,
    bpipe.ZBH1: 1,
    bpipe.Interleaved1F1B: 2,
    bpipe.ZBV: 2,
    bpipe.DualPipeV: 2,
    bpipe.Chimera: 2,
    bpipe.BitPipe: 4,
}


def balanced(kind: str, schedule: type[bpipe.Schedule], **options: Any) -> tuple[bpipe.Loopback, list[Any], list[nn.Module]]:
    num_ranks = 2 if SCHEDULES[schedule] > 1 else 4
    num_stages = num_ranks * SCHEDULES[schedule]
    modules = modules_of(kind, num_stages // directions_of(schedule))
    modules = [*modules, *copy.deepcopy(modules)][:num_stages]
    loopback, schedules = pipeline(Over(schedule, {"budget": "lowest", **options}), modules, M, mse, num_ranks)
    return loopback, schedules, modules


def is_proven(schedule: bpipe.Schedule) -> bool:
    """Whether the latest step took what was predicted for it."""
    (shapes,) = schedule.session.source._shapes.values()
    return not (shapes.is_predicted or shapes.must_measure)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.__name__)
def test_the_first_step_takes_what_was_predicted(kind: str, schedule: type[bpipe.Schedule]) -> None:
    loopback, schedules, _ = balanced(kind, schedule)
    x, y = batch_of(kind, 2 * M)
    loopback.step(schedules, x, target=y)
    assert [one.session.source._dry_run.failure for one in schedules] == [""] * len(schedules)
    assert all(map(is_proven, schedules))
    for one in schedules:
        assert one.stats["device_peak_bytes"] <= max(one.plan.device_peak_bytes)
