"""With a cost model, the balance pass refuses evictions that computations cannot hide where the budget allows others."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest

from bpipe.errors import BudgetError
from bpipe.passes.balance.balance import balance
from bpipe.passes.balance.problem import Problem, Solution
from bpipe.passes.communicate import computations_only
from bpipe.plan.action import HOST
from bpipe.schedules import Costs, Destinations, Link, Op, Plan, Sizes, build, finish, simulate
from tests.schedules.instances import some

SIZE = 8  # bytes of a microbatch; a forward takes one second and a backward two


def link(tx: float) -> Link:
    """One that carries a microbatch in so many forwards."""
    return Link(bytes_per_s=SIZE / tx)


def one_f_one_b(p: int, m: int) -> Plan:
    return computations_only(build("1f1b", p, m))


def within(plan: Plan, sizes: Sizes, budgets: list[int], to: Destinations, costs: Costs | None) -> Plan:
    return finish(balance(plan, sizes=sizes, budgets=budgets, to=to, costs=costs))


def peers(plan: Plan) -> Counter[int | None]:
    return Counter(action.peer for lane in plan.actions for action in lane if action.op is Op.EVICT)


def step_s(plan: Plan, costs: Costs) -> float:
    return simulate(plan, costs).makespan_s


def test_a_near_rank_is_asked_before_a_pair_behind_a_slow_link() -> None:
    plan, sizes, nodes = one_f_one_b(4, 8), Sizes.of([SIZE] * 4), (0, 0, 1, 1)
    budgets = [3 * SIZE, 5 * SIZE, 4 * SIZE, 4 * SIZE]
    costs = Costs(saved_bytes=SIZE, link=link(0.5), cross_link=link(4), nodes=nodes)
    to_pair = within(plan, sizes, budgets, Destinations(nodes=nodes), None)
    hidden = within(plan, sizes, budgets, Destinations(nodes=nodes), costs)
    assert set(peers(to_pair)) == {3}
    assert set(peers(hidden)) == {1}
    assert step_s(hidden, costs) == step_s(finish(plan), costs) < step_s(to_pair, costs)


def test_with_one_place_to_go_to_the_budget_comes_first() -> None:
    """A slow link is no reason to refuse a budget; evictions begin earlier on it where there is room."""
    plan, sizes = one_f_one_b(4, 8), Sizes.of([SIZE] * 4)
    costs = Costs(saved_bytes=SIZE, link=link(4))
    balanced = within(plan, sizes, [3 * SIZE] * 4, Destinations(), costs)
    assert max(balanced.device_peak_bytes) == 3 * SIZE
    assert step_s(balanced, costs) > step_s(finish(plan), costs)


@pytest.mark.parametrize(("tx_pair", "tx_host", "expected"), [(1, 0.5, {5}), (1, 8, {5}), (8, 0.5, {HOST})])
def test_the_host_is_asked_last_but_where_it_alone_is_fast(tx_pair: float, tx_host: float, expected: set[int]) -> None:
    plan, sizes = one_f_one_b(6, 12), Sizes.of([SIZE] * 6)
    costs = Costs(saved_bytes=SIZE, link=link(tx_pair), host_link=link(tx_host))
    balanced = within(plan, sizes, [5 * SIZE] * 6, Destinations(others=False, host="last"), costs)
    assert set(peers(balanced)) == expected
    assert step_s(balanced, costs) == step_s(finish(plan), costs)


def test_what_leaves_no_time_to_return_stays() -> None:
    """On a slow link, others leave than those that are needed furthest ahead."""
    plan, sizes = computations_only(build("interleaved_1f1b", 12, 12, num_ranks=6)), Sizes.of([SIZE] * 12, num_ranks=6)
    slow = Costs(saved_bytes=SIZE, link=link(3))
    budgets = [max(finish(replace(plan, sizes=sizes)).device_peak_bytes) - SIZE] * 6
    unaware, aware = (within(plan, sizes, budgets, Destinations(), costs) for costs in (None, slow))
    assert step_s(finish(plan), slow) == step_s(aware, slow) < step_s(unaware, slow)


def test_what_can_be_hidden_leaves_before_what_is_needed_last() -> None:
    """Over a link on which a transfer takes four forwards, the microbatch needed last would come late; an older one does not."""
    plan, sizes, slow = one_f_one_b(6, 12), Sizes.of([SIZE] * 6), Costs(saved_bytes=SIZE, link=link(4))
    balanced = within(plan, sizes, [5 * SIZE] * 6, Destinations(), slow)
    assert step_s(balanced, slow) == step_s(finish(plan), slow)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_called_hidden_is_hidden(seed: int) -> None:
    """But for what transfers that share a link do to each other, which a rank that decides by itself does not see: up to 8%."""
    random = Random(seed)
    instance = some(random)
    plan, sizes = instance.plan, instance.sizes
    costs = Costs(saved_bytes=[stage.saved for stage in sizes.stages], link=Link(bytes_per_s=random.choice([2.0, 6.0, 20.0])))
    budgets = (instance.budget,) * plan.num_ranks
    solution = Problem(replace(plan, sizes=sizes), Destinations(), costs).solve(budgets, thorough=False)
    assert isinstance(solution, Solution)
    balanced = within(plan, sizes, list(budgets), Destinations(), costs)
    slower = step_s(balanced, costs) / step_s(finish(plan), costs)
    late, _ = solution.cost
    assert late or slower <= 1.08
    assert not late or slower >= 1


def test_a_budget_too_small_is_refused_with_costs_as_without() -> None:
    with pytest.raises(BudgetError, match=r"budgets=24 \(24 B\)"):
        within(one_f_one_b(4, 8), Sizes.of([SIZE] * 4), [17] * 4, Destinations(), Costs(saved_bytes=SIZE, link=link(4)))
