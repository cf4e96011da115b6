"""The job shop is the simulator's model, in numbers."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from bpipe.errors import ConfigurationError
from bpipe.passes.communicate import communicate
from bpipe.schedules import Amount, Costs, Link, Op, Plan, Sizes, StageSizes, build, finish, simulate, verify
from bpipe.search.job_shop import JobShop
from bpipe.search.setting import Setting
from bpipe.search.within import kept_within
from tests.schedules.shape_of_plan import shape_of
from tests.search.tables import Table

PLANS = {
    **{name: build(name, 4, 8) for name in ("1f1b", "gpipe", "zb_h1", "zb_h2")},
    **{name: build(name, 8, 8) for name in ("zbv", "v_half", "interleaved_1f1b", "breadth_first", "dualpipe_v", "chimera")},
    "bitpipe_zb": build("bitpipe_zb", 16, 8),
    "slices": build("seq_1f1b", 4, 8, slices=3),
    "skips": build("1f1b", 4, 8, skips=[(0, 2, 3)]),
    "evicting": build("balanced_1f1b", 4, 8),
}


def uneven(plan: Plan) -> Costs:
    forward = [1 + 0.25 * (stage % 3) for stage in range(plan.num_stages)]
    return Costs(forward_s=forward, saved_bytes=8, output_bytes=1, link=Link(latency_s=0.0625, bytes_per_s=16))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_takes_as_long_as_the_simulator_says(name: str) -> None:
    plan, costs = PLANS[name], uneven(PLANS[name])
    shop = JobShop(plan, costs)
    times = shop.run(shop.lanes)
    assert times is not None
    expected = 1.0 if shape_of(plan).directions == 1 else pytest.approx(1.0, rel=0.01)  # exchanges of twins are not among the items
    assert times.step_s / simulate(plan, costs).makespan_s == expected
    assert all(shop.fits(lane, limit) for lane, limit in zip(shop.lanes, shop.peaks(shop.lanes)))
    assert not any(shop.fits(lane, limit - 1) for lane, limit in zip(shop.lanes, shop.peaks(shop.lanes)) if limit)


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_of_an_order_is_sound(name: str) -> None:
    shop = JobShop(PLANS[name], uneven(PLANS[name]))
    made = communicate(shop.plan_of(shop.lanes))
    verify(made)
    assert [made.compute(rank) for rank in range(4)] == [PLANS[name].compute(rank) for rank in range(4)]
    assert made.served == PLANS[name].served
    assert shop.numbered(made) == shop.lanes


def test_messages_of_values_take_as_long_as_their_bytes() -> None:
    amounts = Amount("out", 8), Amount("0-2-3", 40)
    sizes = Sizes(stages=tuple(StageSizes(parts=(8,), amounts=amounts[: 1 + (x != 1)]) for x in range(4)), static=(0,) * 4)
    shop = JobShop(replace(PLANS["skips"], sizes=sizes), Costs(link=Link(bytes_per_s=8)))
    first = shop.consumers[[str(action) for action in shop.actions].index("0F0")]
    assert {str(shop.actions[one.number]): one.seconds for one in first} == {"1F0": 1.0, "2F0": 5.0, "3F0": 5.0}


def test_an_order_that_waits_in_a_cycle_never_ends() -> None:
    shop = JobShop(build("1f1b", 2, 2), Costs())
    cycle = [[shop.lanes[0][place] for place in (0, 2, 1, 3)], [shop.lanes[1][place] for place in (0, 2, 1, 3)]]
    texts = [[str(shop.actions[number]) for number in lane] for lane in cycle]
    assert texts == [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]  # 1F1 needs 0F1, which waits behind 0B0 for 1B0
    assert all(shop.fits(lane, None) for lane in cycle) and shop.run(cycle) is None


def test_what_a_rank_may_not_do() -> None:
    shop = JobShop(build("zb_h1", 2, 2), Costs())
    lane = shop.lanes[0]
    texts = [str(shop.actions[number]) for number in lane]
    assert texts == ["0F0", "0F1", "0I0", "0W0", "0I1", "0W1"] and shop.fits(lane, 2) and not shop.fits(lane, 1)
    # Microbatches change places, W comes before its I, a backward before its forward, the second backward before the first.
    for wrong in ((1, 0, 2, 3, 4, 5), (0, 1, 3, 2, 4, 5), (2, 0, 1, 3, 4, 5), (0, 1, 4, 3, 2, 5)):
        assert not shop.fits([lane[place] for place in wrong], None)
    assert shop.fits([lane[place] for place in (0, 2, 1, 3, 4, 5)], 2)


def test_recomputed_and_evicted_microbatches_are_counted_as_in_the_plan() -> None:
    costs = Costs(saved_bytes=1000, output_bytes=10, link=Link(bytes_per_s=500))
    plan = build("1f1b", 4, 12)
    for budget, ops in ((2300, {Op.R}), (3100, {Op.EVICT})):
        sizes = Sizes.of([1000] * 4)
        kept = kept_within(*_in(plan, Setting(costs=costs, sizes=sizes, budgets=(budget,) * 4)))
        assert kept is not None and ops <= {action.op for lane in kept.plan.actions for action in lane}
        shop = JobShop(kept.plan, costs)
        own = shop.peaks(shop.lanes)
        assert [mine + kept.plan.remote_buffer_bytes(rank) for rank, mine in enumerate(own)] == [*kept.plan.activation_peak_bytes]


def _in(plan: Plan, setting: Setting) -> tuple[Plan, Setting]:
    return setting.order_of(plan), setting


def test_random_tables() -> None:
    random = Random(0)
    for _ in range(20):
        table = Table.random(random, (2, 3, 4))
        for family in table.families():
            for plan in family.starts:
                shop = JobShop(family.setting.order_of(plan), family.setting.costs)
                times = shop.run(shop.lanes)
                simulated = simulate(finish(shop.plan_of(shop.lanes)), family.setting.costs).makespan_s
                # Receives are posted one computation ahead in a plan, which holds up messages that take longer.
                assert times is not None and times.step_s <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("plan", [build("local_learning", 3, 4)], ids=["local"])
def test_gradients_that_stay_are_refused(plan: Plan) -> None:
    with pytest.raises(ConfigurationError, match="local_learning: orders are searched for plans whose microbatches pass"):
        JobShop(plan, Costs())
