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
from bpipe.passes.balance.problem import Problem, Solution, may_fit
from bpipe.passes.communicate import communicate, computations_only
from bpipe.passes.fit import Budgets, raised, refusal, smallest
from bpipe.passes.recompute import RecomputeSearch, Which, recompute_first
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

Recomputed = tuple[frozenset[Which], ...]  # the microbatches that a plan recomputes, by rank
Bound = Callable[[Recomputed], float]  # the seconds that a step takes at least which recomputes these


class Way(NamedTuple):
    """How a plan came to keep its budgets, so that the same may be done to one of more microbatches."""

    beyond: int | None = None  # the bytes beyond its budget that a rank evicts; None: it recomputes all of them
    shares: tuple[float, ...] = ()  # of the evictions that nothing hides, those that were recomputed instead, again and again


class Mixed(NamedTuple):
    """A plan that evicts and recomputes."""

    plan: Plan  # the plan, without transfers between stages
    finished: Plan  # the plan with them
    recomputed: Recomputed
    exposed: tuple[tuple[Which, ...], ...]  # the microbatches whose transfers are not hidden, the largest first, by rank
    step_s: float  # the simulated seconds of a step
    way: Way


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
    sizes.check(plan.num_stages, plan.num_ranks, plan.slices)
    search = _Search(replace(computations_only(plan), sizes=sizes), Destinations() if to is None else to, costs)
    given = budgets_of("budgets", budgets, plan.num_ranks)
    found = search.within(given)
    if found is None:
        raise search.refusal(given)
    return found.plan


def attempt(
    plan: Plan,
    sizes: Sizes,
    budgets: Budgets,
    costs: Costs,
    to: Destinations,
    *,
    bound_s: Bound = lambda _: 0.0,
    below_s: float = inf,
    way: Way | None = None,
) -> Mixed | None:
    """Do what `evict_or_recompute` does, and return None if the budgets cannot be met, without looking for those that can.

    Args:
        bound_s: what a step takes at least that recomputes some microbatches.
        below_s: the seconds that the step must not reach; else the result may be None, too.
        way: of the same plan of fewer microbatches, to be tried first: if it keeps the budgets, nothing else is tried.
    """
    return _Search(replace(computations_only(plan), sizes=sizes), to, costs, bound_s, below_s).within(budgets, way)


class _Search:
    """The plans that evict and recompute within some budgets.

    Args:
        bound_s: what a step takes at least that recomputes some microbatches, so that what takes too long need not be tried.
        below_s: the seconds that the step must not reach.
    """

    def __init__(
        self, plan: Plan, to: Destinations, costs: Costs, bound_s: Bound = lambda _: 0.0, below_s: float = inf
    ) -> None:
        self._plan, self._to, self._costs, self._bound_s, self._below_s = plan, to, costs, bound_s, below_s
        finished = communicate(plan)
        self._recompute = RecomputeSearch(plan, finished)
        self._peaks = finished.device_peak_bytes
        self._highest = max(self._peaks)
        self._none: Recomputed = (frozenset(),) * plan.num_ranks

    def within(self, budgets: Budgets, way: Way | None = None) -> Mixed | None:
        """Return the fastest plan that is found within the budgets, or the one that a way leads to; None if there is none."""
        if way is not None:
            chosen = self._recompute.chosen(raised(budgets, way.beyond or 0))
            if chosen is not None and self._bound_s(tuple(map(frozenset, chosen))) >= self._below_s:
                return None
            if way.beyond is None:
                return self._recomputing(budgets)
            if (repeated := self._repeated(budgets, way, way.beyond)) is not None:
                return repeated
        first = self._attempt(budgets, self._none, ALL)
        if first is not None and first.step_s <= self._bound_s(self._none) * (1 + ROUNDING):
            return first  # nothing waits for its evictions
        alone = self._recomputing(budgets, self._below_s if first is None else min(self._below_s, first.step_s))
        mixed = self._enough(budgets, alone, self._below_s) if first is None else first
        if mixed is None:
            return alone
        for _ in range(ROUNDS):
            better = min(self._with_more(mixed, budgets), key=lambda one: one.step_s, default=mixed)
            if better.step_s >= mixed.step_s:
                break
            mixed = better
        return mixed if alone is None else min(mixed, alone, key=lambda one: one.step_s)

    def _repeated(self, budgets: Budgets, way: Way, beyond: int) -> Mixed | None:
        """Return the plan that a way leads to which evicts; None if that does not keep the budgets."""
        chosen = self._recompute.chosen(raised(budgets, beyond))
        mixed = None if chosen is None else self._attempt(budgets, tuple(map(frozenset, chosen)), beyond)
        if mixed is None:
            return None
        for share in way.shares:
            number = round(share * max(map(len, mixed.exposed)))
            better = self._recomputing_more(mixed, number, budgets) if number else None
            if better is not None and better.step_s < mixed.step_s:
                mixed = better
        return mixed

    def _recomputing(self, budgets: Budgets, below_s: float = inf) -> Mixed | None:
        """Return the plan that only recomputes; None if there is none, or if it takes too long."""
        chosen = self._recompute.chosen(budgets)
        if chosen is None or self._bound_s(tuple(map(frozenset, chosen))) >= below_s:
            return None
        found = self._recompute.both_within(budgets)
        return None if found is None else self._of(*found, ((),) * self._plan.num_ranks, Way())

    def _enough(self, budgets: Budgets, alone: Mixed | None, below_s: float = inf) -> Mixed | None:
        """Recompute as little as possible so that the balance pass can keep the budgets; None if that takes too long."""
        below_s = below_s if alone is None else min(below_s, alone.step_s)
        known: dict[Recomputed, tuple[bool, Mixed | None]] = {}  # whether it works, and what was found if that may be fast enough

        def attempt(less: int) -> tuple[int, Mixed | None] | None:
            beyond = max(0, self._highest - less)
            chosen = self._recompute.chosen(raised(budgets, beyond))
            if chosen is None:
                return None
            recomputed = tuple(map(frozenset, chosen))
            if recomputed not in known:
                if self._bound_s(recomputed) >= SLOW * below_s:  # then what recomputes more is slow, too, but less may do
                    known[recomputed] = self._problem(recomputed).may_fit(budgets), None
                else:
                    found = self._attempt(budgets, recomputed, beyond)
                    known[recomputed] = found is not None, found
            works, found = known[recomputed]
            return (less, found) if works else None

        most = (self._highest, alone) if alone is not None else attempt(self._highest)
        return None if most is None else smallest(attempt, 1, most, self._highest)[1]

    def _with_more(self, mixed: Mixed, budgets: Budgets) -> Iterator[Mixed]:
        """Yield plans that also recompute evictions that nothing hides: all of them, half of them on each rank, and so on."""
        number = max(map(len, mixed.exposed), default=0)
        while number:
            found = self._recomputing_more(mixed, number, budgets)
            if found is not None:
                yield found
            number //= 2

    def _recomputing_more(self, mixed: Mixed, number: int, budgets: Budgets) -> Mixed | None:
        """Recompute some more evictions on each rank; return None if that does not keep the budgets, or is too slow."""
        chosen = tuple(old.union(new[:number]) for old, new in zip(mixed.recomputed, mixed.exposed))
        found = None if self._bound_s(chosen) >= mixed.step_s else self._attempt(budgets, chosen)
        share = number / max(map(len, mixed.exposed))
        return found and found._replace(way=mixed.way._replace(shares=(*mixed.way.shares, share)))

    def _attempt(self, budgets: Budgets, recomputed: Recomputed, beyond: int = 0) -> Mixed | None:
        """Balance the plan with some microbatches recomputed, or return None if that does not keep the budgets."""
        if not any(recomputed) and not may_fit(self._peaks, budgets, self._to):
            return None
        problem = self._problem(recomputed)
        solution = problem.solve(budgets, thorough=False) if problem.may_fit(budgets) else ""
        if not isinstance(solution, Solution):
            return None
        found = problem.balanced(solution, budgets)
        finished = communicate(found)
        if any(budget is not None and peak > budget for peak, budget in zip(finished.device_peak_bytes, budgets)):
            return None
        exposed: list[tuple[Which, ...]] = []
        for rank in range(found.num_ranks):
            solved = solution.by_rank.get(rank)
            evictions = () if solved is None else solved.decision.evictions
            late = sorted((e for e in evictions if not e.is_hidden), key=lambda e: e.size, reverse=True)
            able = self._recompute.able(rank)
            exposed.append(tuple(dict.fromkeys(e.which[:2] for e in late if e.which[0] in able)))
        return self._of(found, finished, tuple(exposed), Way(beyond))

    def _problem(self, recomputed: Recomputed) -> Problem:
        base = recompute_first(self._plan, recomputed)
        return Problem(base, base.sizes, self._to, self._costs, "fewest", keeps_recomputed=True)

    def _of(self, plan: Plan, finished: Plan, exposed: tuple[tuple[Which, ...], ...], way: Way) -> Mixed:
        recomputed = tuple(frozenset(plan.recomputed(rank)) for rank in range(plan.num_ranks))
        return Mixed(plan, finished, recomputed, exposed, simulated_times(finished, self._costs).makespan_s, way)

    def refusal(self, given: Budgets) -> BudgetError:
        """Return the error for budgets that cannot be met."""

        def attempt(more: int) -> tuple[int, Mixed] | None:
            enough = raised(given, more)
            found = self._attempt(enough, self._none, ALL) or self._enough(enough, self._recomputing(enough))
            return None if found is None else (more, found)

        enough = attempt(self._highest)
        assert enough is not None, "with its own peak as the budget, a plan needs no eviction"
        more, _ = smallest(attempt, 1, enough, self._highest)
        return refusal(self._plan, given, "evicting and recomputing as much as possible is not enough", raised(given, more))
