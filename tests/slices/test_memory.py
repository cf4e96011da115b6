"""The bytes that a plan of slices says are the bytes that a rank has, after every action: counted by storages."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.engine.microbatch_state import SliceState
from tests.occupied import Counting, Whose
from tests.slices.models import batch_of, stages_of
from tests.slices.test_run import by_themselves, taken

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, K = 4, 4, 4
LENGTHS = [13, 9, 6, 4]


def counted(kind: str, lengths: Any, **options: Any) -> tuple[list[Any], list[Counting]]:
    """The schedules of three steps, and the counts of the last one."""
    modules, loopback, whose = stages_of(kind, P, torch.float32), Loopback(P), Whose()
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    plain = [
        Seq1F1B(stage, M, loss_fn=nn.functional.mse_loss, slices=K, options=bpipe.Options(slice_lengths=lengths))
        for stage in stages
    ]
    schedules = [bpipe.Balanced(one, **options) for one in plain]
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):
        batch = batch_of(M, sum(LENGTHS), torch.float32)
        for count in counts:
            count.batch, count.looks = batch, step == 2
        with whose:
            loopback.step(schedules, batch[0], target=batch[1], return_outputs=False)
    return schedules, counts


OPTIONS = {"plain": {"budget": 2**40}, "evicted": {}, "recomputed": {"by": "recompute"}}
CASES = list(product(["attention", "lstm"], ["by cost", "equal"], OPTIONS))


@pytest.mark.parametrize(("kind", "lengths", "how"), CASES)
def test_plans_say_what_slices_take(kind: str, lengths: str, how: str) -> None:
    schedules, counts = counted(kind, LENGTHS if lengths == "by cost" else None, **OPTIONS[how])
    plan = schedules[0].plan
    for rank, (schedule, count) in enumerate(zip(schedules, counts)):
        for moment in count.moments():
            assert moment.counted_after == moment.planned_after, moment
        stats = schedule.stats
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"] == plan.device_peak_bytes[rank]
        assert stats["peak_bytes"] == stats["predicted_peak_bytes"]


def test_sizes_that_were_measured_can_be_given() -> None:
    measured = counted("attention", LENGTHS)[0][0].plan
    assert len(measured.sizes.later_slices) == K - 1
    schedules, counts = counted("attention", LENGTHS, sizes=measured.sizes, budget=max(measured.device_peak_bytes))
    assert schedules[0].plan.budgets is not None and schedules[0].plan.evicted(0)
    for rank, (schedule, count) in enumerate(zip(schedules, counts)):
        assert all(moment.counted_after == moment.planned_after for moment in count.moments())
        assert schedule.stats["device_peak_bytes"] == schedule.plan.device_peak_bytes[rank]


def test_sequences_of_other_lengths_are_planned_with_their_own_sizes() -> None:
    """A step with sequences of a new length measures, and its plan counts that length's slices."""
    modules, loopback = stages_of("attention", P, torch.float32), Loopback(P)
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [bpipe.Balanced(Seq1F1B(stage, M, loss_fn=nn.functional.mse_loss, slices=K)) for stage in stages]
    found = []
    for positions in (32, 32, 20, 20):
        x, target = batch_of(M, positions, torch.float32)
        loopback.step(schedules, x, target=target, return_outputs=False)
        found.append(schedules[0].plan.sizes)
    assert found[0] is found[2] is None
    assert [found[3].at(1, unit).saved * 8 for unit in range(K)] == [found[1].at(1, unit).saved * 5 for unit in range(K)]


def test_gradients_of_states_are_added_in_single_precision() -> None:
    """Half precision would lose each of these: 1 + 1/256 is 1 again."""
    left = SliceState.of("", [torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)], keeps_copies=False)
    left.add([torch.ones(2, dtype=torch.bfloat16)])
    for _ in range(64):
        left.add([torch.full((2,), 1 / 256, dtype=torch.bfloat16)])
    (found,) = left.summed()
    assert found is not None and found.dtype is torch.bfloat16 and found.tolist() == [1.25, 1.25]


def test_many_slices_are_no_less_precise_than_the_whole() -> None:
    modules, (x, target) = stages_of("attention", 1, torch.float32), batch_of(1, 128, torch.float32)
    exact = by_themselves([module.double() for module in modules], 1, (x.double(), target.double()))
    module = modules[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        whole = by_themselves(modules, 1, (x, target))
        stage = PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0))
        Seq1F1B(stage, 1, loss_fn=nn.functional.mse_loss, slices=32).step(x, target=target)
    assert error_of(taken(modules), exact) <= 1.1 * error_of(whole, exact)


def error_of(found: list[torch.Tensor], exact: list[torch.Tensor]) -> float:
    """The norm of what is wrong with gradients."""
    return sum(float((one - other).square().sum()) for one, other in zip(found, exact, strict=True)) ** 0.5


def test_bytes_of_states_in_half_precision() -> None:
    """Their gradients are added up in single precision, and so counted."""
    modules, loopback = [stage.bfloat16() for stage in stages_of("attention", P, torch.float32)], Loopback(P)
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [bpipe.Balanced(Seq1F1B(stage, M, loss_fn=nn.functional.mse_loss, slices=K)) for stage in stages]
    x, target = batch_of(M, sum(LENGTHS), torch.bfloat16)
    for _ in range(3):
        loopback.step(schedules, x, target=target, return_outputs=False)
    for schedule in schedules:
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
