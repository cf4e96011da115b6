"""The gaps of timelines: as long as a rank does not compute, as full as an independent replay finds, filled within budgets."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import ConfigurationError
from bpipe.schedules import Costs, Plan, build, fill_gaps, gaps_of, simulate
from tests.schedules.replay import waiting_bytes
from tests.schedules.sized import sized_plans
from tests.tiers import examples


@pytest.mark.parametrize(("p", "m", "idle", "more"), [(8, 16, 0.304, 0.438), (4, 8, 0.273, 0.375)])
def test_idle_time_of_1f1b_and_how_much_more_work_it_takes(p: int, m: int, idle: float, more: float) -> None:
    timeline = simulate(build("1f1b", p, m), Costs(forward_s=1.0, backward_s=2.0))
    for rank in range(p):
        for piece_s in (1.0, 0.5, 0.1):
            found = fill_gaps(timeline, rank, piece_s)
            assert found.used_s == pytest.approx(found.idle_s) == pytest.approx(timeline.bubble_s(rank))
        assert found.idle_s / timeline.makespan_s == pytest.approx(idle, abs=1e-3)
        assert found.used_s / timeline.work_s(rank) == pytest.approx(more, abs=1e-3)


@pytest.mark.parametrize("rule", ["gpipe", "balanced_1f1b", "interleaved_1f1b", "zb_h1", "zbv", "chimera"])
def test_gaps_are_what_a_rank_does_not_compute(rule: str) -> None:
    stages = {"interleaved_1f1b": 8, "zbv": 8, "chimera": 8}.get(rule, 4)
    timeline = simulate(build(rule, stages, 8, num_ranks=4), Costs(forward_s=1.0, backward_s=2.5))
    for rank in range(4):
        gaps = gaps_of(timeline, rank)
        assert sum(gap.seconds for gap in gaps) == pytest.approx(timeline.bubble_s(rank))
        assert all(gap.seconds > 0 for gap in gaps)
        assert all(before.end_s <= after.begin_s for before, after in pairwise(gaps))


def test_balance_makes_room_on_early_ranks() -> None:
    """With 12 GiB, of which 4 stay, a piece of 2 GiB does not fit beside the 8 microbatches of rank 0, but beside 5."""
    gib, costs = 2**30, Costs(forward_s=1.0, backward_s=2.0, saved_bytes=2**30, static_bytes=4 * 2**30)
    plain, balanced = (
        [fill_gaps(timeline, rank, 1.0, 2 * gib, 12 * gib).num_pieces for rank in range(8)]
        for timeline in (simulate(build(rule, 8, 16), costs) for rule in ("1f1b", "balanced_1f1b"))
    )
    assert plain == [6, 9, *[21] * 6] and balanced == [21] * 8


@given(sized_plans(), st.integers(0, 2**31))
@settings(max_examples=examples(60))
def test_no_fill_exceeds_its_budget_beside_what_an_independent_replay_finds(plan: Plan, seed: int) -> None:
    chosen = random.Random(seed)
    costs = Costs(forward_s=chosen.uniform(0.5, 2.0), backward_s=chosen.uniform(0.5, 4.0))
    timeline, waiting = simulate(plan, costs), waiting_bytes(plan)
    assert plan.sizes is not None
    for rank in range(plan.num_ranks):
        gaps, spans = gaps_of(timeline, rank), list(timeline.waits(rank))
        held = [waiting[rank, span.action.identity] for span in spans]
        assert [gap.num_bytes for gap in gaps[: len(held)]] == held
        budget, piece = chosen.randint(1, 2 * timeline.device_peak_bytes(rank) + 1), chosen.randint(0, 100)
        found = fill_gaps(timeline, rank, 0.25, piece, budget)
        fitting = [gap for gap in gaps if gap.num_bytes + piece <= budget]
        assert found.num_pieces == sum(int(gap.seconds / 0.25 + 1e-9) for gap in fitting)


def test_pieces_take_time() -> None:
    timeline = simulate(build("1f1b", 2, 2), Costs())
    for piece_s in (0.0, -1.0, float("nan")):
        with pytest.raises(ConfigurationError, match="give a positive number of seconds"):
            fill_gaps(timeline, 0, piece_s)
