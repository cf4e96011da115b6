"""What one thread issues to a device: no lack of hardware queues stops it, and the plan's rules hold for it, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.errors import PlanError
from bpipe.passes.balance.balance import by_count
from bpipe.passes.communicate import computations_only
from bpipe.plan.action import HOST, POSTS, RECEIVER_OF, SERVED
from bpipe.plan.issue_order import check_issue_orders, issue_orders
from bpipe.schedules import Action, Op, Plan, build, finish, rules, verify
from bpipe.schedules.by_name import forward_plan
from tests.schedules.sized import sized_plans
from tests.schedules.strategies import gathering_plans, plans
from tests.tiers import examples

pytestmark = pytest.mark.usefixtures("little_effort")

RULES = {rule.name: rule for rule in rules()}
Orders = list[list[Action]]


def plan_of(name: str, num_ranks: int) -> Plan:
    return build(name, num_ranks * RULES[name].default_stages_per_rank, 2 * num_ranks, num_ranks=num_ranks)


def assert_issued(plan: Plan) -> None:
    """Compute lanes are those of another plan that `verify` proves, of the same budgets; chains, and all else, are as they were."""
    orders = issue_orders(plan)
    assert not stands_still(orders)
    lanes = tuple(tuple(a for a in order if a.op not in SERVED) for order in orders)
    verify(replace(plan, actions=lanes))
    for rank, order in enumerate(orders):
        assert [a for a in lanes[rank] if not a.is_post] == [a for a in plan.actions[rank] if not a.is_post]
        for peer, chain in plan.chains(rank).items():
            assert tuple(a for a in order if a.op in SERVED and a.peer == peer) == chain


def stands_still(orders: Sequence[Sequence[Action]]) -> bool:
    """Whether devices that do one thing after the other, in these orders, wait for each other: simple and slow."""
    rest = [list(order) for order in orders]
    goes_on = True
    while goes_on:
        goes_on = False
        for rank, mine in enumerate(rest):
            if not mine:
                continue
            post = mine[0]
            if not post.is_post or post.peer == HOST:
                mine.pop(0)
                goes_on = True
            elif post.is_exchange and post.peer is not None and (theirs := rest[post.peer]):
                if (theirs[0].op, theirs[0].peer) == (post.op, rank):
                    mine.pop(0), theirs.pop(0)
                    goes_on = True
            elif post.op in RECEIVER_OF and post.peer is not None and (theirs := rest[post.peer]):
                offset = {Op.SEND_F: 1, Op.SEND_B: -1}.get(post.op, 0)
                if theirs[0] == Action(RECEIVER_OF[post.op], post.stage + offset, *post[2:4], peer=rank):
                    mine.pop(0), theirs.pop(0)
                    goes_on = True
    return any(rest)


SIZES = [(name, p) for name in RULES for p in (1, 2, 3, 4, 8) if RULES[name].allows(p, 2 * p)]


@pytest.mark.parametrize(("name", "num_ranks"), SIZES)
def test_every_schedule_is_issued(name: str, num_ranks: int) -> None:
    plan = plan_of(name, num_ranks)
    assert_issued(plan)
    assert_issued(forward_plan(plan))


@pytest.mark.parametrize("name", ["seq_1f1b", "tera_pipe", "interleaved_1f1b"])
def test_slices_are_issued(name: str) -> None:
    plan = build(name, 8 if name == "interleaved_1f1b" else 4, 4, num_ranks=4, slices=3)
    assert_issued(plan)
    assert_issued(finish(by_count(computations_only(plan))))


@given(plans() | gathering_plans() | sized_plans())
@settings(max_examples=examples(60))
def test_any_plan_is_issued(plan: Plan) -> None:
    assert_issued(plan)


# What the proof is worth.


def is_refused(plan: Plan, orders: Orders) -> bool:
    try:
        check_issue_orders(plan, orders)
    except PlanError:
        return True
    return False


@given(plans() | sized_plans(), st.randoms(use_true_random=False))
@settings(max_examples=examples(60))
def test_transfers_that_are_issued_elsewhere_are_refused_if_they_stand_still(plan: Plan, random: Random) -> None:
    orders = issue_orders(plan)
    order = random.choice(orders)
    posts = [place for place, action in enumerate(order) if action.op in POSTS]
    if posts:
        order.insert(random.randrange(len(order)), order.pop(random.choice(posts)))
        started: set[object] = set()
        is_early = False
        for action in order:
            started.add(action[:4])
            is_early |= action.op.startswith("WAIT_") and (action.op.removeprefix("WAIT_"), *action[1:4]) not in started
        assert is_refused(plan, orders) == (is_early or stands_still(orders))


@pytest.mark.parametrize("name", ["1f1b", "balanced_1f1b", "zbv", "interleaved_1f1b"])
def test_receives_that_are_issued_ahead_stand_still(name: str) -> None:
    """As they are in the plan, which is right where the host waits for them."""
    plan = plan_of(name, 4)
    ahead = [[*lane, *(a for a in order if a.op in SERVED)] for lane, order in zip(plan.actions, issue_orders(plan))]
    with pytest.raises(PlanError, match=r"with one hardware queue per device, rank 0 at .* wait for each other forever"):
        check_issue_orders(plan, ahead)


def test_a_lost_action_is_refused() -> None:
    plan = plan_of("1f1b", 4)
    orders = issue_orders(plan)
    with pytest.raises(PlanError, match="the issue order of rank 0 does not consist of its actions"):
        check_issue_orders(plan, [orders[0][:-1], *orders[1:]])
