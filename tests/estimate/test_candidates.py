"""The candidates: every schedule once, plain and balanced."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.estimate.candidates import SCHEDULES, Variants, variants
from bpipe.passes.balance.balance import default_slots
from bpipe.schedules import Plan, build, verify
from tests.tiers import examples


def all_of(p: int, m: int) -> list[Plan]:
    return [plan for one in variants(p, m) for plan in one.plain_and_tight]


@given(st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=examples(40))
def test_every_schedule_is_there_and_no_plan_twice(p: int, m: int) -> None:
    plans = [(plan.actions, plan.served) for plan in all_of(p, m)]
    assert len(set(plans)) == len(plans)
    names = (*SCHEDULES, "balanced_1f1b")
    assert {(plan.actions, plan.served) for name in names if not any((plan := build(name, p, m)).served)} <= set(plans)


@given(st.integers(1, 9), st.integers(1, 20))
@settings(max_examples=examples(40))
def test_balanced_ones_need_less_and_can_be_built_again(p: int, m: int) -> None:
    for one in variants(p, m):
        assert one.plain == build(one.plain.name, p, m)
        if one.tight is not None:
            slots = one.tight.slots[0]
            assert one.tight == build(one.plain.name, p, m, slots=slots)
            verify(one.tight)
            assert slots is not None and max(one.tight.peak_slots) <= slots < max(one.plain.peak_slots)


@pytest.mark.parametrize("p", range(1, 17))
def test_balanced_1f1b_is_what_everybody_means_by_it(p: int) -> None:
    balanced = [(plan.name, plan.slots[0]) for plan in all_of(p, 4 * p) if any(plan.served)]
    assert balanced == ([("1f1b", default_slots(p))] if p > 3 else [])


def test_where_several_are_the_same_it_is_1f1b() -> None:
    assert [plan.name for plan in all_of(4, 1)] == ["1f1b"]


def test_roomier_budgets_move_less() -> None:
    one = Variants(build("1f1b", 16, 32))
    assert one.tight is not None
    budgets = [one.tight, *reversed(one.roomier)]
    assert [plan.slots[0] for plan in budgets] == list(range(9, 16))
    moved = [sum(len(plan.evicted(rank)) for rank in range(16)) for plan in budgets]
    assert moved == sorted(moved, reverse=True) and moved[-1] > 0
