"""The bytes that a plan says are the bytes that a rank has, after every action: counted by storages, whatever the model."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache
from itertools import product
from operator import le
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from benchmarks import balanced_head
from bpipe.schedules import Destinations
from tests.models import KINDS, WIDTH, batch_of, held_by, modules_of, mse
from tests.occupied import Counting, Whose
from tests.over import Over, pipeline
from tests.ranks import run_ranks
from tests.test_memory_use import live_tensors, resident_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

M = 6
SCHEDULES = {  # and how many ranks hold four stages
    bpipe.OneFOneB: 4,
    bpipe.GPipe: 4,
    bpipe.ZBH1: 4,
    bpipe.ZBH2: 4,
    bpipe.Interleaved1F1B: 2,
    bpipe.InterleavedZeroBubble: 2,
    bpipe.BreadthFirst: 2,
    bpipe.ZBV: 2,
    bpipe.VHalf: 2,
    bpipe.VMin: 2,
    bpipe.DualPipeV: 2,
}
STUCK = {bpipe.VHalf: 8, bpipe.VMin: 8}  # at their peaks gradients wait for weight halves: so small a share of a microbatch can go


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

TO_HOST, HOST_LAST = Destinations(host="only"), Destinations(host="last")
UNLIKE = ["nested", "pair", "frozen", "returns its input"]
# Stages that save whole messages or nothing of them, get a gradient for each, and give each a gradient of its own.
EXACT = {
    bpipe.OneFOneB: ["quiet", "conv", "lstm", "views", "autocast", "tied", "ends in relu", "relu in place"],
    bpipe.ZBH1: ["quiet", "conv", "lstm", "views", "autocast", "tied", "relu in place"],
    bpipe.DualPipeV: ["quiet", "views", "autocast", "tied", "relu in place"],
}


def counted(schedule: type[bpipe.Schedule], kind: str, **options: Any) -> tuple[list[Any], list[Counting]]:
    """The schedules of three steps of four stages in a loopback, and the counts of the last one."""
    torch.manual_seed(0)
    modules = [MODELS[kind](stage) for stage in range(4)]
    loopback, schedules = pipeline(Over(schedule, options), modules, M, mse, SCHEDULES[schedule])
    whose = Whose()
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):  # the first measures, in the second buffers are made as remote activations arrive
        count_step(whose, loopback, schedules, counts, batch_of(kind, 2 * M, step), looks=step == 2)
    return schedules, counts


def count_step(
    whose: Whose, loopback: bpipe.Loopback, schedules: list[Any], counts: list[Counting], batch: Any, *, looks: bool = True
) -> None:
    for count in counts:
        count.batch, count.looks = batch, looks
    with whose:
        loopback.step(schedules, batch[0], target=batch[1], return_outputs=False)


def assert_exact(count: Counting) -> None:
    for moment in count.moments():
        assert moment.counted_after == moment.planned_after, moment
        assert moment.counted_during in (None, moment.planned_during), moment


def assert_enough(count: Counting) -> None:
    for moment in count.moments():
        assert moment.counted_after <= moment.planned_after, moment
        assert moment.counted_during is None or moment.counted_during <= moment.planned_during, moment


def assert_peaks(schedules: list[Any], counts: list[Counting], *, messages: int = 1) -> None:
    """Predicted and used peaks are equal, and so is the counted one but for some messages, each way.

    One of each is a gradient that lives inside a backward alone, where nobody can count.
    """
    plan = schedules[0].plan
    for rank, (schedule, count) in enumerate(zip(schedules, counts, strict=True)):
        stats = schedule.stats
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"] == plan.device_peak_bytes[rank]
        assert stats["host_peak_bytes"] == stats["predicted_host_peak_bytes"] == plan.host_bytes(rank)
        own = [sizes for sizes, owner in zip(plan.sizes.stages, plan.stage_ranks, strict=True) if owner == rank]
        uncounted = stats["device_peak_bytes"] - stats["static_bytes"] - count.peak
        assert 0 <= uncounted <= messages * max(sizes["in"].num_bytes + sizes["out"].num_bytes for sizes in own)


@cache
def squeezed(schedule: type[bpipe.Schedule]) -> tuple[int | None, ...]:
    """A budget for each rank: a microbatch less than the first rank has without evictions, if it can; no limit elsewhere."""
    modules = [MODELS["quiet"](stage) for stage in range(4)]
    loopback, schedules = pipeline(Over(schedule, {"budget": 2**40}), modules, M, mse, SCHEDULES[schedule])
    for _ in range(2):
        loopback.step(schedules, *batch_of("quiet", 2 * M)[:1], target=batch_of("quiet", 2 * M)[1], return_outputs=False)
    plan = schedules[0].plan
    return (plan.device_peak_bytes[0] - plan.sizes.stages[0].saved // STUCK.get(schedule, 1), *(None for _ in schedules[1:]))


WITHIN: dict[str, dict[str, Any]] = {
    "low": {},
    "peers": {"options": bpipe.Options(parts=4)},
    "host": {"options": bpipe.Options(parts=2), "to": TO_HOST},
}


@pytest.mark.parametrize(
    "within, schedule",
    list(product(WITHIN, SCHEDULES)),
    ids=lambda value: getattr(value, "rule", value),
)
def test_every_action_leaves_what_the_plan_says(within, schedule):
    options = WITHIN[within]
    budget = squeezed(schedule) if options else "lowest"
    schedules, counts = counted(schedule, "quiet", budget=budget, **options)
    for count in counts:
        assert_exact(count)
    assert_peaks(schedules, counts)
    if options:
        assert schedules[0].plan.device_peak_bytes[0] <= budget[0]
        assert schedules[0].stats["evicted_bytes"] == schedules[0].stats["loaded_bytes"] > 0
    for rank, one in enumerate(schedules):  # copies on the host have a column of their own
        assert one.ledger.peak_host_bytes == one.stats["host_peak_bytes"] == one.plan.host_bytes(rank)
        assert one.ledger.host_bytes == one.ledger.live_bytes == 0
    assert (schedules[0].ledger.peak_host_bytes > 0) == ("to" in options)


@pytest.mark.parametrize("schedule, kind", [(schedule, kind) for schedule, kinds in EXACT.items() for kind in kinds[1:]])
def test_whatever_stages_save_of_their_messages(schedule, kind):
    schedules, counts = counted(schedule, kind, budget="lowest")
    for count in counts:
        assert_exact(count)
    assert_peaks(schedules, counts)


@pytest.mark.parametrize(
    "schedule, kind",
    [(schedule, kind) for schedule in (bpipe.OneFOneB, bpipe.DualPipeV) for kind in UNLIKE]
    + [
        (bpipe.ZBH1, "ends in relu"),
        (bpipe.ZBH1, "frozen"),
        *((bpipe.DualPipeV, kind) for kind in ("conv", "lstm", "ends in relu")),
    ],
)
def test_a_plan_never_says_too_little(schedule, kind):
    """Gradients that are not there, messages that share memory, and what is saved by both stages at a turn count once more."""
    schedules, counts = counted(schedule, kind, budget="lowest")
    for count in counts:
        assert_enough(count)
    assert_peaks(schedules, counts, messages=2)


def count_as_rank(rank: int, num_ranks: int, cases: list[tuple[type[bpipe.Schedule], dict[str, Any]]]) -> list[tuple[int, Any]]:
    """In a process: actions whose count is not the plan's, and the statistics of the last step, for each case."""
    results = []
    for schedule, options in cases:
        num_stages = num_ranks * (4 // SCHEDULES[schedule])
        torch.manual_seed(0)
        modules = [MODELS["quiet"](stage) for stage in range(num_stages)]
        held = held_by(schedule, num_ranks, num_stages)[rank]
        stages = [bpipe.PipelineStage(modules[i], i, num_stages, "cpu") for i in held]
        balanced, whose = Over(schedule, options)(stages, M, loss_fn=mse), Whose()
        counting = Counting(balanced, whose, has_rooms=False)
        counting.batch = x, y = batch_of("quiet", 2 * M)
        for _ in range(3):
            with whose:
                balanced.step(x, target=y, return_outputs=False)
        wrong = [moment for moment in counting.moments() if moment.counted_after != moment.planned_after]
        results.append((len(wrong), balanced.stats))
        balanced.close()
    return results


@pytest.mark.parametrize(
    "num_ranks, cases",
    [
        (2, [(bpipe.ZBV, {"budget": "lowest"})]),
        (2, [(bpipe.Interleaved1F1B, {"budget": "lowest", "to": HOST_LAST})]),
        (3, [(bpipe.GPipe, {"budget": "lowest", "options": bpipe.Options(parts=2), "to": TO_HOST})]),
        (
            4,
            [
                (bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=4)}),
                (bpipe.OneFOneB, {"budget": "lowest", "to": HOST_LAST}),
            ],
        ),
    ],
)
def test_processes_have_what_the_plan_says(num_ranks, cases):
    for of_rank in run_ranks(count_as_rank, num_ranks, num_ranks, cases):
        for num_wrong, stats in of_rank:
            assert num_wrong == 0
            assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"]
            assert stats["host_peak_bytes"] == stats["predicted_host_peak_bytes"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.rule)
def test_the_measuring_step_needs_no_more_than_the_later_ones(schedule):
    loopback, schedules = pipeline(Over(schedule, {"budget": "lowest"}), modules_of("quiet", 4), M, mse, SCHEDULES[schedule])
    whose = Whose()
    counts = [Counting(one, whose) for one in schedules]
    peaks = []
    for _ in range(2):
        count_step(whose, loopback, schedules, counts, batch_of("quiet", 2 * M))
        peaks.append([count.peak for count in counts])
    assert all(map(le, *peaks))


class Caches(nn.Module):
    """Holds a table that is no buffer, made in the first forward, and uses it in each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1] * WIDTH).view(x.shape[1], WIDTH)
        return self.linear(x) * self.table


def test_what_a_module_holds_stays_and_is_planned():
    modules = [Caches() for _ in range(4)]
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules, M, mse)
    x, y = batch_of("quiet", 2 * M)
    for _ in range(3):
        loopback.step(schedules, x, target=y, return_outputs=False)
    parameters = 2 * sum(p.nbytes for p in modules[0].parameters())
    for schedule, module in zip(schedules[:-1], modules):
        assert schedule.stats["static_bytes"] == parameters + module.table.nbytes
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]


def test_outputs_that_a_step_returns_are_planned():
    static = {}
    for returns in (False, True):
        loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
        x, y = batch_of("quiet", 2 * M)
        for _ in range(2):
            loopback.step(schedules, x, target=y, return_outputs=returns)
        static[returns] = [schedule.stats["static_bytes"] for schedule in schedules]
    assert [kept - left for left, kept in zip(static[False], static[True])] == [0, 0, 0, x.nbytes]


def test_outputs_returned_in_some_steps_only_are_planned_for_those():
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
    x, y = batch_of("quiet", 2 * M)
    static = []
    for returns in (False, False, True, True, False):
        loopback.step(schedules, x, target=y, return_outputs=returns)
        static.append(schedules[-1].stats["static_bytes"])
    assert static[1] == static[4] == static[3] - x.nbytes


def test_a_head_of_32000_words():
    """By count the last rank, which has the most, gets remote activations as well; in bytes the highest rank comes down to it."""
    trained, ways = balanced_head.trained, balanced_head.WAYS
    counts, whose = [], Whose()

    def counted_in_bytes(schedule: bpipe.Schedule) -> bpipe.Schedule:
        counts.append(Counting(ways["balanced in bytes"](schedule), whose))
        return counts[-1].schedule

    plain, by_count = (trained(ways[way], steps=2) for way in ("plain 1F1B", "balanced by count"))
    with whose:
        in_bytes = trained(counted_in_bytes, steps=2)
    of_each = [[schedule.stats for schedule in schedules] for schedules, _ in (plain, by_count, in_bytes)]
    peaks, predicted = (
        [[stats[f"{which}device_peak_bytes"] for stats in of_one] for of_one in of_each] for which in ("", "predicted_")
    )
    assert peaks == predicted
    assert max(peaks[1]) == peaks[1][-1] > max(peaks[0]) == peaks[0][0]  # the paper's rule makes it worse than it was
    assert max(peaks[2]) == peaks[0][-1] < max(peaks[0])  # what the last rank alone needs, which no eviction can lower
    assert_peaks(in_bytes[0], counts)
    assert all(map(torch.equal, plain[1], by_count[1])) and all(map(torch.equal, plain[1], in_bytes[1]))


# What a long run leaves behind.


class Wide(nn.Module):
    """A residual block that saves a lot for little work."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def long_run(rank: int, p: int, num_steps: int, options: dict[str, Any], sizes: list[int]) -> list[tuple[int, float, float]]:
    """Live bytes, resident bytes and buffers on the host, early and late in a run whose batches take turns."""
    torch.manual_seed(rank)
    module = Wide(16, 256)
    schedule = Over(bpipe.OneFOneB, options)(bpipe.PipelineStage(module, rank, p, "cpu"), 2 * p, loss_fn=mse)
    batches = [torch.randn(2 * p * size, 16) for size in sizes]
    counts = []
    for step in range(num_steps):
        if step in (20, num_steps - 1):
            gc.collect()
            counts.append((live_tensors(), resident_bytes(), schedule.stats["host_peak_bytes"]))
        x = batches[step % len(batches)]
        schedule.step(x, target=x, return_outputs=False)
    evicted = schedule.stats["evicted_bytes"]
    schedule.close()
    return [*counts, (evicted, 0, 0)]


ONLY_HOST = {"budget": "lowest", "options": bpipe.Options(parts=2), "to": TO_HOST}


@pytest.mark.parametrize(
    "options, sizes",
    [(ONLY_HOST, [8]), ({"budget": "lowest"}, [8, 24])],
    ids=["host", "alternating shapes"],
)
def test_a_long_run_stays_flat(options, sizes):
    p = 3 if "to" in options else 4
    results = run_ranks(long_run, p, p, 201 if "to" in options else 101, options, sizes)
    for (live_early, resident_early, host_early), (live_late, resident_late, host_late), _ in results:
        assert (live_late, host_late) == (live_early, host_early)
        assert resident_late <= resident_early * 1.01
    assert results[0][2][0] > 0
    assert (results[0][0][2] > 0) == ("to" in options)
