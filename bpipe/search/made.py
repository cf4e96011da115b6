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
TIGHTENED = 3  # times that limits are lowered by what messages take beyond what was expected
PATTERNS = 4  # orders that are annealed as patterns first, with half of the tries
MOST_RULES = 4  # of list scheduling, which are tried again with more memory: those that were the fastest


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


class _Making:
    def __init__(self, work: Work, random: Random) -> None:
        self._work, self._shop, self._setting, self._random = work, work.shop, work.setting, random
        self._limits = limits_of(communicate(work.orders[0]), self._shop, self._setting)

    def orders(self, effort: int, below_s: Callable[[], float]) -> Iterator[Lanes]:
        levels = list(self._levels())
        tries = effort // (len(levels) * max(1, len(self._shop.actions)))
        rules = list(self._rules())
        for more, limits in zip(MORE, levels):
            if lower_bound_s(self._shop, limits) >= below_s() * (1 - ROUNDING):
                continue
            limits, ruled, orders = self._listed(limits, rules, is_final=not more)
            if not orders:
                continue
            rules = [rule for _, rule, _ in ruled][:MOST_RULES] or rules
            first = self._best_pattern(orders, limits, tries // (2 * PATTERNS))
            least_s = lower_bound_s(self._shop, limits)
            found = annealed(self._shop, first, limits, tries // 2, self._random, least_s=least_s)
            yield found[-1] if more else self._fitting(found)

    def _listed(
        self, limits: Budgets, rules: Sequence[Rule], *, is_final: bool
    ) -> tuple[Budgets, list[tuple[float, Rule, Lanes]], list[Lanes]]:
        """Return the limits that the fastest order needs so that its messages fit, what rules lead to, and all orders that fit."""
        for _ in range(TIGHTENED):
            ruled = [(self._work.order_s(lanes), rule, lanes) for rule in rules if (lanes := listed(self._shop, limits, rule))]
            ruled.sort(key=lambda one: one[0])
            orders = [lanes for _, _, lanes in ruled]
            orders += [lanes for lanes in self._work.starts if all(map(self._shop.fits, lanes, limits))]
            orders.sort(key=self._work.order_s)
            over = self._over(orders[0]) if orders and is_final else ()
            if not any(over):
                break
            limits = tuple(None if limit is None else limit - much for limit, much in zip(limits, over))
        return limits, ruled, orders

    def _best_pattern(self, orders: Sequence[Lanes], limits: Budgets, tries: int) -> Lanes:
        """Return the fastest order, or one that is faster still because some of them were annealed as patterns."""
        first, least = orders[0], self._work.order_s(orders[0])
        for lanes in orders[:: -(-len(orders) // PATTERNS)]:  # of all kinds, because a pattern seldom leads to another one
            alike = annealed_pattern(self._shop, lanes, limits, tries, self._random)
            if alike is not None and self._work.order_s(alike) < least:
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
