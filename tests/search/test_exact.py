"""Small problems have a fastest order: the bounds are below it, and the search finds it or nearly so."""

from __future__ import annotations

import signal
from itertools import permutations
from random import Random

import pytest

from bpipe.schedules import Costs, Link, build
from bpipe.search.anneal import annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.exact import exact
from bpipe.search.job_shop import JobShop
from bpipe.search.list_schedule import RULES, listed
from tests.ranks import run_ranks
from tests.search.tables import Table


def test_the_fastest_of_all_orders() -> None:
    """By trying all of them: two ranks, two microbatches, halves."""
    costs = Costs(forward_s=[1.0, 1.5], backward_s=[2.5, 2.5], input_s=[1.0, 1.75], output_bytes=1, link=Link(bytes_per_s=4))
    shop = JobShop(build("zb_h1", 2, 2), costs)
    for limit in (1, 2):
        limits = [limit] * 2
        ways = [[list(lane) for lane in permutations(lane) if shop.fits(lane, limit)] for lane in shop.lanes]
        steps = [times.step_s for one in ways[0] for other in ways[1] if (times := shop.run([one, other])) is not None]
        first = listed(shop, limits, RULES[0])
        assert first is not None and steps
        found = exact(shop, limits, first)
        assert found.step_s == pytest.approx(min(steps), rel=1e-5) and found.least_s == pytest.approx(min(steps), rel=1e-5)
        assert lower_bound_s(shop, limits) <= min(steps) * (1 + 1e-9)
        assert max(steps) > min(steps) or limit == 1


def interrupted_later(rank: int) -> str:
    shop = JobShop(build("gpipe", 2, 2), Costs(forward_s=[1.0, 1.5]))
    exact(shop, [None] * 2, shop.lanes)
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        return "Ctrl-C is raised"
    return "Ctrl-C is lost"


def test_ctrl_c_works_as_before_behind_it() -> None:
    assert run_ranks(interrupted_later, 1) == ["Ctrl-C is raised"]


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_near_the_fastest(seed: int) -> None:
    table = Table.random(Random(seed), (3,))
    for family in table.families()[:2]:
        shop, limits = JobShop(family.setting.order_of(family.starts[0]), family.setting.costs), [table.budget * 1000] * 3
        lists = [lanes for rule in RULES if (lanes := listed(shop, limits, rule)) is not None]
        first = min(lists, key=lambda lanes: shop.run(lanes).step_s)  # type: ignore[union-attr]
        found = annealed(shop, first, limits, 1500, Random(0))[-1]
        times = shop.run(found)
        proven = exact(shop, limits, found, seconds=10)
        assert times is not None and all(map(shop.fits, proven.lanes, limits))
        assert lower_bound_s(shop, limits) <= proven.step_s * (1 + 1e-5)
        assert times.step_s <= 1.05 * proven.least_s


@pytest.mark.parametrize(
    "name, limits, least",
    [
        ("1f1b", [None] * 4, 33),  # the last rank begins after 3, works 24, and its last backward has 6 behind it
        ("1f1b", [1] * 4, 96),  # each microbatch alone takes 12
        ("1f1b", [2] * 4, 48),  # two at a time
        ("zb_h1", [4] * 4, 27),  # the last rank begins after 3 and works 24, the last of it W
    ],
)
def test_bounds_that_are_reached(name: str, limits: list[int | None], least: float) -> None:
    assert lower_bound_s(JobShop(build(name, 4, 8), Costs()), limits) == pytest.approx(least)


def test_a_rank_may_be_bound_by_what_comes_late() -> None:
    """The first rank's last backward comes late, and has its W behind it: without interruptions in mind the bound were lower."""
    shop = JobShop(build("1f1b", 3, 1), Costs(forward_s=[1.0, 5.0, 1.0]))
    assert lower_bound_s(shop, [None] * 3) == 21.0


def test_an_order_that_the_solver_cannot_time_is_left() -> None:
    """Where a computation takes no time, the solver does not know in which order the memory of others comes and goes."""
    shop = JobShop(build("zbv", 4, 4), Costs(forward_s=1.0, backward_s=1.0, input_s=1.0))
    first = shop.lanes
    limits = shop.peaks(first)
    assert all(map(shop.fits, exact(shop, limits, first, seconds=5).lanes, limits))
