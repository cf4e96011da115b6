"""The fastest plan within budgets: named schedules, and orders made to measure, each kept within the budgets as well as is found.

The best plans are annealed once more with all their evictions, loads and recomputations, so that these change places, too. Where
there are many microbatches, all of this is done with few of them, and the best orders are repeated for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from random import Random

from bpipe.errors import PlanError
from bpipe.passes.evict_or_recompute import MixPolicy, PlanInBudget
from bpipe.passes.setting import Setting
from bpipe.plan.collector import collector_paused
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING, annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.few import with_more
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.search.made import Making, limits_of
from bpipe.search.named import chosen
from bpipe.search.work import Family, Found
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
        found = chosen(families, all_kept=all_named, told=_between(0, 0.1, told))
        few = [fewer for family in families if (fewer := family.with_fewer(GROUPS)) is not None]
        if len(few) < len(families):
            found += _made(families, found, effort, random, _between(0.1, 1, told))
        else:
            of_few = chosen(few)
            of_few += _made(few, of_few, int(OF_FEW * effort), random, _between(0.1, 0.8, told))
            found += _repeated(of_few, few, families, min(one.step_s for one in found))
            found += list(_improved(families, found, 1, int((1 - OF_FEW) * effort), random, _between(0.8, 1, told)))
        found.sort(key=lambda one: (one.step_s, one.is_made, one.order_s))
        if found[0].kept is not None:
            verify(found[0].kept.plan)
        return found


def _between(begin: float, end: float, told: Told) -> Told:
    """Return what tells the share of a part of the search."""
    return lambda done: told(begin + (end - begin) * done)


def _made(families: Sequence[Family], known: Sequence[Found], effort: int, random: Random, told: Told) -> list[Found]:
    """Return orders made to measure, and the best plans with their evictions in other places."""
    found: list[Found] = []

    def least_s() -> float:
        return min(one.step_s for one in (*known, *found))

    bounds_s = [lower_bound_s(family.shop, [None] * len(family.shop.lanes)) for family in families]
    able = sorted((bound_s, number) for number, bound_s in enumerate(bounds_s) if bound_s < least_s() * (1 - ROUNDING))
    for done, (_, number) in enumerate(able, start=1):
        for lanes in Making(families[number], random).orders(int(FIRST * effort / len(able)), least_s):
            found.append(_kept(families[number], number, lanes, least_s()))
        told(FIRST * done / len(able))
    return [
        *found,
        *_improved(families, [*known, *found], MOST_IMPROVED, int((1 - FIRST) * effort), random, _between(FIRST, 1, told)),
    ]


def _kept(family: Family, number: int, lanes: Lanes, below_s: float, policy: MixPolicy | None = None) -> Found:
    """Keep an order that was made to measure within the budgets, if its step can be below one."""
    order_s = family.shop.step_s(lanes)
    kept = None
    if order_s < below_s * (1 - ROUNDING):
        kept = family.kept_within(replace(family.shop.plan_of(lanes), name=MADE), below_s, policy)
    return Found(MADE, True, number, order_s, kept)


def _repeated(of_few: Sequence[Found], few: Sequence[Family], families: Sequence[Family], below_s: float) -> Iterator[Found]:
    """Yield the plans of all microbatches that repeat the best orders of few, if these beat named ones there."""
    named_s = min(one.step_s for one in of_few if not one.is_made)
    better = sorted((one for one in of_few if one.is_made and one.step_s < named_s), key=lambda one: one.step_s)
    for one in better[:MOST_IMPROVED]:
        few_shop, family = few[one.family].shop, families[one.family]
        assert one.kept is not None, "it has a step"
        lanes = with_more(few_shop, few_shop.numbered(family.setting.order_of(one.kept.plan)), family.shop)
        found = None if lanes is None else _kept(family, one.family, lanes, below_s, one.kept.policy)
        if found is not None and found.order_s < below_s * (1 - ROUNDING):
            yield found
            below_s = min(below_s, found.step_s)


def _improved(
    families: Sequence[Family], found: Sequence[Found], most: int, effort: int, random: Random, told: Told
) -> Iterator[Found]:
    """Yield faster plans like the best ones, with the same evictions and recomputations in other places."""
    best = sorted((one for one in found if one.kept is not None), key=lambda one: (one.step_s, one.order_s))[:most]
    for done, one in enumerate(best, start=1):
        better = _better(one, families[one.family].setting, effort // most, random)
        if better is not None:
            yield better
        told(done / len(best))
    told(1.0)


def _better(found: Found, setting: Setting, effort: int, random: Random) -> Found | None:
    """Return a faster plan with the same evictions and recomputations in other places; None if none is found."""
    assert found.kept is not None, "what is improved keeps the budgets"
    shop = JobShop(found.kept.plan, setting.costs)
    limits = limits_of(found.kept.plan, shop, setting)
    orders = annealed(shop, shop.lanes, limits, effort // max(1, len(shop.actions)), random)
    for lanes in reversed(orders[1:]):
        better = PlanInBudget.of(replace(shop.plan_of(lanes), name=MADE, budgets=setting.budgets), setting.costs)
        if better is not None and better.step_s < found.step_s and _is_sound(better.plan):
            return Found(MADE, True, found.family, shop.step_s(lanes), better)
    return None


def _is_sound(plan: Plan) -> bool:
    """Return whether a plan can be proven: an eviction that has moved may end before a message that it needs has left."""
    try:
        verify(plan)
    except PlanError:
        return False
    return True
