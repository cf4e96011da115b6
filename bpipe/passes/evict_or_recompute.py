"""The pass that evicts microbatches if links can hide the transfers, and recomputes the others.

First it recomputes as little as possible so that the balance pass can place the rest. Then it recomputes evictions that no
computation hides, as long as a simulated step gets shorter. Recomputing everything over the budget is tried as well, so the
result is never slower than recomputing alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from bpipe.checks import budgets_of
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.balance.problem import Problem
from bpipe.passes.communicate import communicate, computations_only
from bpipe.passes.fit import Budgets, least_raised, raised, refusal, smallest
from bpipe.passes.recompute import Recomputed, RecomputeSearch, Which, recompute_first
from bpipe.passes.setting import Setting
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulated_times

__all__ = ["evict_or_recompute"]

ROUNDS = 8  # of trying to recompute more
ROUNDING = 1e-9
SLOW = 1.1  # times a step, for what need not be tried; less is no proof for plans that recompute more, or other microbatches
ALL = 2**62  # bytes: a rank evicts all that is beyond its budget

Bound = Callable[[Recomputed], float]  # the seconds that a step takes at least which recomputes these


class MixPolicy(NamedTuple):
    """How a plan came to keep its budgets, so that the same may be done to one of more microbatches."""

    beyond: int | None = None  # the bytes beyond its budget that a rank evicts; None: it recomputes all of them
    shares: tuple[float, ...] = ()  # of the evictions that nothing hides, those that were recomputed instead, again and again


class PlanInBudget(NamedTuple):
    """A plan that keeps its budgets, but is not verified yet."""

    before: Plan  # without transfers between stages
    plan: Plan  # with them
    step_s: float  # simulated
    policy: MixPolicy | None = None  # if it evicts or recomputes by choice
    exposed: tuple[tuple[Which, ...], ...] = ()  # the microbatches whose transfers nothing hides, the largest first, by rank

    @classmethod
    def of(cls, before: Plan, costs: Costs, finished: Plan | None = None) -> PlanInBudget | None:
        """Add the transfers between stages, if that is not done, and simulate; None if that is too much for the plan's budgets."""
        plan = finished or communicate(before)
        if any(budget is not None and peak > budget for peak, budget in zip(plan.device_peak_bytes, plan.budgets or ())):
            return None
        return cls(before, plan, simulated_times(plan, costs).makespan_s)

    @property
    def evicts(self) -> bool:
        """Whether it moves activations."""
        return any(map(self.plan.evicted, range(self.plan.num_ranks)))

    @property
    def recomputed(self) -> Recomputed:
        """The microbatches whose forwards run twice."""
        return tuple(frozenset(self.plan.recomputed(rank)) for rank in range(self.plan.num_ranks))

    @property
    def recomputes(self) -> bool:
        """Whether it runs forwards twice."""
        return any(self.recomputed)


def evict_or_recompute(
    plan: Plan, *, sizes: Sizes, budgets: int | Sequence[int | None], costs: Costs, to: Destinations | None = None
) -> Plan:
    """Keep every rank within its budget in bytes: evict if computations hide the transfers, recompute if that is faster.

    A microbatch is evicted or recomputed, never both. A stage next to another one of its rank is not recomputed.

    Args:
        plan: any with backwards and whole computations; its transfers, evictions and recomputations are dropped.
        sizes: the bytes of a microbatch on each stage.
        budgets: the budget in bytes, static bytes included, one number or one per rank (None: unlimited).
        costs: how long computations and transfers take.
        to: the ranks that may store evicted activations; default: the pair p-1-x, then any rank with free memory.

    Returns:
        The plan; `finish` adds the transfers between stages.

    Raises:
        BudgetError: the budget cannot be met; the message names the smallest that can, to within 1/1024 of the highest peak.
        ConfigurationError: the plan has no backward, or the other arguments do not fit it.

    Example:
        >>> from bpipe.schedules import Link, build, finish
        >>> slow = Costs(saved_bytes=8, link=Link(bytes_per_s=1))
        >>> mixed = evict_or_recompute(build("1f1b", 4, 8), sizes=Sizes.of([8] * 4), budgets=24, costs=slow)
        >>> max(finish(mixed).device_peak_bytes)
        24
    """
    if not plan.has_backward:
        raise ConfigurationError(f"{plan.name} has no backward, so it saves no activations to evict or recompute")
    sizes.check(plan.num_stages, plan.num_ranks, plan.units)
    given = budgets_of("budgets", budgets, plan.num_ranks)
    setting = Setting(costs=costs, sizes=sizes, budgets=given, to=Destinations() if to is None else to)
    search = BudgetSearch(replace(computations_only(plan), sizes=sizes), setting)
    found = search.within(given)
    if found is None:
        raise search.refusal(given)
    return found.before


def kept_as_it_is(order: Plan, setting: Setting) -> PlanInBudget | None:
    """Return the plan of an order of computations if it needs neither evictions nor recomputations."""
    if not setting.allows(order.activation_peak_bytes):
        return None  # even without messages
    return PlanInBudget.of(replace(order, budgets=setting.budgets), setting.costs)


def kept_within(
    order: Plan, setting: Setting, *, bound_s: Bound = lambda _: 0.0, below_s: float = inf, policy: MixPolicy | None = None
) -> PlanInBudget | None:
    """Return the fastest plan that is found for an order of computations within budgets, or None if none is found.

    Args:
        order: of whole computations, without transfers, with the setting's sizes.
        setting: the budgets, the costs, and what may be done.
        bound_s: as for `BudgetSearch`, and so is `below_s`.
        policy: of the same order of fewer microbatches, to be tried first: if it keeps the budgets, nothing else is tried.
    """
    as_it_is = kept_as_it_is(order, setting)
    return as_it_is or BudgetSearch(order, setting, bound_s=bound_s, below_s=below_s).within(setting.budgets, policy)


class BudgetSearch:
    """The plans of an order of computations that evict and recompute within some budgets.

    Args:
        order: without transfers, with the setting's sizes.
        setting: the costs, and what may be done.
        bound_s: what a step takes at least that recomputes some microbatches, so that what takes too long need not be tried.
        below_s: the seconds that the step must not reach; else there may be no result, too.
    """

    def __init__(self, order: Plan, setting: Setting, *, bound_s: Bound = lambda _: 0.0, below_s: float = inf) -> None:
        self._order, self._setting, self._bound_s, self._below_s = order, setting, bound_s, below_s
        self._none: Recomputed = (frozenset(),) * order.num_ranks
        self._plain = self._problem(self._none)
        self._recompute = RecomputeSearch(order, self._plain.finished)
        self._highest = max(self._plain.finished.device_peak_bytes)

    def within(self, budgets: Budgets, policy: MixPolicy | None = None) -> PlanInBudget | None:
        """Return the fastest plan that is found within the budgets, or the one that a policy leads to; None if there is none."""
        if not self._setting.recomputes:
            evicting = self._attempt(budgets, self._none, ALL) if self._setting.evicts else None
            return evicting and evicting._replace(policy=None)
        if not self._setting.evicts:
            recomputing = self._recomputing(budgets)
            return recomputing and recomputing._replace(policy=None)
        if policy is not None:
            chosen = self._recompute.chosen(raised(budgets, policy.beyond or 0))
            if chosen is not None and self._bound_s(chosen) >= self._below_s:
                return None
            repeated = self._repeated(budgets, policy, chosen)
            if repeated is not None or policy.beyond is None:
                return repeated
        first = self._attempt(budgets, self._none, ALL)
        if first is not None and first.step_s <= self._bound_s(self._none) * (1 + ROUNDING):
            return first  # nothing waits for its evictions
        alone = self._recomputing(budgets, self._below_s if first is None else min(self._below_s, first.step_s))
        mixed = self._enough(budgets, alone) if first is None else first
        if mixed is None:
            return alone
        for _ in range(ROUNDS):
            better = min(self._with_more(mixed, budgets), key=lambda one: one.step_s, default=mixed)
            if better.step_s >= mixed.step_s:
                break
            mixed = better
        return mixed if alone is None else min(mixed, alone, key=lambda one: one.step_s)

    def _repeated(self, budgets: Budgets, policy: MixPolicy, chosen: Recomputed | None) -> PlanInBudget | None:
        """Return the plan that a policy leads to, whose first choice is given; None if that does not keep the budgets."""
        if policy.beyond is None:
            return self._recomputing(budgets)
        if chosen is None or (mixed := self._attempt(budgets, chosen, policy.beyond)) is None:
            return None
        for share in policy.shares:
            number = round(share * max(map(len, mixed.exposed)))
            better = self._recomputing_more(mixed, number, budgets) if number else None
            if better is not None and better.step_s < mixed.step_s:
                mixed = better
        return mixed

    def _recomputing(self, budgets: Budgets, below_s: float = inf) -> PlanInBudget | None:
        """Return the plan that only recomputes; None if there is none, or if it takes too long."""
        chosen = self._recompute.chosen(budgets)
        if chosen is None or self._bound_s(chosen) >= below_s or (found := self._recompute.within(budgets)) is None:
            return None
        kept = PlanInBudget.of(found[0], self._setting.costs, found[1])
        return kept and kept._replace(policy=MixPolicy(), exposed=((),) * self._order.num_ranks)

    def _enough(self, budgets: Budgets, alone: PlanInBudget | None) -> PlanInBudget | None:
        """Recompute as little as possible so that the balance pass can keep the budgets; None if that takes too long."""
        below_s = self._below_s if alone is None else min(self._below_s, alone.step_s)
        known: dict[Recomputed, tuple[bool, PlanInBudget | None]] = {}  # whether it works, and the plan if that may be fast enough

        def attempt(less: int) -> tuple[int, PlanInBudget | None] | None:
            beyond = max(0, self._highest - less)
            chosen = self._recompute.chosen(raised(budgets, beyond))
            if chosen is None:
                return None
            if chosen not in known:
                if self._bound_s(chosen) >= SLOW * below_s:  # then what recomputes more is slow, too, but less may do
                    known[chosen] = self._problem(chosen).may_fit(budgets), None
                else:
                    found = self._attempt(budgets, chosen, beyond)
                    known[chosen] = found is not None, found
            works, found = known[chosen]
            return (less, found) if works else None

        most = (self._highest, alone) if alone is not None else attempt(self._highest)
        return None if most is None else smallest(attempt, 1, most, self._highest)[1]

    def _with_more(self, mixed: PlanInBudget, budgets: Budgets) -> Iterator[PlanInBudget]:
        """Yield plans that also recompute evictions that nothing hides: all of them, half of them on each rank, and so on."""
        number = max(map(len, mixed.exposed), default=0)
        while number:
            found = self._recomputing_more(mixed, number, budgets)
            if found is not None:
                yield found
            number //= 2

    def _recomputing_more(self, mixed: PlanInBudget, number: int, budgets: Budgets) -> PlanInBudget | None:
        """Recompute some more evictions on each rank; return None if that does not keep the budgets, or is too slow."""
        assert mixed.policy is not None
        chosen = tuple(old.union(new[:number]) for old, new in zip(mixed.recomputed, mixed.exposed))
        found = None if self._bound_s(chosen) >= mixed.step_s else self._attempt(budgets, chosen)
        share = number / max(map(len, mixed.exposed))
        return found and found._replace(policy=mixed.policy._replace(shares=(*mixed.policy.shares, share)))

    def _attempt(self, budgets: Budgets, recomputed: Recomputed, beyond: int = 0) -> PlanInBudget | None:
        """Balance the plan with some microbatches recomputed, or return None if that does not keep the budgets."""
        problem = self._problem(recomputed) if any(recomputed) else self._plain
        solution = problem.solution(budgets) if problem.may_fit(budgets) else None
        if solution is None:
            return None
        exposed: list[tuple[Which, ...]] = [()] * self._order.num_ranks
        for rank, solved in solution.by_rank.items():
            able = self._recompute.able(rank)
            exposed[rank] = tuple(dict.fromkeys(e.which[:2] for e in solved.exposed if e.which[0] in able))
        kept = PlanInBudget.of(problem.balanced(solution, budgets), self._setting.costs)
        return kept and kept._replace(policy=MixPolicy(beyond), exposed=tuple(exposed))

    def _problem(self, recomputed: Recomputed) -> Problem:
        return Problem(recompute_first(self._order, recomputed), self._setting.to, self._setting.costs)

    def refusal(self, given: Budgets) -> BudgetError:
        """Return the error for budgets that cannot be met."""

        def attempt(budgets: Budgets) -> PlanInBudget | None:
            return self._attempt(budgets, self._none, ALL) or self._enough(budgets, self._recomputing(budgets))

        enough, _ = least_raised(attempt, given, self._highest)
        return refusal(self._order, given, "evicting and recomputing as much as possible is not enough", enough)
