"""Losses, outputs and gradients equal plain 1F1B's and a single process's, to the bit, whatever the schedule."""

from __future__ import annotations

import pytest

import bpipe
from tests.models import KINDS, Result, as_rank, assert_same, in_loopback, joined, single_process
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEDULES = {"gpipe": bpipe.GPipe, "1f1b": bpipe.OneFOneB, "balanced": bpipe.BalancedOneFOneB}
HALVES = [bpipe.ZBH1, bpipe.ZBH2]
LOOPED = [bpipe.Interleaved1F1B, bpipe.InterleavedZeroBubble, bpipe.BreadthFirst]
STAGES = [*LOOPED, bpipe.ZBV, bpipe.VHalf, bpipe.VMin, bpipe.DualPipeV]  # two on each rank

# Stages that share a rank draw random numbers in the order of its list: those with dropout have no single process to equal.
QUIET = sorted(set(KINDS) - {"transformer", "frozen"})


SIZES = [(1, 3), (2, 2), (4, 8), (5, 3), (8, 10)]


@pytest.mark.parametrize("p, m, kind", [(*size, kind) for size in SIZES for kind in KINDS])
def test_loopback_equals_a_single_process(p, m, kind):
    if kind == "frozen" and p == 1:
        pytest.skip("one frozen stage trains nothing")
    reference = single_process(kind, p, m)
    for schedule in SCHEDULES.values():
        assert_same(in_loopback(kind, p, m, schedule), reference)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p, m", [(2, 3), (4, 8)])
def test_backwards_in_halves(kind, p, m):
    reference = single_process(kind, p, m)
    for schedule in HALVES:
        assert_same(in_loopback(kind, p, m, schedule), reference)


@pytest.mark.parametrize("kind", QUIET)
def test_two_stages_on_each_rank(kind):
    reference = single_process(kind, 4, 4)
    for schedule in STAGES:
        assert_same(in_loopback(kind, 4, 4, schedule, num_ranks=2), reference)


@pytest.mark.parametrize("schedule", [*HALVES, *STAGES], ids=lambda schedule: schedule.rule)
def test_eight_ranks(schedule):
    num_stages = 8 if schedule in HALVES else 16
    reference = single_process("quiet", num_stages, 16, steps=1)
    assert_same(in_loopback("quiet", num_stages, 16, schedule, steps=1, num_ranks=8), reference)


@pytest.mark.parametrize("schedule", LOOPED)
@pytest.mark.parametrize("p, v, m", [(1, 2, 3), (1, 3, 2), (3, 3, 6), (2, 4, 4)])
def test_more_stages_on_each_rank(schedule, p, v, m):
    assert_same(in_loopback("views", p * v, m, schedule, num_ranks=p), single_process("views", p * v, m))


def test_balance_really_evicts_in_these_tests():
    stats = in_loopback("transformer", 8, 10, bpipe.BalancedOneFOneB).stats
    assert [bool(s["evicted_bytes"]) for s in stats] == [True, True, True, False, False, False, False, False]
    assert all(s["loaded_bytes"] == s["evicted_bytes"] for s in stats)


@pytest.mark.parametrize(
    "schedule, kind, num_stages, slots",
    [
        (bpipe.ZBH1, "transformer", 4, (3, 4, 5, 6)),
        (bpipe.ZBH2, "tied", 4, (6, 7, 7, 8)),
        (bpipe.Interleaved1F1B, "quiet", 8, 9),
        (bpipe.ZBV, "quiet", 8, (6, 9, 9, 9)),
    ],
)
def test_what_is_evicted_between_a_forward_and_an_input_half(schedule, kind, num_stages, slots):
    result = in_loopback(kind, num_stages, 8, schedule, num_ranks=4, options=bpipe.Options(slots=slots))
    assert result.stats[0]["evicted_bytes"] > 0
    assert_same(result, single_process(kind, num_stages, 8))


def all_schedules(rank: int, kinds: list[str], p: int, m: int) -> list[Result]:
    """This rank's part of every kind under every schedule, in one set of processes."""
    return [as_rank(rank, kind, p, m, schedule, 2, {}) for kind in kinds for schedule in SCHEDULES.values()]


@pytest.mark.parametrize(
    "kinds, p, m", [(list(KINDS), 4, 8), *((["transformer"], *pm) for pm in [(1, 2), (2, 4), (3, 5), (6, 12)])]
)
def test_processes_equal_a_single_one(kinds, p, m):
    results = list(map(joined, zip(*run_ranks(all_schedules, p, kinds, p, m))))
    for i, kind in enumerate(kinds):
        reference = single_process(kind, p, m)
        for result in results[i * len(SCHEDULES) : (i + 1) * len(SCHEDULES)]:
            assert_same(result, reference)


def halves_and_stages(rank: int, kind: str, p: int, m: int) -> list[Result]:
    options = [(schedule, p) for schedule in HALVES] + [(schedule, 2 * p) for schedule in STAGES]
    return [as_rank(rank, kind, num_stages, m, schedule, 2, {}, num_ranks=p) for schedule, num_stages in options]


@pytest.mark.parametrize("kind, p, m", [("nested", 2, 4), ("conv", 3, 6), ("quiet", 4, 8)])
def test_halves_and_stages_in_processes(kind, p, m):
    results = list(map(joined, zip(*run_ranks(halves_and_stages, p, kind, p, m))))
    references = {num_stages: single_process(kind, num_stages, m) for num_stages in (p, 2 * p)}
    for result in results:
        assert_same(result, references[len(result.gradients)])
    assert len(results) == len([*HALVES, *STAGES])


def test_a_budget_for_each_rank_of_any_schedule():
    reference = single_process("transformer", 2, 6)
    results = joined(run_ranks(as_rank, 2, "transformer", 2, 6, bpipe.GPipe, 2, {"options": bpipe.Options(slots=(4, 9))}))
    assert_same(results, reference)
    assert [s["peak_slots"] for s in results.stats] == [4, 8]
