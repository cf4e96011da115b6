"""That ranks fail together costs a healthy step of the main job less than a hundredth of its CPU time."""

from __future__ import annotations

from benchmarks.failing_together import P, measured
from tests.ranks import run_ranks


def test_the_line_between_ranks_costs_little():
    for row in run_ranks(measured, P, 1):
        assert row["calls"] == 1
        assert row["control_thread_us"] > 0
        assert row["share_percent"] < 1, row
