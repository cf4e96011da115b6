"""The fastest plan within budgets: named schedules, and orders made to measure, each kept within the budgets as well as is found.

List scheduling makes orders by some rules. These and the orders of named schedules are annealed, as patterns and then move by move.
An order may at first take more memory than there is: then evictions and recomputations keep it within the budgets. The best plans
are annealed once more with all of that, so that evictions, loads and recomputations change places, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from random import Random
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.passes.communicate import communicate
from bpipe.passes.fit import Budgets
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING, annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.search.list_schedule import RULES, Rule, listed, most_begun
from bpipe.search.periodic import annealed_pattern
from bpipe.search.setting import Setting
from bpipe.search.within import Kept, kept_within
from bpipe.verifier.proof import verify

__all__: list[str] = []

EFFORT = 20_000_000  # items that run while annealing, in all
FIRST = 0.4  # of the effort: for orders before they are kept within the budgets
MOST_IMPROVED = 3  # plans that are annealed once more
MORE = (0, 1, 2, 4)  # microbatches of the largest stage that an order may at first take beyond the budgets
TIGHTENED = 3  # times that limits are lowered by what messages take beyond what was expected
PATTERNS = 4  # orders that are annealed as patterns first, with half of the tries
MOST_RULES = 4  # of list scheduling, which are tried again with more memory: those that were the fastest
MADE = "made_to_measure"  # the name of such a plan

Told = Callable[[float], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans of the same computations on the same ranks, and what they are searched for."""

    starts: tuple[Plan, ...]  # named schedules
    setting: Setting


class Found(NamedTuple):
    """An order of computations and the best plan that was found for it within the budgets."""

    name: str  # of the named schedule, or MADE
    is_made: bool  # whether the order was made to measure
    family: int
    order_s: float  # the simulated step of the order if memory were no matter: no plan of this order is faster
    kept: Kept | None  # None if none was found, or none of this order can be faster than the best

    @property
    def step_s(self) -> float:
        """The simulated step of the plan."""
        return inf if self.kept is None else self.kept.step_s


def searched(
    families: Sequence[Family], *, effort: int = EFFORT, seed: int = 0, all_named: bool = False, told: Told = lambda _: None
) -> list[Found]:
    """Return what was found, the fastest plan first.

    The result depends on the arguments alone, not on how fast the machine is.

    Args:
        families: the plans to start from, at least one in each family.
        effort: how many items of work to run in all while annealing.
        seed: of the search.
        all_named: whether every named schedule is kept within the budgets, even if it cannot be the fastest.
        told: called now and then with the share that is done.
    """
    random = Random(seed)
    works = [_Work(family, random) for family in families]
    orders: list[tuple[float, str, bool, int, Lanes]] = []
    for index, work in enumerate(works):
        orders += [(work.order_s(lanes), plan.name, False, index, lanes) for plan, lanes in zip(work.family.starts, work.starts)]
        orders += [(work.order_s(lanes), MADE, True, index, lanes) for lanes in work.made(int(FIRST * effort / len(works)))]
        told(FIRST / 2 * (index + 1) / len(works))
    orders.sort(key=lambda one: one[0])
    found: list[Found] = []
    least = inf
    for done, (order_s, name, is_made, index, lanes) in enumerate(orders):
        is_wanted = order_s < least * (1 - ROUNDING) or (all_named and not is_made)
        kept = works[index].kept(lanes, name) if is_wanted else None
        found.append(Found(name, is_made, index, order_s, kept))
        least = min(least, found[-1].step_s)
        told(FIRST / 2 + FIRST / 2 * (done + 1) / len(orders))
    found.sort(key=lambda one: (one.step_s, one.order_s))
    for number, one in enumerate([one for one in found if one.kept is not None][:MOST_IMPROVED]):
        better = works[one.family].improved(one, int((1 - FIRST) * effort / MOST_IMPROVED))
        if better is not None:
            found.append(better)
        told(FIRST + (1 - FIRST) * (number + 1) / MOST_IMPROVED)
    return sorted(found, key=lambda one: (one.step_s, one.is_made, one.order_s))


class _Work:
    """The orders of a family."""

    def __init__(self, family: Family, random: Random) -> None:
        self.family, self._setting, self._random = family, family.setting, random
        orders = [self._setting.order_of(plan) for plan in family.starts]
        self._shop = JobShop(orders[0], self._setting.costs)
        self.starts = [self._shop.numbered(order) for order in orders]
        self._limits = self._limits_of(communicate(orders[0]), self._shop)

    def _limits_of(self, plan: Plan, shop: JobShop) -> Budgets:
        """Return the limits of the memory of each rank's microbatches, less static bytes, remote buffers, and messages."""
        beside = [peak - own for peak, own in zip(plan.device_peak_bytes, shop.peaks(shop.lanes))]
        return tuple(None if budget is None else budget - other for budget, other in zip(self._setting.budgets, beside))

    def order_s(self, lanes: Lanes) -> float:
        """Return how long an order takes."""
        times = self._shop.run(lanes)
        return inf if times is None else times.step_s

    def made(self, effort: int) -> Iterator[Lanes]:
        """Yield an order for each amount of memory that orders may at first take beyond the budgets, if there are any."""
        levels = list(self._levels())
        tries = effort // (len(levels) * max(1, len(self._shop.actions)))
        rules = list(self._rules())
        for more, limits in zip(MORE, levels):
            for _ in range(TIGHTENED):
                ruled = [(self.order_s(lanes), rule, lanes) for rule in rules if (lanes := listed(self._shop, limits, rule))]
                ruled.sort(key=lambda one: one[0])
                orders = [lanes for _, _, lanes in ruled]
                orders += [lanes for lanes in self.starts if all(map(self._shop.fits, lanes, limits))]
                orders.sort(key=self.order_s)
                over = self._over(orders[0]) if orders and not more else ()
                if not any(over):
                    break
                limits = tuple(None if limit is None else limit - much for limit, much in zip(limits, over))
            if not orders:
                continue
            rules = [rule for _, rule, _ in ruled][:MOST_RULES] or rules
            of_each, least = tries // (2 * PATTERNS), self.order_s(orders[0])
            first = orders[0]
            for lanes in orders[:: -(-len(orders) // PATTERNS)]:  # of all kinds, because a pattern seldom leads to another one
                alike = annealed_pattern(self._shop, lanes, limits, of_each, self._random)
                if alike is not None and self.order_s(alike) < least:
                    first, least = alike, self.order_s(alike)
            least_s = lower_bound_s(self._shop, limits)
            found = annealed(self._shop, first, limits, tries // 2, self._random, least_s=least_s)
            yield found[-1] if more else self._fitting(found)

    def _rules(self) -> Iterator[Rule]:
        """Yield rules of list scheduling: general ones, and such as follow a named schedule in some way."""
        yield from RULES
        for lanes in self.starts:
            if (times := self._shop.run(lanes)) is not None:
                yield Rule(like=times.begin_s)
            most = most_begun(self._shop, lanes)
            yield from (rule._replace(most=most) for rule in RULES)

    def _over(self, lanes: Lanes) -> list[int]:
        """Return by how many bytes an order exceeds each rank's budget."""
        peaks = communicate(self._shop.plan_of(lanes)).device_peak_bytes
        return [0 if budget is None else max(0, peak - budget) for peak, budget in zip(peaks, self._setting.budgets)]

    def _fitting(self, orders: Sequence[Lanes]) -> Lanes:
        """Return the fastest of some orders that fits with its messages, or the last one if none does."""
        return next((lanes for lanes in reversed(orders) if not any(self._over(lanes))), orders[-1])

    def _levels(self) -> Iterator[Budgets]:
        able = (self._setting.evicts or self._setting.recomputes) and any(limit is not None for limit in self._limits)
        largest = max(stage.saved for stages in self._setting.sizes.by_slice for stage in stages)
        for more in MORE if able else MORE[:1]:
            yield tuple(None if limit is None else limit + more * largest for limit in self._limits)

    def kept(self, lanes: Lanes, name: str) -> Kept | None:
        """Return the fastest plan that is found for an order within the budgets."""
        return kept_within(replace(self._shop.plan_of(lanes), name=name), self._setting)

    def improved(self, found: Found, effort: int) -> Found | None:
        """Return a faster plan with the same evictions and recomputations in other places; None if none is found."""
        assert found.kept is not None, "what is improved keeps the budgets"
        shop = JobShop(found.kept.plan, self._setting.costs)
        limits = self._limits_of(found.kept.plan, shop)
        orders = annealed(shop, shop.lanes, limits, effort // max(1, len(shop.actions)), self._random)
        for lanes in reversed(orders[1:]):
            plan = communicate(replace(shop.plan_of(lanes), name=MADE, budgets=self._setting.budgets))
            better = Kept.of(plan, self._setting.costs)
            if better.step_s < found.step_s and self._setting.fits(plan) and _is_sound(plan):
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
