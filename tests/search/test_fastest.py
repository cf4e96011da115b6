"""The search never ends with less than the best named schedule, and what it finds keeps the budgets."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest

from benchmarks.search_study import NEAR, measured, solved
from bpipe.passes.evict_or_recompute import kept_within
from bpipe.passes.setting import Setting
from bpipe.schedules import Costs, Link, Plan, build, simulate, verify
from bpipe.search.fastest import MADE, searched
from bpipe.search.work import Family, Found
from bpipe.tools.balancing import sizes_of
from tests.schedules.replay import occupied_bytes, replay
from tests.search.tables import Table

TABLES = [Table.random(Random(seed), (2, 3, 4, 6)) for seed in range(100, 108)]


def named_by_the_passes(table: Table) -> float:
    """Return the fastest step of the named schedules as they are, or kept within the budgets by the pass that does both."""
    kept = [kept_within(one.setting.order_of(plan), one.setting) for one in table.families() for plan in one.starts]
    return min((one.step_s for one in kept if one is not None), default=inf)


def check(table: Table, effort: int, *, by: str = "both") -> list[Found]:
    """Check all plans that are found for a table."""
    families = [replace(one, setting=replace(one.setting, recomputes=by == "both")) for one in table.families()]
    found = searched(families, effort=effort, all_named=True)
    for one in found:
        if one.kept is None:
            continue
        plan, setting = one.kept.plan, families[one.family].setting
        verify(plan)
        assert plan == Plan.from_text(plan.to_text())
        assert simulate(plan, setting.costs).makespan_s == one.step_s >= one.order_s * (1 - 1e-9)
        assert replay(plan) is None and occupied_bytes(plan) == plan.device_peak_bytes
        assert all(peak <= (budget or peak) for peak, budget in zip(plan.device_peak_bytes, setting.budgets))
    return found


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_random_tables(table: Table) -> None:
    assert check(table, 300_000)[0].step_s <= named_by_the_passes(table) * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_evict_over_slow_links(seed: int) -> None:
    """What is annealed with its evictions is proven, too: some of what it comes to is not sound, and is left."""
    table = replace(Table.random(Random(seed), (4,)), num_microbatches=8, budget=3, eviction_s=1.0, message_s=0.2)
    found = check(table, 300_000, by="evict")
    assert any(one.kept is not None and one.kept.evicts for one in found)


def test_evictions_change_places() -> None:
    costs = Costs(
        forward_s=[2.5, 1, 2.5, 2.5], saved_bytes=1000, output_bytes=100, link=Link(latency_s=0.3, bytes_per_s=1000)
    )
    plan = build("1f1b", 4, 8)
    setting = Setting(costs=costs, sizes=sizes_of(plan, costs, 1), budgets=(4200,) * 4, recomputes=False)
    found = searched([Family(starts=(plan,), setting=setting)], effort=400_000)[0]
    assert found.is_made and found.kept is not None and found.kept.evicts
    assert found.step_s < kept_step(setting, plan)
    for seed in range(8):  # some of what is tried ends an eviction before the message that it waits for has left
        for one in searched([Family(starts=(plan,), setting=setting)], effort=60_000, seed=seed):
            assert one.kept is not None or one.is_made
            if one.kept is not None:
                verify(one.kept.plan)


def kept_step(setting: Setting, plan: Plan) -> float:
    kept = kept_within(setting.order_of(plan), setting)
    assert kept is not None
    return kept.step_s


def test_a_made_plan_may_be_searched_from_again() -> None:
    families = TABLES[3].families()
    best = next(one for one in searched(families, effort=100_000) if one.is_made and one.kept is not None)
    assert best.kept is not None
    family = replace(families[best.family], starts=(best.kept.plan,))
    again = searched([family], effort=1000, all_named=True)
    assert [one.name for one in again if not one.is_made] == [MADE]


def test_the_same_arguments_find_the_same_plan() -> None:
    found = [searched(TABLES[3].families(), effort=200_000, seed=3) for _ in range(2)]
    assert [(one.name, one.step_s) for one in found[0]] == [(one.name, one.step_s) for one in found[1]]
    assert found[0][0].kept == found[1][0].kept


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[float] = []
    searched(TABLES[1].families()[:1], effort=50_000, told=told.append)
    assert told == sorted(told) and told[-1] == pytest.approx(1.0) and 0 < told[0] < 1


def test_many_random_tables() -> None:
    """The study in short: benchmarks/RESULTS.md has more of them."""
    rows = [row for index in range(5000, 5010) for row in measured(index)]
    assert all(row["not_worse"] for row in rows) and all(row["replays"] for row in rows if row["found"])
    assert sum(row["found"] for row in rows) > 7 and max(float(row["gain"] or 0) for row in rows) > 0.03


def test_small_tables_are_nearly_solved() -> None:
    rows = [row for index in range(2) for row in solved(5000 + index)]
    over = [float(row["over_exact"]) for row in rows]
    assert sum(one <= NEAR for one in over) >= 0.9 * len(over) and max(over) < 3 * NEAR
