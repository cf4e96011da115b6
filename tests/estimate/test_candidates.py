"""The candidates: every schedule once, plain and balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.estimate.candidates import SCHEDULES, roomier, variants
from bpipe.passes.balance.balance import default_slots
from bpipe.schedules import build, verify


@given(st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=40)
def test_every_schedule_is_there_and_no_plan_twice(p: int, m: int) -> None:
    found = list(variants(p, m))
    plans = [(one.plan.actions, one.plan.served) for one in found]
    assert len(set(plans)) == len(plans)
    assert {(plan.actions, plan.served) for name in SCHEDULES if not any((plan := build(name, p, m)).served)} <= set(plans)


@given(st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=40)
def test_balanced_ones_need_less_and_can_be_built_again(p: int, m: int) -> None:
    found = list(variants(p, m))
    plain = {one.schedule: one.plan for one in found if not one.destination}
    for one in found:
        assert one.plan == build(one.schedule, p, m, slots=one.slots)
        if one.destination:
            verify(one.plan)
            assert max(one.plan.peak_slots) <= (one.slots or 0) < max(plain[one.schedule].peak_slots)


@pytest.mark.parametrize("p", range(1, 17))
def test_balanced_1f1b_is_what_everybody_means_by_it(p: int) -> None:
    balanced = [one for one in variants(p, 4 * p) if one.destination]
    assert [(one.schedule, one.slots) for one in balanced] == ([("1f1b", default_slots(p))] if p > 3 else [])


def test_where_several_are_the_same_it_is_1f1b() -> None:
    assert [one.schedule for one in variants(4, 1)] == ["1f1b"]


def test_roomier_budgets_move_less() -> None:
    balanced = next(one for one in variants(16, 32) if one.destination)
    budgets = [balanced, *reversed(roomier(balanced))]
    assert [one.slots for one in budgets] == list(range(9, 16))
    moved = [sum(len(one.plan.evicted(rank)) for rank in range(16)) for one in budgets]
    assert moved == sorted(moved, reverse=True) and moved[-1] > 0
