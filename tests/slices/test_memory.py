"""The bytes that a plan of slices says are the bytes that a rank has, after every action: counted by storages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B, TeraPipe
from bpipe.schedules import Action, Op, Rule, one_f_one_b
from bpipe.schedules.by_name import plan_by
from bpipe.slices.states import SliceState
from tests.live import LiveRanks
from tests.occupied import Counting, Whose
from tests.slices.models import batch_of, stages_of
from tests.slices.test_run import by_themselves, taken

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, K = 4, 4, 4
LENGTHS = [13, 9, 6, 4]


mse = nn.functional.mse_loss


def counted(
    kind: str, lengths: Any, *, rule: Any = Seq1F1B, loss_fn: Any = mse, ending: Any = None, of_slices: bool = False, **options: Any
) -> tuple[list[Any], list[Counting]]:
    """The schedules of three steps, and the counts of the last one."""
    modules, loopback, whose = stages_of(kind, P, torch.float32, num_layers=1), Loopback(P), Whose()
    if ending is not None:
        modules[-1].register_forward_hook(lambda module, args, result: (ending(result[0]), result[1]))
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    cutting = bpipe.Options(slice_lengths=lengths, loss_of_slices=of_slices)
    plain = [rule(stage, M, loss_fn=loss_fn, slices=K, options=cutting) for stage in stages]
    schedules = [bpipe.Balanced(one, **options) for one in plain]
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):
        batch = batch_of(M, sum(LENGTHS), torch.float32)
        for count in counts:
            count.batch, count.looks = batch, step == 2
        with whose if step else nullcontext():  # the first one leaves nothing behind
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


def sum_of(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (output - target).square().sum(), torch.tensor(target.numel())


ENDINGS = {
    "as it is": {},
    "saved by its own graph": {"ending": torch.tanh},
    "more than one value": {"ending": lambda y: (y, y[..., :3].sigmoid()), "loss_fn": lambda y, t: mse(y[0], t) + y[1].mean()},
    "with one that needs no gradient": {"ending": lambda y: (y, y.argmax(-1)), "loss_fn": lambda y, t: mse(y[0], t)},
    "a part of what the loss saves": {"loss_fn": lambda y, t: (y.softmax(-1) * t).mean()},
    "one loss at a time": {"loss_fn": sum_of, "of_slices": True},
}


WAITING = [
    *product(ENDINGS, [Seq1F1B], ["plain"]),
    *product(["as it is", "one loss at a time"], [Seq1F1B], ["evicted", "recomputed"]),
    *product(["more than one value", "one loss at a time"], [TeraPipe], ["plain"]),
]


@pytest.mark.parametrize("ending, rule, how", WAITING)
def test_outputs_wait_for_the_loss_of_their_sequence(ending: str, rule: Any, how: str) -> None:
    """And then their gradients, in the same memory; the loss itself counts while the last slice runs forward."""
    schedules, counts = counted("attention", LENGTHS, rule=rule, **ENDINGS[ending], **OPTIONS[how])
    for schedule, count in zip(schedules, counts):
        for moment in count.moments():
            assert moment.counted_after == moment.planned_after, moment
            if count is counts[-1] and moment.action.op is Op.F and moment.action.microbatch % K == K - 1:
                assert moment.counted_during is not None
                numbers = 13 if "of_slices" in ENDINGS[ending] else 0  # bytes of loss and count, as they are added up
                assert moment.planned_during - moment.counted_during == numbers, moment
        stats = schedule.stats
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"]
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
    """A step with sequences of a new length has a plan that counts that length's slices."""
    modules, loopback = stages_of("attention", P, torch.float32), Loopback(P)
    stages = [PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [bpipe.Balanced(Seq1F1B(stage, M, loss_fn=nn.functional.mse_loss, slices=K)) for stage in stages]
    found = []
    for positions in (32, 32, 20, 20):
        x, target = batch_of(M, positions, torch.float32)
        loopback.step(schedules, x, target=target, return_outputs=False)
        found.append(schedules[0].plan.sizes)
    assert found[0] == found[1] and found[2] == found[3]
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


class Deeper(nn.Module):
    """A layer with more and more behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.more = nn.Linear(8, 8), 1

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        y = self.linear(x)
        for _ in range(self.more):
            y = torch.sin(y)
        return y + sum(state.mean() for state in past), y[:, :, :1].sin()


def test_slices_that_change_after_they_were_measured_are_measured_again() -> None:
    module, x = Deeper(), torch.randn(2, 4, 8)
    schedule = Seq1F1B(PipelineStage(module, 0, 1, "cpu", Loopback(1).rank(0)), 1, loss_fn=nn.functional.mse_loss, slices=2)
    peaks = []
    for module.more in (1, 1, 4):
        schedule.step(x, target=x)
        peaks.append(schedule.stats["peak_bytes"])
        assert not schedule.stats["microbatches_unknown"]
    assert peaks[0] == peaks[1] == peaks[2] - 2 * 3 * x.nbytes // 2


def _halves(slices: int) -> Rule:
    def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
        lanes = one_f_one_b.order(num_ranks, num_microbatches, stages_per_rank, slices=slices)
        return [_in_halves(lane) for lane in lanes]

    return Rule(name="halves_of_slices", order=order, slices=slices, sliced=_halves)


def _in_halves(lane: Sequence[Action]) -> list[Action]:
    """The weight gradients come two backwards later."""
    halves: list[Action] = []
    waiting: list[Action] = []
    for action in lane:
        halves.append(action._replace(op=Op.I) if action.op is Op.B else action)
        if action.op is Op.B:
            waiting.append(action._replace(op=Op.W))
        if len(waiting) > 2:
            halves.append(waiting.pop(0))
    return halves + waiting


class Wide(nn.Module):
    """Layers with much between them that only the gradient of the input needs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor, past: Any = ()) -> Any:
        y = self.second(torch.tanh(self.first(torch.tanh(x))).exp().sin())
        return y + sum(state.mean() for state in past), y[:, :, :1].sin()


def test_halves_of_slices_keep_what_weights_need_and_no_more() -> None:
    plan, loopback, modules = plan_by(_halves(2), 2, 4, num_ranks=2), Loopback(2), [Wide(), Wide()]
    stages = [PipelineStage(module, i, 2, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    ranks = LiveRanks(loopback, [bpipe.FromPlan(stage, plan, nn.functional.mse_loss) for stage in stages], modules)
    x = torch.randn(8, 8, 64)
    for _ in range(3):  # no stash follows the last two
        beyond = [stats["peak_bytes"] - live_bytes for live_bytes, stats in ranks.step(x, x)]
        # At the peak a slice is counted as waiting for its W, which has been computed before: a weight's gradients add up in order.
        assert beyond == [x[:2, :4].nbytes + x[:2, :1, :4].nbytes, x[:2, :4].nbytes]
