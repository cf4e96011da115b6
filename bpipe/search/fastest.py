"""The fastest plan within budgets: named schedules, and orders made to measure, each kept within the budgets as well as is found.

The best plans are annealed once more with all their evictions, loads and recomputations, so that these change places, too. Where
there are many microbatches, all of this is done with few of them, and the best orders are repeated for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from bpipe.errors import PlanError
from bpipe.passes.communicate import communicate
from bpipe.plan.collector import collector_paused
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING, annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.few import with_more
from bpipe.search.job_shop import JobShop
from bpipe.search.made import limits_of, made
from bpipe.search.named import chosen
from bpipe.search.within import Kept
from bpipe.search.work import Family, Found, Work
from bpipe.verifier.proof import verify

__all__: list[str] = []

EFFORT = 10_000_000  # items that run while annealing, in all
FIRST = 0.4  # of the effort: for orders before they are kept within the budgets
MOST_IMPROVED = 3  # plans that are annealed once more
GROUPS = 3  # of p microbatches, in a plan of few
OF_FEW = 0.8  # of the effort: for few microbatches, where there are many
MADE = "made_to_measure"  # the name of such a plan

Told = Callable[[float], None]


def searched(
    families: Sequence[Family], *, effort: int = EFFORT, seed: int = 0, all_named: bool = False, told: Told = lambda _: None
) -> list[Found]:
    """Return what was found, the fastest plan first, which is proven.

    The result depends on the arguments alone, not on how fast the machine is.

    Args:
        families: the plans to start from, at least one in each family.
        effort: how many items of work to run in all while annealing.
        seed: of the search.
        all_named: whether every named schedule is kept within the budgets, even if it cannot be the fastest.
        told: called now and then with the share that is done.
    """
    random = Random(seed)
    with collector_paused():
        works = [Work(family) for family in families]
        found = chosen(works, all_kept=all_named, told=_between(0, 0.1, told))
        few_works = [Work(few) for family in families if (few := family.with_fewer(GROUPS)) is not None]
        if len(few_works) < len(works):
            found += _made(works, found, effort, random, _between(0.1, 1, told))
        else:
            of_few = chosen(few_works)
            of_few += _made(few_works, of_few, int(OF_FEW * effort), random, _between(0.1, 0.8, told))
            found += _repeated(of_few, few_works, works, min(one.step_s for one in found))
            found += _improved(works, found, 1, int((1 - OF_FEW) * effort), random, _between(0.8, 1, told))
        found.sort(key=lambda one: (one.step_s, one.is_made, one.order_s))
        if found[0].kept is not None:
            verify(found[0].kept.plan)
        return found


def _between(begin: float, end: float, told: Told) -> Told:
    """Return what tells the share of a part of the search."""
    return lambda done: told(begin + (end - begin) * done)


def _made(works: Sequence[Work], known: Sequence[Found], effort: int, random: Random, told: Told) -> list[Found]:
    """Return orders made to measure, and the best plans with their evictions in other places."""
    found: list[Found] = []

    def least_s() -> float:
        return min(one.step_s for one in (*known, *found))

    bounds_s = [lower_bound_s(work.shop, [None] * len(work.shop.lanes)) for work in works]
    able = [index for index in sorted(range(len(works)), key=bounds_s.__getitem__) if bounds_s[index] < least_s() * (1 - ROUNDING)]
    for done, index in enumerate(able):
        work = works[index]
        for lanes in made(work, int(FIRST * effort / len(able)), random, least_s):
            order_s = work.order_s(lanes)
            kept = work.kept(work.plan_of(lanes, MADE), least_s()) if order_s < least_s() * (1 - ROUNDING) else None
            found.append(Found(MADE, True, index, order_s, kept))
        told(FIRST * (done + 1) / len(able))
    return found + _improved(works, [*known, *found], MOST_IMPROVED, int((1 - FIRST) * effort), random, _between(FIRST, 1, told))


def _repeated(of_few: Sequence[Found], few_works: Sequence[Work], works: Sequence[Work], least_s: float) -> list[Found]:
    """Return the plans of all microbatches that repeat the best orders of few, if these beat named ones there."""
    found: list[Found] = []
    named_s = min(one.step_s for one in of_few if not one.is_made)
    better = sorted((one for one in of_few if one.is_made and one.step_s < named_s), key=lambda one: one.step_s)
    for one in better[:MOST_IMPROVED]:
        few, many = few_works[one.family].shop, works[one.family]
        assert one.kept is not None, "it has a step"
        lanes = with_more(few, few.numbered(many.setting.order_of(one.kept.plan)), many.shop)
        if lanes is not None and (order_s := many.order_s(lanes)) < least_s * (1 - ROUNDING):
            kept = many.kept(many.plan_of(lanes, MADE), least_s, one.kept.way)
            found.append(Found(MADE, True, one.family, order_s, kept))
            least_s = min(least_s, found[-1].step_s)
    return found


def _improved(
    works: Sequence[Work], found: Sequence[Found], most: int, effort: int, random: Random, told: Told
) -> list[Found]:
    """Return faster plans like the best ones, with the same evictions and recomputations in other places."""
    best = sorted((one for one in found if one.kept is not None), key=lambda one: (one.step_s, one.order_s))[:most]
    improved: list[Found] = []
    for number, one in enumerate(best):
        better = _better(one, works[one.family], effort // most, random)
        if better is not None:
            improved.append(better)
        told((number + 1) / len(best))
    told(1.0)
    return improved


def _better(found: Found, work: Work, effort: int, random: Random) -> Found | None:
    """Return a faster plan with the same evictions and recomputations in other places; None if none is found."""
    assert found.kept is not None, "what is improved keeps the budgets"
    setting = work.setting
    shop = JobShop(found.kept.plan, setting.costs)
    limits = limits_of(found.kept.plan, shop, setting)
    orders = annealed(shop, shop.lanes, limits, effort // max(1, len(shop.actions)), random)
    for lanes in reversed(orders[1:]):
        plan = communicate(replace(shop.plan_of(lanes), name=MADE, budgets=setting.budgets))
        better = Kept.of(plan, setting.costs)
        if better.step_s < found.step_s and setting.fits(plan) and _is_sound(plan):
            times = shop.run(lanes)
            assert times is not None, "what was annealed ends"
            return Found(MADE, True, found.family, times.step_s, better)
    return None


def _is_sound(plan: Plan) -> bool:
    """Return whether a plan can be proven: an eviction that has moved may end before a message that it needs has left."""
    try:
        verify(plan)
    except PlanError:
        return False
    return True
