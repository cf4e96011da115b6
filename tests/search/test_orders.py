"""List scheduling and annealing: orders that end, fit, and are never slower than what they begin with."""

from __future__ import annotations

from random import Random

import pytest

from bpipe.schedules import Costs, Link, build
from bpipe.search.anneal import annealed, critical_path
from bpipe.search.bounds import lower_bound_s
from bpipe.search.job_shop import JobShop
from bpipe.search.list_schedule import RULES, Rule, listed, most_begun
from bpipe.search.periodic import annealed_pattern
from tests.search.tables import Table

TABLES = [Table.random(Random(seed), (2, 3, 4, 6)) for seed in range(12)]


def shops(table: Table) -> list[tuple[JobShop, list[int]]]:
    """Return the work of each family, and limits of memory in which a microbatch and its neighbours fit."""
    found = []
    for family in table.families():
        shop = JobShop(family.setting.order_of(family.starts[0]), family.setting.costs)
        found.append((shop, [table.budget * 1000 + 500] * table.num_ranks))
    return found


@pytest.mark.parametrize("table", TABLES, ids=range(len(TABLES)))
def test_orders_end_and_fit(table: Table) -> None:
    for shop, limits in shops(table):
        orders = [lanes for rule in RULES if (lanes := listed(shop, limits, rule)) is not None]
        assert orders
        for lanes in orders:
            assert all(map(shop.fits, lanes, limits)) and shop.run(lanes) is not None
        least_s = lower_bound_s(shop, limits)
        first = min(orders, key=lambda lanes: shop.run(lanes).step_s)  # type: ignore[union-attr]
        found = annealed(shop, first, limits, 200, Random(1))
        steps = [shop.run(lanes).step_s for lanes in found]  # type: ignore[union-attr]
        assert steps == sorted(steps, reverse=True) and steps[-1] >= least_s * (1 - 1e-9)
        assert all(all(map(shop.fits, lanes, limits)) for lanes in found)
        assert found == annealed(shop, first, limits, 200, Random(1))
        alike = annealed_pattern(shop, first, limits, 50, Random(1))
        assert alike is None or (all(map(shop.fits, alike, limits)) and shop.run(alike) is not None)


def test_a_list_in_the_order_of_1f1b_is_1f1b() -> None:
    shop = JobShop(build("1f1b", 4, 8), Costs())
    times = shop.run(shop.lanes)
    assert times is not None
    assert listed(shop, [4, 3, 2, 1], Rule(like=times.begin_s)) == shop.lanes


def test_a_microbatch_begins_before_the_one_before_has_ended() -> None:
    """Where one fits, its later stages have room as soon as the one before has left them, however full the first stages are."""
    shop, alone = JobShop(build("zbv", 8, 8), Costs()), JobShop(build("zbv", 8, 1), Costs())
    lanes, one = listed(shop, [2] * 4, RULES[0]), alone.run(alone.lanes)
    assert lanes is not None and one is not None and all(map(shop.fits, lanes, [2] * 4))
    times = shop.run(lanes)
    assert times is not None and times.step_s < 0.9 * 8 * one.step_s


def test_room_may_be_kept_for_what_has_begun() -> None:
    """Looped stages: the third microbatch would take the room that the first two need in their second stage."""
    shop = JobShop(build("interleaved_1f1b", 8, 8), Costs(link=Link(latency_s=0.25)))
    begun, kept = (listed(shop, [4] * 4, Rule(reserves=reserves)) for reserves in (False, True))
    assert begun is not None and kept is not None
    texts = [[str(shop.actions[number]) for number in lanes[0]] for lanes in (begun, kept)]
    assert texts[0][:3] == ["0F0", "0F1", "0F2"] and "0F2" not in texts[1][:3]


def test_caps_make_looped_orders_faster() -> None:
    """In tight memory, more microbatches that have begun than fit into all stages hold each other up."""
    shop = JobShop(build("interleaved_1f1b", 8, 8), Costs(forward_s=0.5, link=Link(latency_s=0.5)))
    steps = []
    for most in (None, [4] * 8):
        lists = [lanes for rule in RULES[::2] if (lanes := listed(shop, [8] * 4, rule._replace(most=most)))]
        steps.append(min(times.step_s for lanes in lists if (times := shop.run(lanes)) is not None))
    assert not any(rule.reserves for rule in RULES[::2]) and steps[1] < 0.9 * steps[0]


def test_what_cannot_fit_is_no_order() -> None:
    shop = JobShop(build("1f1b", 4, 8), Costs())
    assert listed(shop, [0] * 4, RULES[0]) is None


def test_the_critical_path_of_1f1b() -> None:
    shop = JobShop(build("1f1b", 2, 3), Costs())
    times = shop.run(shop.lanes)
    assert times is not None
    path = critical_path(shop, shop.lanes, times)
    assert [str(shop.actions[number]) for number in reversed(path)] == [
        *("0F0", "1F0", "1B0", "1F1", "1B1", "1F2", "1B2", "0B2"),
    ]
    assert sum(shop.seconds[number] for number in path) == times.step_s == 12


def test_uneven_halves_are_ordered_better_than_by_name() -> None:
    """Where I takes 1.4 and W 0.6, V-Half's order waits for 13.1 of a rank's forwards in the same memory; half of that will do."""
    shop = JobShop(build("v_half", 8, 16), Costs(forward_s=1.0, backward_s=2.0, input_s=1.4))
    named = shop.run(shop.lanes)
    rules = [*RULES, *(rule._replace(most=most_begun(shop, shop.lanes)) for rule in RULES)]
    orders = sorted((lanes for rule in rules if (lanes := listed(shop, [6] * 4, rule))), key=lambda lanes: shop.run(lanes).step_s)  # type: ignore[union-attr]
    alike = [annealed_pattern(shop, lanes, [6] * 4, 4000, Random(0)) for lanes in orders[:4]]
    best_s = min(times.step_s for lanes in alike if lanes is not None and (times := shop.run(lanes)) is not None)
    assert named is not None and (named.step_s - 96) / 2 == pytest.approx(13.1) and (best_s - 96) / 2 <= 7.0


def test_annealing_ends_where_nothing_can_be_faster() -> None:
    shop, random = JobShop(build("1f1b", 4, 8), Costs()), Random(0)
    assert annealed(shop, shop.lanes, [None] * 4, 10_000, random, least_s=33.0) == [shop.lanes]
    assert random.getstate() == Random(0).getstate(), "no move was tried"
    annealed(shop, shop.lanes, [None] * 4, 600, random)
    assert random.getstate() != Random(0).getstate()


def test_w_waits_for_what_comes_soon() -> None:
    """With patience 1 a rank that would be held up by W waits; with 0 it runs W at once."""
    shop = JobShop(build("zb_h1", 2, 3), Costs(forward_s=1.0, backward_s=4.0, input_s=1.0, link=Link(latency_s=0.5)))
    patient, hasty = (listed(shop, [3] * 2, Rule(patience=patience)) for patience in (1.0, 0.0))
    assert patient is not None and hasty is not None and patient != hasty
