"""Plans of the same computations on the same ranks, whose orders are searched, and what was found among these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from bpipe.passes.evict_or_recompute import Bound, MixPolicy, PlanInBudget, kept_within
from bpipe.passes.recompute import Recomputed, recompute_first
from bpipe.passes.setting import Setting
from bpipe.plan.plan import Plan
from bpipe.search.few import few_of, with_fewer
from bpipe.search.job_shop import JobShop, Lanes

__all__: list[str] = []


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """Plans of the same computations on the same ranks, and what they are searched for."""

    starts: tuple[Plan, ...]  # named schedules
    setting: Setting

    def with_fewer(self, groups: int) -> Family | None:
        """Return the plans of the first groups of microbatches, if these show what all of them do; else None."""
        few = few_of(self.starts[0], self.setting.costs, groups)
        return None if few is None else replace(self, starts=tuple(with_fewer(plan, few) for plan in self.starts))

    @cached_property
    def orders(self) -> list[Plan]:
        """The computations of each plan."""
        return list(map(self.setting.order_of, self.starts))

    @cached_property
    def shop(self) -> JobShop:
        """The computations, to be put into other orders."""
        return JobShop(self.orders[0], self.setting.costs)

    @cached_property
    def lanes(self) -> list[Lanes]:
        """The order of each plan, in numbers."""
        return list(map(self.shop.numbered, self.orders))

    def kept_within(self, order: Plan, below_s: float = inf, policy: MixPolicy | None = None) -> PlanInBudget | None:
        """Return the fastest plan that is found for an order within the budgets; None if it would not be below a step."""
        return kept_within(order, self.setting, bound_s=self.bound_of(order), below_s=below_s, policy=policy)

    @cached_property
    def _again(self) -> JobShop:
        """The work if all microbatches run forward twice."""
        everything = [{action.key for action in lane} for lane in self.orders[0].actions]
        return JobShop(recompute_first(self.orders[0], everything), self.setting.costs)

    def bound_of(self, order: Plan) -> Bound:
        """Return what a step of an order takes at least that recomputes some microbatches."""

        def bound_s(recomputed: Recomputed) -> float:
            return self._again.step_s(self._again.numbered(recompute_first(order, recomputed)))

        return bound_s


class Found(NamedTuple):
    """An order of computations and the best plan that was found for it within the budgets."""

    name: str  # of the named schedule, or MADE
    is_made: bool  # whether the order was made to measure
    family: int
    order_s: float  # the step of the order if memory were no matter: no plan of this order is faster
    kept: PlanInBudget | None  # None if none was found, or none of this order can be faster than the best

    @property
    def step_s(self) -> float:
        """The simulated step of the plan."""
        return inf if self.kept is None else self.kept.step_s
