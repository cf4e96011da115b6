"""Evicting and recomputing in one plan: any order of computations, sizes and budgets, judged by the independent replay."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import communicate, computations_only, forward_only
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.passes.fit import FINENESS
from bpipe.passes.recompute import recompute
from bpipe.schedules import Costs, Link, Plan, Sizes, StageSizes, build, finish, simulate
from tests.amounts import amounts
from tests.schedules.replay import occupied_bytes, replay
from tests.schedules.sized import destinations, links, sizes_of
from tests.schedules.strategies import orders
from tests.tiers import examples

P, M, SIZE = 6, 12, 8
STAGES = tuple(StageSizes(parts=(SIZE,), amounts=amounts(received=min(s, 1), sent=1)) for s in range(P))
SIZES = Sizes(stages=STAGES, static=(0,) * P)


def plain() -> Plan:
    return computations_only(build("1f1b", P, M))


def link(bytes_per_s: float) -> Costs:
    """A forward takes one second, and a backward two."""
    return Costs(saved_bytes=SIZE, link=Link(bytes_per_s=bytes_per_s))


def step_s(plan: Plan, costs: Costs) -> float:
    return simulate(finish(plan), costs).makespan_s


def counts(plan: Plan) -> tuple[int, int]:
    """How many microbatches are evicted, and how many recomputed."""
    ranks = range(plan.num_ranks)
    return sum(len(plan.evicted(rank)) for rank in ranks), sum(len(plan.recomputed(rank)) for rank in ranks)


def smallest(error: BudgetError) -> int | list[int | None]:
    found = re.search(r"smallest budget that works here is budgets=(.+) \(.*\)\.$", str(error))
    assert found is not None, error
    return ast.literal_eval(found[1])


@given(orders(4, 8), st.data())
@settings(max_examples=examples(60))
def test_a_budget_is_kept_or_the_smallest_that_works_is_named(plan: Plan, data: st.DataObject) -> None:
    sizes, to = data.draw(sizes_of(plan)), data.draw(destinations(plan.num_ranks))
    costs, peak = data.draw(links(to)), max(1, *communicate(replace(plan, sizes=sizes)).device_peak_bytes)
    budget = st.integers(1, peak)
    budgets = data.draw(budget | st.lists(st.none() | budget, min_size=plan.num_ranks, max_size=plan.num_ranks))
    try:
        found = finish(evict_or_recompute(plan, sizes=sizes, budgets=budgets, costs=costs, to=to))
    except BudgetError as error:
        for alone in (balance, recompute):  # neither can do what both cannot
            with pytest.raises(BudgetError):
                alone(plan, sizes=sizes, budgets=budgets, **({"to": to, "costs": costs} if alone is balance else {}))
        budgets = smallest(error)
        found = finish(evict_or_recompute(plan, sizes=sizes, budgets=budgets, costs=costs, to=to))
        quantum = max(1, peak // FINENESS)
        short = budgets - quantum if isinstance(budgets, int) else [k if k is None else k - quantum for k in budgets]
        with pytest.raises((BudgetError, ConfigurationError)):
            evict_or_recompute(plan, sizes=sizes, budgets=short, costs=costs, to=to)
    each = (budgets,) * plan.num_ranks if isinstance(budgets, int) else budgets
    assert replay(found) is None
    assert occupied_bytes(found) == found.device_peak_bytes
    assert all(budget is None or peak <= budget for peak, budget in zip(found.device_peak_bytes, each))
    assert computations_only(found).actions == plan.actions
    assert not any(set(found.evicted(rank)) & found.recomputed(rank) for rank in range(plan.num_ranks))


def test_both_together_are_faster_than_either() -> None:
    """A transfer takes 3.2 forwards, more than some computations hide: those microbatches are recomputed, the others evicted."""
    costs = link(2.5)
    evicted = balance(plain(), sizes=SIZES, budgets=40, costs=costs)
    recomputed = recompute(plain(), sizes=SIZES, budgets=40)
    both = evict_or_recompute(plain(), sizes=SIZES, budgets=40, costs=costs)
    assert (counts(evicted), counts(recomputed), counts(both)) == ((10, 0), (0, 6), (10, 2))
    times = [step_s(plan, costs) for plan in (evicted, recomputed, both, replace(plain(), sizes=SIZES))]
    assert times == pytest.approx([66.6, 62.6, 62.4, 62.2])


def test_what_no_rank_has_room_for_is_recomputed() -> None:
    with pytest.raises(BudgetError):
        balance(plain(), sizes=SIZES, budgets=32)
    assert all(counts(evict_or_recompute(plain(), sizes=SIZES, budgets=32, costs=link(16))))


def test_nothing_is_recomputed_that_a_link_hides() -> None:
    both = evict_or_recompute(plain(), sizes=SIZES, budgets=40, costs=link(16))
    assert counts(both) == counts(balance(plain(), sizes=SIZES, budgets=40, costs=link(16))) != (0, 0)


def test_what_cannot_be_done_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="has no backward, so it saves no activations"):
        evict_or_recompute(forward_only(plain()), sizes=SIZES, budgets=40, costs=link(4))
