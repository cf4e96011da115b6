"""Losses, outputs and gradients equal plain 1F1B's and a single process's, to the bit."""

from __future__ import annotations

import pytest
import torch

import bpipe
from tests.models import KINDS, Result, as_rank, assert_same, in_loopback, joined, single_process
from tests.ranks import run_ranks

SCHEDULES = {"gpipe": bpipe.GPipe, "1f1b": bpipe.OneFOneB, "balanced": bpipe.BalancedOneFOneB}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("p, m", [(1, 3), (2, 2), (4, 8), (5, 3), (8, 10)])
def test_loopback_equals_a_single_process(kind, p, m):
    if kind == "frozen" and p == 1:
        pytest.skip("one frozen stage trains nothing")
    reference = single_process(kind, p, m)
    for schedule in SCHEDULES.values():
        assert_same(in_loopback(kind, p, m, schedule), reference)


def test_balance_really_evicts_in_these_tests():
    stats = in_loopback("transformer", 8, 10, bpipe.BalancedOneFOneB).stats
    assert [bool(s["evicted_bytes"]) for s in stats] == [True, True, True, False, False, False, False, False]
    assert all(s["loaded_bytes"] == s["evicted_bytes"] for s in stats)


def all_schedules(rank: int, kinds: list[str], p: int, m: int) -> list[Result]:
    """This rank's part of every kind under every schedule, in one set of processes."""
    return [as_rank(rank, kind, p, m, schedule, 2, {}) for kind in kinds for schedule in SCHEDULES.values()]


@pytest.mark.parametrize(
    "kinds, p, m", [(list(KINDS), 4, 8), *((["transformer"], *pm) for pm in [(1, 2), (2, 4), (3, 5), (6, 12)])]
)
def test_processes_equal_a_single_one(kinds, p, m):
    results = list(map(joined, zip(*run_ranks(all_schedules, p, kinds, p, m, timeout_s=120))))
    for i, kind in enumerate(kinds):
        reference = single_process(kind, p, m)
        for result in results[i * len(SCHEDULES) : (i + 1) * len(SCHEDULES)]:
            assert_same(result, reference)


def test_a_budget_for_each_rank_of_any_schedule():
    reference = single_process("transformer", 2, 6)
    results = joined(run_ranks(as_rank, 2, "transformer", 2, 6, bpipe.GPipe, 2, {"slots": (4, 9)}))
    assert_same(results, reference)
    assert [s["peak_slots"] for s in results.stats] == [4, 8]
