"""The search never ends with less than the best named schedule, and what it finds keeps the budgets."""

from __future__ import annotations

from random import Random

import pytest

from bpipe.schedules import Plan, simulate, verify
from bpipe.search.fastest import MADE, searched
from tests.schedules.replay import occupied_bytes, replay
from tests.search.tables import Table

TABLES = [Table.random(Random(seed), (2, 3, 4, 6)) for seed in range(100, 108)]


def check(table: Table, effort: int) -> float | None:
    """Check what is found for a table, and return how much faster it is than the best named schedule; None if none is within."""
    families = table.families()
    found = searched(families, effort=effort, all_named=True)
    named = [one.step_s for one in found if one.name != MADE and one.kept is not None]
    best = found[0]
    if best.kept is None:
        assert not named
        return None
    setting = families[best.family].setting
    assert best.kept.plan == Plan.from_text(best.kept.plan.to_text())
    verify(best.kept.plan)
    assert simulate(best.kept.plan, setting.costs).makespan_s == best.step_s == min(one.step_s for one in found)
    assert best.step_s <= min(named, default=best.step_s)
    assert replay(best.kept.plan) is None
    assert occupied_bytes(best.kept.plan) == best.kept.plan.device_peak_bytes
    assert all(peak <= (budget or peak) for peak, budget in zip(best.kept.plan.device_peak_bytes, setting.budgets))
    return min(named) / best.step_s if named else None


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_random_tables(table: Table) -> None:
    check(table, 300_000)


def test_the_same_arguments_find_the_same_plan() -> None:
    found = [searched(TABLES[0].families(), effort=200_000, seed=3) for _ in range(2)]
    assert [(one.name, one.step_s) for one in found[0]] == [(one.name, one.step_s) for one in found[1]]
    assert found[0][0].kept == found[1][0].kept


def test_progress_goes_from_nothing_to_all() -> None:
    told: list[float] = []
    searched(TABLES[1].families()[:1], effort=50_000, told=told.append)
    assert told == sorted(told) and told[-1] == pytest.approx(1.0) and 0 < told[0] < 1


@pytest.mark.exhaustive
def test_many_random_tables() -> None:
    tables = [Table.random(Random(seed), (2, 4, 8)) for seed in range(1000, 1016)]
    gains = [gain for table in tables if (gain := check(table, 500_000)) is not None]
    assert len(gains) > 8 and min(gains) >= 1 and max(gains) > 1.03
