"""Make orders to measure: list scheduling by some rules, then annealing, as patterns and move by move.

An order may at first take more memory than there is: then evictions and recomputations have to keep it within the budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from random import Random
from typing import NamedTuple

from bpipe.passes.communicate import communicate
from bpipe.passes.fit import Budgets, raised
from bpipe.passes.setting import Setting
from bpipe.plan.action import Op
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING, annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.search.list_schedule import RULES, Rule, listed, most_begun
from bpipe.search.periodic import annealed_pattern
from bpipe.search.work import Family

__all__: list[str] = []

MORE = (1, 2, 4)  # microbatches of the largest stage that an order may at first take beyond the budgets
LEVELS = 3  # of memory that is not kept free for messages: up to as much as the first named order needs for them
CAPS = (1, 0, 2)  # microbatches beyond those that fit into all stages of a rank: caps of how many may have begun
PATTERNS = 4  # orders that are annealed as patterns first, with half of the tries
STARTS = 3  # orders that are annealed move by move, with the other half
FEWEST_RULES = 24  # of list scheduling, that are tried with little effort
LISTED = 0.3  # the share of the effort up to which more rules are tried, beside it
ITEMS_LISTED = 10  # how many items run in the time in which one is listed
MOST_RULES = 6  # of list scheduling, which are tried again with more memory: those that were the fastest


def limits_of(plan: Plan, shop: JobShop, setting: Setting) -> Budgets:
    """Return the limits of the memory of each rank's microbatches, less static bytes, remote buffers, and messages.

    Args:
        plan: with messages.
        shop: its computations, in its order.
        setting: the budgets.
    """
    beside = [peak - own for peak, own in zip(plan.device_peak_bytes, shop.peaks(shop.lanes))]
    return tuple(None if budget is None else budget - other for budget, other in zip(setting.budgets, beside))


class _Listed(NamedTuple):
    """An order that a rule led to, or a named one."""

    order_s: float  # how long it takes
    rule: Rule | None
    lanes: Lanes


class Making:
    """Makes orders of a family's computations.

    Args:
        family: the computations, and the named orders of them.
        random: decides about the moves.
    """

    def __init__(self, family: Family, random: Random) -> None:
        self._family, self._shop, self._setting, self._random = family, family.shop, family.setting, random
        self._limits = limits_of(communicate(family.orders[0]), self._shop, self._setting)

    def orders(self, effort: int, below_s: Callable[[], float]) -> Iterator[Lanes]:
        """Yield an order for each amount of memory that orders may at first take beyond the budgets, if there are any.

        Args:
            effort: how many items of work to run in all while annealing.
            below_s: the step that an order must not reach: what cannot be so fast is left out. It may fall meanwhile.
        """
        levels = [one for one in self._levels() if one[1] < below_s() * (1 - ROUNDING)]
        tries = effort // max(1, len(levels) * len(self._shop.actions))
        rules = list(islice(self._rules(), max(FEWEST_RULES, int(LISTED * effort / (ITEMS_LISTED * len(self._shop.actions))))))
        for limits, bound_s, fits in levels:
            if bound_s >= below_s() * (1 - ROUNDING):
                continue
            orders = self._listed(limits, rules)
            rules = [one.rule for one in orders if one.rule is not None][:MOST_RULES] or rules
            if limits is self._limits:
                orders = sorted([*orders, *self._with_less_for_messages(rules)], key=lambda one: one.order_s)
            found = self._annealed(orders, limits, tries, bound_s, fits)
            if found is not None:
                yield found

    def _annealed(
        self, orders: Sequence[_Listed], limits: Budgets, tries: int, least_s: float, fits: Callable[[Lanes], bool]
    ) -> Lanes | None:
        """Return the fastest order that is found by annealing some of those that rules led to; None if none of these fits."""
        firsts = list(islice(self._different(orders, fits), STARTS))
        of_each = tries // (2 * PATTERNS)
        for one in orders[:: -(-len(orders) // PATTERNS)] if firsts else ():  # a pattern seldom leads to another one
            alike = annealed_pattern(self._shop, one.lanes, limits, of_each, self._random)
            if alike is not None and (order_s := self._shop.step_s(alike)) < firsts[0].order_s and fits(alike):
                firsts.insert(0, _Listed(order_s, None, alike))
        best: Lanes | None = None
        for one in firsts[:STARTS]:
            own = self._shop.peaks(one.lanes)
            able = [None if limit is None else max(limit, peak) for limit, peak in zip(limits, own)]
            each = tries // (2 * min(STARTS, len(firsts)))
            found = annealed(self._shop, one.lanes, able, each, self._random, least_s=least_s, fits=fits)[-1]
            if best is None or self._shop.step_s(found) < self._shop.step_s(best):
                best = found
        return best

    @staticmethod
    def _different(orders: Sequence[_Listed], fits: Callable[[Lanes], bool]) -> Iterator[_Listed]:
        """Yield orders that take different times and fit, the fastest first."""
        latest_s = 0.0
        for one in orders:
            if one.order_s > latest_s * (1 + ROUNDING) and fits(one.lanes):
                latest_s = one.order_s
                yield one

    def _listed(self, limits: Budgets, rules: Sequence[Rule]) -> list[_Listed]:
        """Return the orders that rules lead to within limits, and the named ones that fit, the fastest first."""
        orders: list[tuple[Rule | None, Lanes | None]] = [(rule, listed(self._shop, limits, rule)) for rule in rules]
        orders += [(None, lanes) for lanes in self._family.lanes if all(map(self._shop.fits, lanes, limits))]
        found = [_Listed(self._shop.step_s(lanes), rule, lanes) for rule, lanes in orders if lanes is not None]
        return sorted(found, key=lambda one: one.order_s)

    def _without_messages(self) -> Budgets:
        """Return the limits of the memory of microbatches if messages took none."""
        static = self._setting.sizes.static
        return tuple(None if budget is None else budget - own for budget, own in zip(self._setting.budgets, static))

    def _with_less_for_messages(self, rules: Sequence[Rule]) -> Iterator[_Listed]:
        """Yield orders that leave less memory for messages than the first named order needs: theirs may take less."""
        for level in range(1, LEVELS + 1):
            limits = tuple(
                None if low is None or high is None else low + (high - low) * level // LEVELS
                for low, high in zip(self._limits, self._without_messages())
            )
            yield from self._listed(limits, rules)

    def _fits(self, lanes: Lanes) -> bool:
        """Return whether an order keeps the budgets with all messages."""
        return self._setting.fits(communicate(self._shop.plan_of(lanes)))

    def _rules(self) -> Iterator[Rule]:
        """Yield rules of list scheduling: such as follow a named schedule in some way, and general ones within some caps."""
        caps: list[Sequence[int] | None] = [None, *self._caps()]
        for lanes in self._family.lanes:
            if (times := self._shop.run(lanes)) is not None:
                yield Rule(like=times.begin_s)
            caps.append(most_begun(self._shop, lanes))
        for rule in RULES:
            yield from (rule._replace(most=most) for most in caps)

    def _caps(self) -> Iterator[Sequence[int]]:
        """Yield how many microbatches may be between forward and backward: about as many as fit into all stages of a rank."""
        whole = [0] * len(self._limits)
        for number, (op, _, unit, *_) in enumerate(self._shop.actions):
            if op is Op.F and unit == self._shop.actions[0].microbatch:
                whole[self._shop.rank[number]] += self._shop.takes[number]
        fitting = [limit // amount for limit, amount in zip(self._limits, whole) if limit is not None and amount]
        num_stages = self._shop.plan.num_stages
        for more in CAPS if fitting else ():
            yield [max(1, min(fitting) + more)] * num_stages
        if fitting:
            yield [1 + round(min(fitting) * (1 - stage / num_stages)) for stage in range(num_stages)]

    def _levels(self) -> Iterator[tuple[Budgets, float, Callable[[Lanes], bool]]]:
        """Yield limits of memory, what an order within them takes at least, and what decides whether an order can be kept.

        First come those of the budgets, then those that are beyond them, if there are ways to keep such orders.
        """
        yield self._limits, lower_bound_s(self._shop, self._without_messages()), self._fits
        if (self._setting.evicts or self._setting.recomputes) and any(limit is not None for limit in self._limits):
            largest = max(stage.saved for stages in self._setting.sizes.by_unit for stage in stages)
            for more in MORE:
                limits = raised(self._limits, more * largest)
                yield limits, lower_bound_s(self._shop, limits), lambda _: True
