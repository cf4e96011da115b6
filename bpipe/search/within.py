"""Keep an order of computations within budgets: as it is, by evictions, by recomputation, or by both."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from bpipe.passes.balance.problem import Problem, Solution
from bpipe.passes.communicate import communicate
from bpipe.passes.evict_or_recompute import Bound, Way, attempt
from bpipe.passes.recompute import RecomputeSearch
from bpipe.plan.plan import Plan
from bpipe.search.setting import Setting
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulated_times

__all__: list[str] = []


class Kept(NamedTuple):
    """A plan that keeps the budgets, with its transfers, but not verified yet."""

    plan: Plan
    step_s: float  # simulated
    way: Way | None = None  # how it came to keep them, if it evicts or recomputes by choice

    @classmethod
    def of(cls, plan: Plan, costs: Costs) -> Kept:
        """Simulate a plan."""
        return cls(plan, simulated_times(plan, costs).makespan_s)

    @property
    def evicts(self) -> bool:
        """Whether it moves activations."""
        return any(map(self.plan.evicted, range(self.plan.num_ranks)))

    @property
    def recomputes(self) -> bool:
        """Whether it runs forwards twice."""
        return any(map(self.plan.recomputed, range(self.plan.num_ranks)))


def kept_as_it_is(order: Plan, setting: Setting) -> Kept | None:
    """Return the plan of an order of computations if it needs neither evictions nor recomputations."""
    if not setting.allows(order.activation_peak_bytes):
        return None  # even without messages
    plain = communicate(order)
    return Kept.of(replace(plain, budgets=setting.budgets), setting.costs) if setting.fits(plain) else None


def kept_within(
    order: Plan, setting: Setting, *, bound_s: Bound = lambda _: 0.0, below_s: float = inf, way: Way | None = None
) -> Kept | None:
    """Return the fastest plan that is found for an order of computations within budgets, or None if none is found.

    Args:
        order: of whole computations, without transfers, with the setting's sizes.
        setting: the budgets, the costs, and what may be done.
        bound_s: as for `kept_by_moving`, and so are the others.
    """
    return kept_as_it_is(order, setting) or kept_by_moving(order, setting, bound_s=bound_s, below_s=below_s, way=way)


def kept_by_moving(
    order: Plan, setting: Setting, *, bound_s: Bound = lambda _: 0.0, below_s: float = inf, way: Way | None = None
) -> Kept | None:
    """Do what `kept_within` does for an order that does not keep the budgets as it is.

    Args:
        bound_s: what a step of this order takes at least that recomputes some microbatches.
        below_s: the seconds that the step must not reach; else the result may be None, too.
        way: of the same order of fewer microbatches: if it keeps the budgets here, too, nothing else is tried.
    """
    found: Plan | None = None
    recomputes = setting.recomputes and not order.flow.has_asides  # whose bytes do not count exactly where forwards run twice
    if setting.evicts and recomputes:
        mixed = attempt(order, setting.sizes, setting.budgets, setting.costs, setting.to, bound_s=bound_s, below_s=below_s, way=way)
        return None if mixed is None else Kept(mixed.finished, mixed.step_s, mixed.way)
    if setting.evicts:
        found = _evicting(order, setting)
    elif recomputes:
        found = RecomputeSearch(order).within(setting.budgets)
    if found is None:
        return None
    finished = communicate(found)
    return Kept.of(finished, setting.costs) if setting.fits(finished) else None


def _evicting(order: Plan, setting: Setting) -> Plan | None:
    problem = Problem(order, setting.sizes, setting.to, setting.costs, "fewest")
    solution = problem.solve(setting.budgets, thorough=False) if problem.may_fit(setting.budgets) else ""
    return problem.balanced(solution, setting.budgets) if isinstance(solution, Solution) else None
