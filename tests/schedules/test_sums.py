"""Weights that stages have in common: their gradients are exchanged once all are there, proven, replayed, drawn and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import BudgetError, PlanError
from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import communicate, computations_only
from bpipe.passes.gradient_exchanges import with_sums
from bpipe.plan.issue_order import issue_orders
from bpipe.plan.sizes import gradients
from bpipe.schedules import Action, Amount, Costs, Op, Plan, Sizes, StageSizes, build, rules, simulate, verify
from bpipe.schedules.by_name import forward_plan
from bpipe.simulator.critical import critical_path
from tests.schedules.mutations import refused, reshaped
from tests.schedules.replay import occupied_bytes, replay
from tests.tiers import examples

TWO_WAYS = ("chimera", "bitpipe", "bitpipe_reordered", "bitpipe_zb")
PER_RANK = {rule.name: rule.default_stages_per_rank for rule in rules() if rule.name not in TWO_WAYS}


def plan_of(name: str, num_ranks: int) -> Plan:
    return build(name, PER_RANK[name] * num_ranks, 2 * num_ranks, num_ranks=num_ranks)


@st.composite
def summing(draw: st.DrawFn) -> Plan:
    """A plan of any schedule, some of whose stages have weights in common."""
    plan = plan_of(draw(st.sampled_from(sorted(PER_RANK))), draw(st.sampled_from((2, 4))))
    stages = st.sets(st.integers(0, plan.num_stages - 1), min_size=2).map(lambda found: tuple(sorted(found)))
    apart = stages.filter(lambda found: len({plan.stage_ranks[stage] for stage in found}) > 1)
    return with_sums(plan, tuple(sorted(draw(st.sets(apart, min_size=1, max_size=3)))))


@settings(max_examples=examples(200))
@given(summing())
def test_any_stages_add_up_gradients_in_any_plan(plan: Plan) -> None:
    verify(plan)
    assert replay(plan) is None
    assert (Plan.from_text(plan.to_text()) == plan) is True
    issue_orders(plan)
    timeline = simulate(plan, Costs(exchanged_bytes=10))
    assert critical_path(timeline)
    assert (with_sums(plan, ()) == build_again(plan)) is True
    verify(forward_plan(plan))


def build_again(plan: Plan) -> Plan:
    return build(plan.name, plan.num_stages, plan.num_microbatches, num_ranks=plan.num_ranks)


@settings(max_examples=examples(200))
@given(summing(), st.data())
def test_memory_of_exchanges_is_counted(plan: Plan, data: st.DataObject) -> None:
    """As much as the machine counts that shares no code with the meter; and a budget in bytes has room for them."""
    amounts = [
        tuple(Amount(gradients(part), data.draw(st.integers(0, 9))) for stage, part in plan.flow.exchanges if stage == index)
        for index in range(plan.num_stages)
    ]
    stages = tuple(StageSizes(parts=(data.draw(st.integers(0, 9)),), amounts=found) for found in amounts)
    sized = replace(plan, sizes=Sizes(stages=stages, static=(0,) * plan.num_ranks))
    assert sized.device_peak_bytes == occupied_bytes(sized)


@pytest.mark.parametrize("name", sorted({*PER_RANK} - {"balanced_1f1b"}))
def test_exchanges_are_where_communicate_puts_them(name: str) -> None:
    """Whether ties are known before the transfers or after them, such as in the first step; evictions have no place before."""
    plan = plan_of(name, 4)
    late = with_sums(plan, ((0, 1, 2), (0, plan.num_stages - 2)))
    early = communicate(replace(computations_only(plan), flow=late.flow))
    assert early.actions == late.actions
    verify(late)


def dropped(plan: Plan) -> Plan:
    return changed(plan, lambda lane: [action for action in lane if action.op is not Op.REDUCE_GRAD])


def never_added(plan: Plan) -> Plan:
    return changed(plan, lambda lane: [action for action in lane if action.op is not Op.WAIT_REDUCE_GRAD])


def too_early(plan: Plan) -> Plan:
    return changed(plan, lambda lane: sorted(lane, key=lambda action: action.op is not Op.REDUCE_GRAD))


def twice(plan: Plan) -> Plan:
    return changed(plan, lambda lane: [each for action in lane for each in ([action] * (1 + (action.op is Op.REDUCE_GRAD)))])


def with_others(plan: Plan) -> Plan:
    return changed(plan, lambda lane: [one._replace(part=2) if one.part == 4 and "REDUCE" in one.op else one for one in lane])


def in_other_orders(plan: Plan) -> Plan:
    at = {i: a for i, a in enumerate(plan.actions[0]) if a.op is Op.REDUCE_GRAD}
    swapped = dict(zip(at, reversed(at.values())))
    return replace(plan, actions=(tuple(swapped.get(i, a) for i, a in enumerate(plan.actions[0])), *plan.actions[1:]))


def changed(plan: Plan, change: Callable[[list[Action]], Any]) -> Plan:
    return replace(plan, actions=(tuple(change(list(plan.actions[0]))), *plan.actions[1:]))


@pytest.mark.parametrize("harm", [dropped, never_added, too_early, twice, with_others])
def test_harm_is_caught(harm: Callable[[Plan], Plan]) -> None:
    plan = with_sums(build("1f1b", 4, 4), ((0, 1, 2), (0, 3)))
    with pytest.raises(PlanError):
        verify(harm(plan))
    assert replay(harm(plan)) is not None


def test_two_ranks_exchange_in_one_order() -> None:
    plan = with_sums(build("interleaved_1f1b", 8, 8, num_ranks=4), ((0, 1), (4, 5)))
    verify(plan)
    with pytest.raises(PlanError, match="in another order"):
        verify(in_other_orders(plan))


def test_a_stage_of_the_same_rank_comes_before_too() -> None:
    """Stages 0 and 4 of a rank have the weight as one: its exchange, under the name of stage 0, waits for both."""
    plan = with_sums(build("interleaved_1f1b", 8, 8, num_ranks=4), ((0, 3, 4),))
    assert plan.flow.exchanges[0, 4].after == {0, 4} and plan.flow.exchanges[3, 1].after == {3}
    lane = plan.actions[0]
    place = next(i for i, action in enumerate(lane) if action.op is Op.REDUCE_GRAD)
    assert not any(action.op is Op.B for action in lane[place:])


def test_a_budget_has_room_for_what_is_exchanged() -> None:
    plan = with_sums(build("1f1b", 4, 8), ((0, 3),))
    sizes = Sizes(stages=tuple(StageSizes(parts=(100,)) for _ in range(4)), static=(0,) * 4)
    tied = replace(sizes, stages=(sizes.stages[0].with_amounts(Amount(gradients(4), 350)), *sizes.stages[1:]))
    assert balance(computations_only(plan), sizes=sizes, budgets=[300] * 4) is not None
    with pytest.raises(BudgetError):
        balance(computations_only(plan), sizes=tied, budgets=[300] * 4)


@pytest.mark.parametrize("name", TWO_WAYS)
def test_a_twin_on_another_rank_is_refused(name: str) -> None:
    """Its exchange is then in the list of a rank that has none of it."""
    plan = build(name, 8, 4, num_ranks=2 if name != "chimera" else 4)
    for stage in range(plan.num_stages):
        for rank in {*range(plan.num_ranks)} - {plan.stage_ranks[stage]}:
            ranks = *plan.stage_ranks[:stage], rank, *plan.stage_ranks[stage + 1 :]
            mutant = reshaped(plan, stage_ranks=ranks)
            assert mutant is None or refused(mutant), (stage, rank)
