"""Plans of the same computations on the same ranks, and the work of searching among their orders."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from bpipe.passes.evict_or_recompute import Bound, Recomputed, Way
from bpipe.passes.recompute import recompute_first
from bpipe.plan.plan import Plan
from bpipe.search.few import few_of, with_fewer
from bpipe.search.job_shop import JobShop, Lanes
from bpipe.search.setting import Setting
from bpipe.search.within import Kept, kept_as_it_is, kept_by_moving

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Plans of the same computations on the same ranks, and what they are searched for."""

    starts: tuple[Plan, ...]  # named schedules
    setting: Setting

    def with_fewer(self, groups: int) -> Family | None:
        """Return the plans of the first groups of microbatches, if these show what all of them do; else None."""
        few = few_of(self.starts[0], self.setting.costs, groups)
        return None if few is None else replace(self, starts=tuple(with_fewer(plan, few) for plan in self.starts))


class Found(NamedTuple):
    """An order of computations and the best plan that was found for it within the budgets."""

    name: str  # of the named schedule, or MADE
    is_made: bool  # whether the order was made to measure
    family: int
    order_s: float  # the step of the order if memory were no matter: no plan of this order is faster
    kept: Kept | None  # None if none was found, or none of this order can be faster than the best

    @property
    def step_s(self) -> float:
        """The simulated step of the plan."""
        return inf if self.kept is None else self.kept.step_s


class Work:
    """The orders of a family."""

    def __init__(self, family: Family) -> None:
        self.family, self.setting = family, family.setting
        self.orders = [self.setting.order_of(plan) for plan in family.starts]
        self.shop = JobShop(self.orders[0], self.setting.costs)
        self.starts = [self.shop.numbered(order) for order in self.orders]

    def order_s(self, lanes: Lanes) -> float:
        """Return how long an order takes."""
        times = self.shop.run(lanes)
        return inf if times is None else times.step_s

    def plan_of(self, lanes: Lanes, name: str) -> Plan:
        """Return the plan of an order, without messages."""
        return replace(self.shop.plan_of(lanes), name=name)

    def kept_as_it_is(self, order: Plan) -> Kept | None:
        """Return the plan of an order if it keeps the budgets as it is."""
        own = self.shop.peaks(self.shop.numbered(order))
        if any(budget is not None and peak > budget for peak, budget in zip(own, self.setting.budgets)):
            return None  # even without messages
        return kept_as_it_is(order, self.setting)

    def kept_by_moving(self, order: Plan, below_s: float = inf, way: Way | None = None) -> Kept | None:
        """Return the fastest plan that is found for an order that must evict or recompute; None if it would not be below a step."""
        return kept_by_moving(order, self.setting, bound_s=self._bound_of(order), below_s=below_s, way=way)

    def kept(self, order: Plan, below_s: float = inf, way: Way | None = None) -> Kept | None:
        """Return the fastest plan that is found for an order within the budgets, as `kept_by_moving` does."""
        return self.kept_as_it_is(order) or self.kept_by_moving(order, below_s, way)

    @cached_property
    def _again(self) -> JobShop:
        """The work if all microbatches run forward twice."""
        everything = [{action.key for action in lane} for lane in self.orders[0].actions]
        return JobShop(recompute_first(self.orders[0], everything), self.setting.costs)

    def _bound_of(self, order: Plan) -> Bound:
        """Return what a step of an order takes at least that recomputes some microbatches."""

        def bound_s(recomputed: Recomputed) -> float:
            times = self._again.run(self._again.numbered(recompute_first(order, recomputed)))
            return inf if times is None else times.step_s

        return bound_s
