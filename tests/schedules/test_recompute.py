"""The recompute pass: any rule, sizes and budgets, judged by the independent replay; its optimum by trying everything."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import bpipe.passes.recompute as module
from bpipe.errors import BudgetError, ConfigurationError, PlanError
from bpipe.flow.shaping import shaped
from bpipe.passes.balance.balance import balance, default_slots
from bpipe.passes.communicate import computations_only
from bpipe.passes.fit import FINENESS
from bpipe.passes.recompute import recompute, recompute_by_count
from bpipe.plan.meter import occupancy
from bpipe.schedules import Action, Costs, Op, Plan, Sizes, StageSizes, build, finish, rules, simulate, verify
from tests.amounts import amounts, changed
from tests.schedules.mutations import ORDERING, STRUCTURAL, Mutation, assert_caught, damaged, with_lanes
from tests.schedules.replay import occupied, occupied_bytes, replay
from tests.schedules.sized import sizes_of
from tests.schedules.strategies import orders
from tests.tiers import examples

MUTANTS = 8  # of each plan

pytestmark = pytest.mark.usefixtures("little_effort")
RULES = sorted(rule.name for rule in rules() if not rule.local)


@st.composite
def bases(draw: st.DrawFn) -> Plan:
    """Computations of any rule, or in any order."""
    if draw(st.booleans()):
        return draw(orders(5, 8))
    name, p, m = draw(st.sampled_from(RULES)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    rule = next(rule for rule in rules() if rule.name == name)
    per_rank = rule.default_stages_per_rank
    assume(rule.allows(p, m))
    return computations_only(build(name, p * per_rank, m, num_ranks=p, slots=[None] * p))


def asked(plan: Plan, sizes: Sizes | None, budgets: Any) -> Plan:
    return finish(recompute(plan, slots=budgets) if sizes is None else recompute(plan, sizes=sizes, budgets=budgets))


def most(plan: Plan) -> tuple[int, ...]:
    """What the machine occupies."""
    return occupied(plan) if plan.sizes is None else occupied_bytes(plan)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Plan, Sizes | None, int | list[int | None]]:
    """Computations, sizes or none where slots count, and budgets around what these computations take."""
    plan = draw(bases())
    sizes = draw(st.none() | sizes_of(plan))
    peak = max(1, *most(finish(replace(plan, sizes=sizes))))
    budget = st.integers(1, peak)
    return plan, sizes, draw(budget | st.lists(st.none() | budget, min_size=plan.num_ranks, max_size=plan.num_ranks))


@st.composite
def recomputed_plans(draw: st.DrawFn) -> Plan:
    """Finished plans in which something is recomputed."""
    plan, sizes, budgets = draw(cases())
    try:
        found = asked(plan, sizes, budgets)
    except BudgetError as error:
        found = asked(plan, sizes, smallest(error))
    assume(any(map(found.recomputed, range(found.num_ranks))))
    return found


def smallest(error: BudgetError) -> Any:
    found = re.search(r"smallest budget that works here is (?:slots=(.+)|budgets=(.+) \(.*\))\.$", str(error))
    assert found is not None, error
    return ast.literal_eval(found[1] or found[2])


# Plans.


@given(cases())
@settings(max_examples=examples(100))
def test_a_budget_is_kept_or_the_smallest_that_works_is_named(case):
    plan, sizes, budgets = case
    try:
        found = asked(plan, sizes, budgets)
    except BudgetError as error:
        budgets = smallest(error)
        found = asked(plan, sizes, budgets)
        quantum = 1 if sizes is None else max(1, max(finish(replace(plan, sizes=sizes)).device_peak_bytes) // FINENESS)
        short = budgets - quantum if isinstance(budgets, int) else [k if k is None else k - quantum for k in budgets]
        with pytest.raises(BudgetError):
            asked(plan, sizes, short)
    each = (budgets,) * plan.num_ranks if isinstance(budgets, int) else budgets
    assert replay(found) is None
    assert most(found) == (found.peak_slots if sizes is None else found.device_peak_bytes)
    assert all(budget is None or peak <= budget for peak, budget in zip(most(found), each))
    assert Plan.from_text(found.to_text()) == found
    for rank in range(plan.num_ranks):
        computed = found.compute(rank)
        assert [action for action in computed if action.op is not Op.R] == plan.compute(rank)
        assert len(found.recomputed(rank)) == sum(action.op is Op.R for action in computed)
        assert each[rank] is not None or not found.recomputed(rank)


@given(bases(), st.data())
@settings(max_examples=examples(40))
def test_the_lowest_is_lower_than_any_that_is_refused(plan, data):
    sizes = data.draw(sizes_of(plan))
    lowest = finish(recompute(plan, sizes=sizes))
    assert most(lowest) == lowest.device_peak_bytes
    quantum = max(1, max(finish(replace(plan, sizes=sizes)).device_peak_bytes) // FINENESS)
    assert lowest.budgets == (max(lowest.device_peak_bytes),) * plan.num_ranks
    assume(lowest.budgets[0] > quantum)
    with pytest.raises(BudgetError):
        recompute(plan, sizes=sizes, budgets=lowest.budgets[0] - quantum)


@given(recomputed_plans(), st.lists(st.integers(1, 9), min_size=32, max_size=32))
@settings(max_examples=examples(60))
def test_a_recomputation_takes_a_forward(plan, forward_s):
    costs = Costs(forward_s=forward_s[: plan.num_stages])
    timeline = simulate(plan, costs)
    for rank in range(plan.num_ranks):
        taken = {(a.op, *a[1:3]): end - begin for a, begin, end in timeline.computations(rank)}
        assert all(taken[Op.R, *key] == taken[Op.F, *key] == forward_s[key[0]] for key in plan.recomputed(rank))


@given(recomputed_plans())
@settings(max_examples=examples(30))
def test_what_is_recomputed_is_decided_anew(plan):
    """By this pass and by the other one."""
    peak = 1 + max(most(plan))
    free = [peak + 10_000] * plan.num_ranks
    again = recompute(plan, slots=free) if plan.sizes is None else recompute(plan, sizes=plan.sizes, budgets=free)
    moved = balance(plan, slots=free) if plan.sizes is None else balance(plan, sizes=plan.sizes, budgets=free)
    for found in (again, moved):
        assert not any(map(finish(found).recomputed, range(plan.num_ranks)))


def fewest(plan: Plan, limit: int) -> int:
    """The fewest microbatches of a rank to run forward twice, by trying all sets of them, smallest first."""
    (lane,) = plan.actions
    which = [action[1:3] for action in lane if action.op is Op.F]
    for number in range(len(which) + 1):
        for chosen in combinations(which, number):
            again = [(Action(Op.R, *a[1:3]), a) if a.op in (Op.B, Op.I) and a[1:3] in chosen else (a,) for a in lane]
            if max(occupancy([action for some in again for action in some])) <= limit:
                return number
    raise AssertionError("with all of them, one is enough")


@given(st.integers(1, 8), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_in_slots_no_fewer_would_do(m, is_split, random):
    """One rank with one stage: any order in which each microbatch runs forward before it runs backward."""
    lane: list[Action] = []
    begun = ended = weights = 0
    while weights < m:
        choices = [op for op, can in ((Op.F, begun < m), (Op.I, ended < begun), (Op.W, weights < ended)) if can]
        op = random.choice(choices)
        lane.append(Action(op, 0, {Op.F: begun, Op.I: ended, Op.W: weights}[op]))
        begun, ended, weights = begun + (op is Op.F), ended + (op is Op.I), weights + (op is Op.W)
    if not is_split:
        lane = [a._replace(op=Op.B) if a.op is Op.I else a for a in lane if a.op is not Op.W]
    flow = shaped(None, "chain", (0,), m)
    plan = Plan(name="any", flow=flow, actions=(tuple(lane),), served=((),), slots=(None,))
    for limit in range(1, m + 1):
        try:
            found = finish(recompute(plan, slots=limit))
        except BudgetError:
            with pytest.raises(AssertionError, match="one is enough"):
                fewest(plan, limit)
        else:
            assert len(found.recomputed(0)) == fewest(plan, limit)


@pytest.mark.parametrize("p, factor", [(4, 1.044), (8, 1.086)])
def test_what_it_costs(p, factor):
    """At m = 3p, balanced as the paper does by evictions; that a pair of ranks swaps for nothing."""
    plan = build("1f1b", p, 3 * p)
    found = finish(recompute(plan, slots=default_slots(p)))
    times = [simulate(one, Costs()).makespan_s for one in (plan, found)]
    assert times[1] / times[0] == pytest.approx(factor, abs=0.001)
    assert max(occupied(found)) == default_slots(p) < max(occupied(plan))


def test_its_picture():
    lane = finish(recompute(computations_only(build("1f1b", 4, 7)), slots=3)).compute(0)
    assert " ".join(f"{a.op}{a.microbatch}" for a in lane).startswith("F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 R3 B3")
    assert "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 R3 B3" in (module.__doc__ or "")


def test_by_count():
    assert recompute_by_count(build("1f1b", 8, 24)).slots == (5,) * 8
    lowest = recompute_by_count(build("gpipe", 4, 8))
    assert finish(lowest).peak_slots == (3, 3, 3, 3)
    looped = finish(recompute_by_count(build("interleaved_1f1b", 8, 8)))
    assert max(occupied(looped)) < max(build("interleaved_1f1b", 8, 8).peak_slots)


@pytest.mark.parametrize("kept", [0, 3, 8])
def test_bytes_by_hand(kept):
    """The input stays instead of what is saved; R gives back what of it is not among the latter."""
    stage = StageSizes(parts=(80,), fixed=4, amounts=amounts(received=8, sent=8, kept_received=kept))
    sizes = Sizes(stages=(changed(stage, received=0, kept_received=0), stage, changed(stage, sent=0)), static=(5, 6, 7))
    plain = finish(replace(computations_only(build("gpipe", 3, 4)), sizes=sizes))
    found = finish(recompute(plain, sizes=sizes))
    assert [len(found.recomputed(rank)) for rank in range(3)] == [3, 3, 3]
    assert occupied_bytes(found) == found.device_peak_bytes
    assert max(found.device_peak_bytes) < max(plain.device_peak_bytes) / 2
    levels = dict(zip(found.actions[2], occupancy(found.actions[2], found.meter()), strict=True))
    assert levels[Action.parse("2R3")] == 8 + 8 + 84 - kept  # a gradient under way; the input, and what is saved besides
    assert levels[Action.parse("2B3")] == 8 + 8 + 84  # another gradient; the input is gone, or among what is saved


# Damaged plans.


@given(
    recomputed_plans(),
    st.lists(st.sampled_from(ORDERING + STRUCTURAL), min_size=1, max_size=2),
    st.randoms(use_true_random=False),
)
@settings(max_examples=examples(100))
def test_harmful_mutations_are_caught(plan: Plan, chosen: Sequence[Mutation], random: Random) -> None:
    for _ in range(MUTANTS):
        assert_caught(damaged(plan, chosen, random))


PLAN = finish(recompute(build("1f1b", 3, 6), slots=2))


def lane(*steps: str, plan: Plan = PLAN, rank: int = 0) -> tuple[Action, ...]:
    """Rank 0's list with something put behind something else: "0R0 0F5", or taken out: "-0R2"."""
    actions = list(plan.actions[rank])
    for step in steps:
        first, *behind = step.split()
        if behind:
            actions.insert(1 + [str(a) for a in actions].index(behind[0]), Action.parse(first))
        else:
            actions.remove(Action.parse(first[1:]))
    return tuple(actions)


@pytest.mark.parametrize(
    "steps, message",
    [
        (["-0R2", "0R2 0F1"], "0R2 stands before 0F2"),
        (["-0R2", "0R2 0B2"], "0B2 stands before 0R2|0R2 stands .* 0B2"),
        (["-0B2"], "0B2 is missing"),
        (["0R2 0R2"], "0R2 stands a second time"),
        (["-0R2", "0R2 0F2"], "rank 0 occupies 3 slots"),
    ],
)
def test_what_is_refused(steps, message):
    assert PLAN.recomputed(0) == {(0, 2), (0, 4)}
    mutant = with_lanes(PLAN, {0: lane(*steps)})
    with pytest.raises(PlanError, match=message):
        verify(mutant)
    assert replay(mutant) is not None


def test_what_moves_is_not_recomputed():
    plan = build("balanced_1f1b", 4, 8)
    stage, microbatch = plan.evicted(0)[0]
    mutant = with_lanes(plan, {0: lane(f"0R{microbatch} 0WAIT_LOAD{microbatch}", plan=plan)})
    with pytest.raises(PlanError, match=r"0R|0EVICT"):
        verify(mutant)
    assert stage == 0 and replay(mutant) is not None


def test_stages_that_share_a_rank_with_a_neighbour_are_left_alone():
    plan = computations_only(build("zbv", 4, 4))
    turn = [action.microbatch for action in plan.compute(1) if action[:2] == (Op.I, 1)]
    actions = list(plan.actions[1])
    actions.insert(actions.index(Action(Op.I, 1, turn[0])), Action(Op.R, 1, turn[0]))
    mutant = replace(plan, actions=(plan.actions[0], tuple(actions)))
    with pytest.raises(PlanError, match="0 recomputes a stage that shares memory with another one of rank 1"):
        finish(mutant)
    lowest = finish(recompute(plan, sizes=Sizes.of([9] * 4, num_ranks=2)))
    assert not lowest.recomputed(1) and not {2, 1} & {stage for stage, _ in lowest.recomputed(0)}


def test_a_file_of_torch_cannot_say_it():
    with pytest.raises(PlanError, match="recomputes, which torch"):
        PLAN.to_csv()


# Bad input.


SIZES = Sizes.of([8] * 3)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "give slots=, or sizes= and budgets="),
        ({"slots": 2, "sizes": SIZES}, "give slots=, or sizes= and budgets="),
        ({"slots": 2, "budgets": 16}, "give slots=, or sizes= and budgets="),
        ({"slots": [2, 2]}, "slots=[2, 2]: give a whole number of at least 1, or one for each of 3 ranks"),
        ({"slots": 0}, "slots=0: give a whole number of at least 1"),
        ({"slots": 2.5}, "slots=2.5: give a whole number of at least 1"),
        ({"sizes": SIZES, "budgets": [16, 16, -1]}, "budgets=[16, 16, -1]: give a whole number of at least 1"),
        ({"sizes": SIZES, "budgets": "low"}, "budgets='low': give a whole number of at least 1"),
        ({"sizes": Sizes.of([8] * 2)}, "sizes of 2 stages and 2 ranks for a plan of 3 and 3"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        recompute(PLAN, **options)


def test_a_budget_that_is_too_small_is_told():
    with pytest.raises(BudgetError, match=r"^7 bytes are too few for 1f1b with 3 stages .* The smallest .* is budgets=8 \(8 B\)"):
        recompute(PLAN, sizes=SIZES, budgets=7)
