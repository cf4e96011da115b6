"""All that a device holds: weights, gradients, buffers, optimizer states, activations, messages and buffers, by another count."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.comm.health.agreement import StepRecord
from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Destinations, Sizes, StageSizes, build
from bpipe.session.fullest import PeakRecord, _raised
from tests.edge_cases.case import M, pipeline
from tests.models import WIDTH, batch_of, mse
from tests.occupied import Counting, Whose
from tests.over import Over

pytestmark = pytest.mark.usefixtures("one_thread")

HEAD = 512
WAYS = {
    "plain": bpipe.OneFOneB,
    "by count": bpipe.BalancedOneFOneB,
    "by bytes": Over(bpipe.OneFOneB, {"budget": "lowest"}),
}


class Residual(nn.Module):
    """Saves a lot for few operations."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.down(nn.functional.gelu(self.up(x)))


def stages(head: int = HEAD) -> list[nn.Module]:
    """Four stages, of which the last has more than the others."""
    torch.manual_seed(0)
    return [Residual(hidden) for hidden in (64, 64, 64, head)]


class CountingAll(Counting):
    """Counts all that a rank's device holds, but for the batch."""

    def __init__(self, schedule: Any, whose: Whose) -> None:
        super().__init__(schedule, whose)
        for module in self._modules:
            for tensor in (*module.parameters(), *module.buffers()):
                self._count.note(tensor)

    def _live(self) -> int:
        return self._count.live_bytes(without=self.batch)

    def takes(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer of the rank step."""
        self._whose.acting = self._count
        with self._whose:
            optimizer.step()
        self._whose.acting = None


def counted(
    way: Any, optimizers: Sequence[Callable[..., torch.optim.Optimizer]], steps: int = 3
) -> Iterator[tuple[list[Any], list[int]]]:
    """After each step, the schedules and the peaks that were counted, by rank."""
    modules, whose = stages(), Whose()
    loopback, schedules = pipeline(way, modules, mse)
    counts = [CountingAll(schedule, whose) for schedule in schedules]
    made = [make(module.parameters()) for make, module in zip(optimizers, modules)]
    for step in range(steps):
        batch = batch_of("quiet", 2 * M, step)
        for count in counts:
            count.batch = batch
        with whose:
            loopback.step(schedules, batch[0], target=batch[1], return_outputs=False)
        yield schedules, [count.peak for count in counts]
        for count, optimizer in zip(counts, made):
            count.takes(optimizer)


def sgd(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, **options)


def adamw(**options: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, **options)


def assert_counted(schedules: Sequence[Any], peaks: Sequence[int], *, is_first: bool) -> None:
    """What the statistics say is what was counted.

    But for what lives inside a backward alone, where nobody looks: on the last rank two gradients of outputs, and that of its
    input. In the first step messages take their memory later than they do once their shapes are known.
    """
    for schedule, peak in zip(schedules, peaks):
        footprint = schedule.ledger.footprints[schedule.session.context.plan_rank, 0]
        one_each = sum(amount.num_bytes for amount in footprint.amounts if amount.name in ("in", "out"))
        uncounted = schedule.stats["device_peak_bytes"] - peak
        if schedule is schedules[-1]:
            assert 0 <= uncounted <= one_each + 4  # and the loss of the last microbatch
        else:
            assert 0 <= uncounted <= is_first * 2 * one_each


@pytest.mark.parametrize("way", WAYS)
def test_another_count_finds_the_same(way):
    kinds = [sgd(foreach=True), adamw(fused=True), sgd(fused=True), adamw(foreach=True)]
    said = []
    for step, (schedules, peaks) in enumerate(counted(WAYS[way], kinds)):
        assert_counted(schedules, peaks, is_first=step == 0)
        said.append([schedule.stats["static_bytes"] for schedule in schedules])
    parameters = [list(schedule.session.context.modules()[0].parameters()) for schedule in schedules]
    states = [sum(k * p.nbytes + 4 * (k == 2) for p in of) for k, of in zip((1, 2, 1, 2), parameters)]  # AdamW also counts
    assert [after - before for before, after in zip(said[0], said[1])] == states
    assert said[1] == said[2]


# Balance that raises the fullest rank.


def trained(way: Any, modules: Sequence[nn.Module], steps: int = 3) -> list[int]:
    """The peaks of all ranks in the last of some steps, behind each of which an optimizer takes its own."""
    loopback, schedules = pipeline(way, modules, mse)
    optimizers = [adamw()(module.parameters()) for module in modules]
    x, target = batch_of("quiet", 2 * M)
    for _ in range(steps):
        loopback.step(schedules, x, target=target, return_outputs=False)
        for optimizer in optimizers:
            optimizer.step()
    return [int(schedule.stats["device_peak_bytes"]) for schedule in schedules]


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


OF_RANK = r"([^(]+) \(rank (\d)(?: of the plan)?\)"
RAISED = re.compile(f"raises the memory of the fullest rank from {OF_RANK} to {OF_RANK}")


@dataclass(frozen=True)
class OneStageEach:
    """Makes schedules that are not of a class alone."""

    make: Callable[..., bpipe.Schedule]
    rule = "1f1b"

    def __call__(self, stages: Any, m: int, loss_fn: Any) -> bpipe.Schedule:
        return self.make(stages, m, loss_fn)


def from_plan(rule: str) -> OneStageEach:
    return OneStageEach(lambda of, m, loss_fn: bpipe.FromPlan(of, build("1f1b", 4, m, slots=3, rule=rule), loss_fn))


BY_COUNT: dict[str, Any] = {
    "the class": bpipe.BalancedOneFOneB,
    "budget=None": Over(bpipe.OneFOneB, {"budget": None}),
    "slots=": OneStageEach(
        lambda of, m, loss_fn: bpipe.OneFOneB(of, m, loss_fn, options=bpipe.Options(slots=[3, None, None, None]))
    ),
    "a plan": from_plan("fewest"),
    "an eager plan": from_plan("eager"),
}


@pytest.mark.parametrize("way", BY_COUNT)
def test_a_head_that_gets_remote_activations_as_well(way, caplog):
    """This is said once, with what a plain run has, and what this one has come to with the states of optimizers."""
    peaks = trained(BY_COUNT[way], stages())
    (said,) = warned(caplog)
    plain = trained(bpipe.OneFOneB, stages())
    assert max(peaks) > max(plain)
    found = RAISED.search(said)
    assert found is not None and 'bpipe.Balanced(schedule, budget="lowest")' in said
    assert [found[1], found[3]] == [show_bytes(max(of)) for of in (plain, peaks)]
    assert [int(found[2]), int(found[4])] == [3, 3]


def test_it_is_said_before_the_second_step(caplog):
    trained(bpipe.BalancedOneFOneB, stages(), steps=1)
    assert warned(caplog) == []
    trained(bpipe.BalancedOneFOneB, stages(), steps=2)
    assert len(warned(caplog)) == 1


SILENT = {
    "plain": (bpipe.OneFOneB, HEAD),
    "bytes": (Over(bpipe.OneFOneB, {"budget": "lowest"}), HEAD),
    "recompute": (Over(bpipe.OneFOneB, {"budget": None, "by": "recompute"}), HEAD),
    "to the host": (Over(bpipe.OneFOneB, {"budget": None, "to": Destinations(host="only")}), HEAD),
    "no head": (bpipe.BalancedOneFOneB, 64),
}


@pytest.mark.parametrize("way", SILENT)
def test_balance_that_raises_nothing_says_nothing(way, caplog):
    kind, head = SILENT[way]
    trained(kind, stages(head))
    assert warned(caplog) == []


def test_budgets_that_differ(caplog):
    """A rank without a limit comes to have the most: this is said when the plan is made, at construction if sizes are known."""
    to_the_head = Destinations(pairs=[3, 3, 3, 3], others=False)
    trained(Over(bpipe.OneFOneB, {"budget": [130_000, None, None, None], "to": to_the_head}), stages())
    assert [RAISED.search(said) is not None for said in warned(caplog)] == [True]
    sizes = Sizes.of([10, 10, 10, 40])
    pipeline(Over(bpipe.OneFOneB, {"budget": [30, None, None, None], "sizes": sizes, "to": to_the_head}), stages(), mse)
    assert [RAISED.search(said) is not None for said in warned(caplog)] == [True, True]


def test_sizes_that_leave_out_what_stays(caplog):
    """Nobody measures what is given: a rank over its budget is named, when the states of its optimizer are there."""
    modules = stages()
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules, mse)
    x, target = batch_of("quiet", 2 * M)
    for _ in range(2):
        loopback.step(schedules, x, target=target, return_outputs=False)
    plan = schedules[0].plan
    over = Over(bpipe.OneFOneB, {"budget": max(plan.device_peak_bytes), "sizes": plan.sizes})
    peaks = trained(over, stages())
    (said,) = warned(caplog)
    states = sum(2 * parameter.nbytes + 4 for parameter in modules[3].parameters())
    assert f"rank 3 holds {show_bytes(peaks[3])}" in said and f"{show_bytes(states)} of optimizer states" in said


@pytest.mark.parametrize(("budgets", "is_over"), [([37_000, 36_000], True), ([35_500, 39_000], False)])
def test_budgets_of_ranks_that_hold_the_stages_in_another_order(budgets, is_over, caplog):
    """The group's rank 0 holds the last stage, and is the plan's rank 1."""
    loopback = bpipe.Loopback(2)
    held = [bpipe.PipelineStage(nn.Linear(64, 64), i, 2, "cpu", group=loopback.rank(1 - i)) for i in (1, 0)]
    sizes = Sizes(stages=(StageSizes(parts=(100,)),) * 2, static=(10, 10))
    schedules = [bpipe.Balanced(bpipe.OneFOneB(one, 4, loss_fn=mse), budget=budgets, sizes=sizes) for one in held]
    for _ in range(3):
        loopback.step(schedules, torch.ones(8, 64), target=torch.ones(8, 64))
    said = [text for text in warned(caplog) if "over its budget" in text]
    assert [text.split(": ")[-1].split(" holds")[0] if ": " in text else text for text in said] == ["rank 0"] * is_over
    assert not any("optimizer states" in text for text in said)


def test_raises_that_are_worth_a_warning():
    names = ["rank 0", "rank 1"]
    assert [len([*_raised([1000, 900], [after, 900], names)]) for after in (1000, 1009, 1011)] == [0, 0, 1]
    record = StepRecord("", "", "00" * 16, True, 0, 1, 1, 1, 0, bytes(16), (0,), rooms=(PeakRecord(2**30 + 5, 2**31, 0, 2**30),))
    (said,) = PeakRecord.doubts([record], 1)
    assert "rank 0 holds 1.00 GiB, over its budget of 1.00 GiB by 5 B, because" in said
