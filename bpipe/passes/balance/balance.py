"""The balance pass: evict activations that are not needed soon to a rank with free memory, and load them back in time.

Any plan of computations can be balanced (BPipe, Kim et al., ICML 2023, does it to 1F1B). For each rank over its budget, the
pass decides from that rank's own list of computations; its evicted activations go to ranks with free memory: first its pair,
then ranks of the same node, then others, then its host. README.md beside this file explains one example.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import get_args

from bpipe.errors import BudgetError, ConfigurationError
from bpipe.passes.balance.problem import Choice, Problem, Solution
from bpipe.passes.communicate import computations_only
from bpipe.passes.fit import Budgets, Given, budgets_to_keep, least_raised, refusal, smallest
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes
from bpipe.simulator.costs import Costs

__all__ = ["balance"]


def default_slots(num_stages: int, k: int = 1) -> int:
    """Return ceil((p+2)/2), the most that any rank holds when p stages are balanced in pairs (Kim et al., ICML 2023).

    Stages x and p-1-x hold (p-x) + (x+1) = p+1 microbatches at their peaks, and one in flight counts at both ends.
    With k slices per microbatch they hold (k+p-1-x) + (k+x) = 2k+p-1 slices, which makes k + ceil(p/2).
    """
    return k + (num_stages + 1) // 2


def balance(
    plan: Plan,
    *,
    slots: Given = None,
    sizes: Sizes | None = None,
    budgets: Given = None,
    to: Destinations | None = None,
    costs: Costs | None = None,
    rule: Choice = "fewest",
) -> Plan:
    """Insert evictions and loads so that no rank occupies more than its budget; the order of computations does not change.

    Args:
        plan: any; its computations are kept, and its transfers are dropped: `finish` adds new ones.
        slots: the budget in microbatches, or in slices if microbatches have several, one number or one per rank (None: unlimited).
        sizes: the bytes of a microbatch or slice, to count bytes instead of slots.
        budgets: with `sizes`, the budget in bytes, static bytes included, one number or one per rank; None: as low as possible,
            with the highest peak as every rank's budget, or without any if evictions do not lower it.
        to: the ranks that may store evicted activations; default: the pair p-1-x, then any rank with free memory.
        costs: how long computations and transfers take; evictions that computations can hide are chosen first. Each rank
            decides by itself, so transfers that share a link may still add a few percent.
        rule: "fewest" moves as little as the budget allows, and prefers microbatches that are needed again last;
            "eager" evicts one microbatch with each forward and loads one with each backward (the paper's steady state).

    Raises:
        BudgetError: the pass finds no placement that meets the budget; the message names the smallest budget that works, to
            within 1/1024 of the highest peak.
        ConfigurationError: budgets, destinations or rule are invalid.
    """
    given = budgets_to_keep(plan, slots, sizes, budgets)
    if rule not in get_args(Choice) or (rule == "eager" and sizes is not None):
        raise ConfigurationError(f"rule={rule!r}: choose one of 'fewest', 'eager' (the latter only with slots=)")
    problem = Problem(replace(computations_only(plan), sizes=sizes), Destinations() if to is None else to, costs, rule)
    if given is None:
        lowest = _lowest(problem)
        return problem.balanced(lowest, (max(lowest.peaks),) * plan.num_ranks) if lowest.by_rank else problem.plan
    solution = problem.solve(given, thorough=False)
    if isinstance(solution, str):
        lacking, solution = solution, _lowest(problem)
        missing = max(peak - budget for peak, budget in zip(solution.peaks, given) if budget is not None)
        if missing > 0:
            enough, _ = least_raised(problem.solution, given, max(problem.peaks), (missing, solution))
            raise refusal(problem.plan, given, lacking, enough)
    return problem.balanced(_cheaper(problem, given, solution), given)


def _lowest(problem: Problem) -> Solution:
    """Find the lowest maximum peak that the pass reaches, then the fewest bytes; evict nothing if that gains nothing."""
    highest = max(problem.peaks)
    static = (0,) if problem.plan.sizes is None else problem.plan.sizes.static
    lowest = max(static) if problem.to.host != "no" else -(-sum(problem.peaks) // len(problem.peaks))

    def attempt(peak: int) -> tuple[int, Solution] | None:
        found = problem.solution((peak,) * len(problem.peaks))
        return None if found is None else (max(found.peaks), found)

    peak, best = smallest(attempt, lowest, (highest, Solution({}, problem.peaks)), highest)
    return _cheaper(problem, (peak,) * len(problem.peaks), best)


def _cheaper(problem: Problem, budgets: Budgets, solution: Solution) -> Solution:
    """Return a cheaper solution within the same budgets if a thorough search finds one, else the given one."""
    has_choice = any(problem.ranks[rank].has_choice(solved) for rank, solved in solution.by_rank.items())
    if not has_choice or problem.is_cheapest(solution, budgets):
        return solution
    other = problem.solve(budgets, thorough=True)
    return other if isinstance(other, Solution) and other.cost < solution.cost else solution


def by_count(plan: Plan, to: Destinations | None = None) -> Plan:
    """Balance a plan of computations to at most ceil((p+2)/2) microbatches per rank, or else to as few as the pass reaches.

    The former (Kim et al., ICML 2023; of slices, `default_slots`) is for plans with one stage per rank that can meet it.
    """
    if plan.num_stages == plan.num_ranks:
        with suppress(BudgetError):
            return balance(plan, slots=default_slots(plan.num_stages, plan.units), to=to)
    lowest = balance(plan, sizes=Sizes.of([1] * plan.num_stages, num_ranks=plan.num_ranks), to=to)
    slots = (None,) * plan.num_ranks if lowest.budgets is None else lowest.budgets
    return replace(lowest, sizes=None, budgets=None, slots=slots)
