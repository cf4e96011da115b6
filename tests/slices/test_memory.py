"""The bytes that a plan of slices says are the bytes that a rank has, after every action: counted by storages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from tests.occupied import Counting, Whose
from tests.slices.models import batch_of, stages_of

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, K = 4, 4, 4
LENGTHS = [13, 9, 6, 4]


def counted(kind: str, lengths: Any, **options: Any) -> tuple[list[Any], list[Counting]]:
    """The schedules of three steps, and the counts of the last one."""
    modules, loopback, whose = stages_of(kind, P, torch.float32), Loopback(P), Whose()
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    plain = [Seq1F1B(stage, M, loss_fn=nn.functional.mse_loss, slices=K, slice_lengths=lengths) for stage in stages]
    schedules = [bpipe.Balanced(one, **options) for one in plain]
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):
        batch = batch_of(M, sum(LENGTHS), torch.float32)
        for count in counts:
            count.batch, count.looks = batch, step == 2
        with whose:
            loopback.step(schedules, batch[0], target=batch[1], return_outputs=False)
    return schedules, counts


@pytest.mark.parametrize("options", [{"budget": 2**40}, {}, {"by": "recompute"}], ids=["plain", "evicted", "recomputed"])
@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["equal", "by cost"])
@pytest.mark.parametrize("kind", ["attention", "lstm"])
def test_plans_say_what_slices_take(kind: str, lengths: Any, options: dict[str, Any]) -> None:
    schedules, counts = counted(kind, lengths, **options)
    plan = schedules[0].plan
    for rank, (schedule, count) in enumerate(zip(schedules, counts)):
        for moment in count.moments():
            assert moment.counted_after == moment.planned_after, moment
        stats = schedule.stats
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"] == plan.device_peak_bytes[rank]
