"""The choice among named schedules is that of keeping each of them within the budgets, in a fraction of the time."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from bpipe.passes.evict_or_recompute import BudgetSearch, kept_within
from bpipe.passes.setting import Setting
from bpipe.schedules import Costs, Link, Sizes, build, simulate, verify
from bpipe.search.fastest import searched
from bpipe.search.few import few_of, with_fewer, with_more
from bpipe.search.job_shop import JobShop
from bpipe.search.named import named
from bpipe.search.work import Family, Found
from tests.schedules.replay import occupied_bytes, replay
from tests.search.tables import Table

FEW = [Table.random(Random(seed), (2, 3, 4, 6)) for seed in range(200, 206)]
MANY = [
    replace(Table.random(Random(seed), (p,)), num_microbatches=m)
    for seed, p, m in ((500, 2, 64), (501, 3, 72), (505, 4, 64), (522, 3, 73))
]


def by_name(families: list[Family]) -> dict[tuple[int, str], float]:
    """Keep each schedule within the budgets by itself."""
    steps = {}
    for index, family in enumerate(families):
        for plan in family.starts:
            kept = kept_within(family.setting.order_of(plan), family.setting)
            steps[index, plan.name] = inf if kept is None else kept.step_s
    return steps


def check(found: list[Found], families: list[Family]) -> None:
    """Compare the choice with what each schedule takes."""
    expected = by_name(families)
    assert {(one.family, one.name) for one in found} == expected.keys()
    assert found[0].step_s == pytest.approx(min(expected.values())) or found[0].step_s < min(expected.values())
    for one in found:
        order = families[one.family].setting.order_of(next(p for p in families[one.family].starts if p.name == one.name))
        assert one.order_s <= expected[one.family, one.name] * (1 + 1e-9)
        if one.kept is not None:
            setting, plan = families[one.family].setting, one.kept.plan
            assert plan.num_microbatches == order.num_microbatches and setting.fits(plan)
            assert simulate(plan, setting.costs).makespan_s == one.step_s
    if found[0].kept is not None:
        verify(found[0].kept.plan)


@pytest.mark.parametrize("table", FEW, ids=range(len(FEW)))
def test_few_microbatches(table: Table) -> None:
    check(named(table.families()), table.families())


@pytest.mark.parametrize("table", MANY, ids=range(len(MANY)))
def test_many_microbatches_are_judged_by_few(table: Table) -> None:
    families = table.families()
    assert all(family.with_fewer(2) is not None for family in families)
    check(named(families), families)


@pytest.mark.parametrize("table", [FEW[0], MANY[2]], ids=["few", "many"])
def test_all_may_be_kept(table: Table) -> None:
    families = table.families()
    expected = by_name(families)
    found = named(families, all_kept=True)
    assert [one.step_s for one in found] == sorted(one.step_s for one in found)
    for one in found:
        assert one.step_s <= expected[one.family, one.name] * 1.02


def test_what_is_too_slow_is_not_planned() -> None:
    plan, sizes = build("1f1b", 4, 12), Sizes.of([1000] * 4)
    costs = Costs(saved_bytes=1000, link=Link(bytes_per_s=100))  # too slow to evict
    setting = Setting(costs=costs, sizes=sizes, budgets=(2000,) * 4)
    order = setting.order_of(plan)
    found = kept_within(order, setting)
    assert found is not None and found.policy is not None and found.policy.beyond is not None
    assert kept_within(order, setting, policy=found.policy, bound_s=lambda _: found.step_s, below_s=found.step_s) is None
    again = kept_within(order, setting, policy=found.policy, bound_s=lambda _: found.step_s * 0.99, below_s=found.step_s)
    assert again is not None and again.plan == found.plan


def test_how_many_are_few() -> None:
    costs = Costs()
    assert few_of(build("1f1b", 4, 63), costs, 2) is None and few_of(build("1f1b", 4, 72), costs, 2) == 32
    assert few_of(build("1f1b", 4, 75), costs, 2) == 35 and few_of(build("1f1b", 16, 128), costs, 3) == 48
    each = Costs(forward_s=[[1.0 + unit % 2 for unit in range(72)]] * 4)
    assert few_of(build("1f1b", 4, 72), each, 2) is None


@pytest.mark.parametrize("name, per_rank", [("1f1b", 1), ("zb_h1", 1), ("v_min", 2), ("interleaved_1f1b", 2)])
def test_the_steady_state_repeats(name: str, per_rank: int) -> None:
    costs = Costs(forward_s=1.0, output_bytes=1, link=Link(bytes_per_s=16))
    plan = build(name, 4 * per_rank, 96)
    few, many = JobShop(with_fewer(plan, 36), costs), JobShop(plan, costs)
    lanes = with_more(few, few.lanes, many)
    assert lanes is not None and many.peaks(lanes) == many.peaks(many.lanes)
    times, named_times = many.run(lanes), many.run(many.lanes)
    assert times is not None and named_times is not None and times.step_s == pytest.approx(named_times.step_s)


def test_gpipe_has_nothing_that_repeats() -> None:
    plan = build("gpipe", 4, 96)
    few = JobShop(with_fewer(plan, 36), Costs())
    assert with_more(few, few.lanes, JobShop(plan, Costs())) is None


def test_an_order_made_on_few_microbatches_serves_many() -> None:
    costs = Costs(forward_s=[1.0, 1.5, 1.0, 1.0], backward_s=[2.5] * 4, input_s=[1.75] * 4, saved_bytes=1000)
    plans = build("zb_h1", 4, 96), build("zb_h2", 4, 96)
    setting = Setting(costs=costs, sizes=Sizes.of([1000] * 4), budgets=(3000,) * 4, evicts=False, recomputes=False)
    found = searched([Family(starts=plans, setting=setting)], effort=100_000)[0]
    assert found.is_made and found.kept is not None
    plan = found.kept.plan
    assert plan.num_microbatches == 96 and max(plan.device_peak_bytes) <= 3000
    assert replay(plan) is None and occupied_bytes(plan) == plan.device_peak_bytes


def test_bounds_of_recomputation_hold() -> None:
    for seed in range(210, 213):
        for family in Table.random(Random(seed), (3, 4)).families():
            for order in family.orders:
                kept = BudgetSearch(order, family.setting, bound_s=family.bound_of(order)).within(family.setting.budgets)
                free = kept_within(order, family.setting)
                assert (kept is None) == (free is None)
                if kept is not None and free is not None:
                    assert kept.step_s == pytest.approx(free.step_s)
