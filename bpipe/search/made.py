"""Make orders to measure: list scheduling by some rules, then annealing, as patterns and move by move.

An order may at first take more memory than there is: then evictions and recomputations have to keep it within the budgets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random

from bpipe.passes.communicate import communicate
from bpipe.passes.fit import Budgets
from bpipe.plan.plan import Plan
from bpipe.search.anneal import ROUNDING, annealed
from bpipe.search.bounds import lower_bound_s
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.search.list_schedule import RULES, Rule, listed, most_begun
from bpipe.search.periodic import annealed_pattern
from bpipe.search.setting import Setting
from bpipe.search.work import Work

__all__: list[str] = []

MORE = (0, 1, 2, 4)  # microbatches of the largest stage that an order may at first take beyond the budgets
LEVELS = 3  # of memory that is not kept free for messages: up to as much as the first named order needs for them
PATTERNS = 4  # orders that are annealed as patterns first, with half of the tries
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


def made(work: Work, effort: int, random: Random, below_s: Callable[[], float]) -> Iterator[Lanes]:
    """Yield an order for each amount of memory that orders may at first take beyond the budgets, if there are any.

    Args:
        work: the computations, and the named orders of them.
        effort: how many items of work to run in all while annealing.
        random: decides about the moves.
        below_s: the step that an order must not reach: what cannot be so fast is left out. It may fall meanwhile.
    """
    return _Making(work, random).orders(effort, below_s)


_Listed = tuple[float, Rule | None, Lanes]  # how long an order takes, and the rule that led to it


class _Making:
    def __init__(self, work: Work, random: Random) -> None:
        self._work, self._shop, self._setting, self._random = work, work.shop, work.setting, random
        self._limits = limits_of(communicate(work.orders[0]), self._shop, self._setting)

    def orders(self, effort: int, below_s: Callable[[], float]) -> Iterator[Lanes]:
        """Do what `made` does."""
        tries = effort // (len(self._levels()) * max(1, len(self._shop.actions)))
        rules = list(self._rules())
        for more, limits in self._levels():
            if lower_bound_s(self._shop, limits if more else self._without_messages()) >= below_s() * (1 - ROUNDING):
                continue
            ruled = self._listed(limits, rules)
            rules = [rule for _, rule, _ in ruled if rule is not None][:MOST_RULES] or rules
            if not more:
                ruled = self._fitting([*ruled, *self._with_less_for_messages(rules)])
            if not ruled:
                continue
            if not more:
                own = self._shop.peaks(ruled[0][2])
                limits = tuple(None if limit is None else max(limit, peak) for limit, peak in zip(limits, own))
            fits = self._fits if not more else lambda lanes: True
            first = self._best_pattern([lanes for _, _, lanes in ruled], limits, tries // (2 * PATTERNS), fits)
            least_s = lower_bound_s(self._shop, limits)
            yield annealed(self._shop, first, limits, tries // 2, self._random, least_s=least_s, fits=fits)[-1]

    def _listed(self, limits: Budgets, rules: Sequence[Rule]) -> list[_Listed]:
        """Return the orders that rules lead to within limits, and the named ones that fit, the fastest first."""
        found: list[_Listed] = []
        for rule in rules:
            if (lanes := listed(self._shop, limits, rule)) is not None:
                found.append((self._work.order_s(lanes), rule, lanes))
        named = [lanes for lanes in self._work.starts if all(map(self._shop.fits, lanes, limits))]
        return sorted([*found, *((self._work.order_s(lanes), None, lanes) for lanes in named)], key=lambda one: one[0])

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

    def _fitting(self, ruled: Sequence[_Listed]) -> list[_Listed]:
        """Return the orders that keep the budgets with all messages, the fastest first."""
        return [one for one in sorted(ruled, key=lambda one: one[0]) if self._fits(one[2])]

    def _fits(self, lanes: Lanes) -> bool:
        """Return whether an order keeps the budgets with all messages."""
        return self._setting.fits(communicate(self._shop.plan_of(lanes)))

    def _best_pattern(self, orders: Sequence[Lanes], limits: Budgets, tries: int, fits: Callable[[Lanes], bool]) -> Lanes:
        """Return the fastest order, or one that is faster still because some of them were annealed as patterns."""
        first, least = orders[0], self._work.order_s(orders[0])
        for lanes in orders[:: -(-len(orders) // PATTERNS)]:  # of all kinds, because a pattern seldom leads to another one
            alike = annealed_pattern(self._shop, lanes, limits, tries, self._random)
            if alike is not None and self._work.order_s(alike) < least and fits(alike):
                first, least = alike, self._work.order_s(alike)
        return first

    def _rules(self) -> Iterator[Rule]:
        """Yield rules of list scheduling: general ones, and such as follow a named schedule in some way."""
        yield from RULES
        for lanes in self._work.starts:
            if (times := self._shop.run(lanes)) is not None:
                yield Rule(like=times.begin_s)
            most = most_begun(self._shop, lanes)
            yield from (rule._replace(most=most) for rule in RULES)

    def _levels(self) -> list[tuple[int, Budgets]]:
        """Return the limits of memory, each with the microbatches by which they are beyond the budgets."""
        able = (self._setting.evicts or self._setting.recomputes) and any(limit is not None for limit in self._limits)
        largest = max(stage.saved for stages in self._setting.sizes.by_slice for stage in stages)
        return [
            (more, tuple(None if limit is None else limit + more * largest for limit in self._limits))
            for more in (MORE if able else MORE[:1])
        ]
