"""A plan to be balanced: the ranks that need to evict, the order in which they decide, and the free memory of the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product, repeat
from typing import Literal, NamedTuple

from bpipe.passes.balance.greedy import PartSizes
from bpipe.passes.balance.insert_evictions import mirrored
from bpipe.passes.balance.rank_planner import RankPlanner, RankSolution
from bpipe.passes.balance.rank_steps import RankSteps, steps_of
from bpipe.passes.balance.remote_capacity import Capacity
from bpipe.passes.balance.step_times import StepTimes, simulated, uniform
from bpipe.passes.communicate import communicate
from bpipe.passes.fit import Budgets
from bpipe.plan.action import HOST
from bpipe.plan.destinations import Destinations
from bpipe.plan.meter import slot
from bpipe.plan.order import clock_of
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs

__all__: list[str] = []

SEARCH_BUDGET = 500_000  # candidates that a thorough search may examine: about a second

Choice = Literal["fewest", "eager"]  # of evictions


class Solution(NamedTuple):
    """The evictions of each rank that needs any, and the peak of each such rank with them."""

    by_rank: Mapping[int, RankSolution]
    peaks: Sequence[int]

    @property
    def cost(self) -> tuple[int, int]:
        """The bytes whose transfers cannot be hidden, and all bytes that move."""
        costs = [one.cost for one in self.by_rank.values()]
        return sum(late for late, _ in costs), sum(moved for _, moved in costs)


class Problem:
    """A plan to be balanced, and all that does not change from one attempt to the next.

    Args:
        plan: of computations and recomputations, without transfers; with sizes to count bytes, without to count slots.
    """

    def __init__(self, plan: Plan, to: Destinations, costs: Costs | None = None, rule: Choice = "fewest") -> None:
        to.check(plan.num_ranks)
        self.plan, self.to, self.rule, self._costs = plan, to, rule, costs
        self._times = clock_of(plan, [plan.compute(rank) for rank in range(plan.num_ranks)])
        self.finished = plan if plan.sizes is None and costs is None else communicate(plan, self._times)

    @cached_property
    def _steps(self) -> list[RankSteps]:
        return steps_of(self.plan, self.finished, self._times)

    @cached_property
    def peaks(self) -> list[int]:
        """The peak of each rank without evictions."""
        return [steps.peak for steps in self._steps]

    @cached_property
    def ranks(self) -> list[RankPlanner]:
        """What decides the evictions of each rank; where there are costs, it takes a simulation."""
        by_costs: Iterable[StepTimes | None] = repeat(None)
        if self._costs is not None:
            by_costs = simulated(self.finished, self._steps, self._costs)
        amount = slot if self.plan.sizes is None else self.plan.sizes.moved
        ranks: list[RankPlanner] = []
        for rank, (steps, times) in enumerate(zip(self._steps, by_costs)):
            parts = self._parts(rank)
            by_steps = uniform(len(steps.steps), max(map(sum, parts.values()), default=0), hides=times is None)
            ranks.append(RankPlanner(rank, steps, [by_steps] if times is None else [times, by_steps], parts, amount))
        return ranks

    def may_fit(self, budgets: Budgets) -> bool:
        """Return whether what exceeds the budgets of some ranks is no more than what others have room for; hosts have room."""
        known = [(peak, budget) for peak, budget in zip(self.finished.device_peak_bytes, budgets) if budget is not None]
        return self.to.host != "no" or len(known) < len(budgets) or sum(peak - budget for peak, budget in known) <= 0

    def _parts(self, rank: int) -> PartSizes:
        by_unit = (None,) if self.plan.sizes is None else self.plan.sizes.by_unit
        return {
            (stage, unit): (1,) if stages is None else stages[stage].parts
            for unit, stages in enumerate(by_unit)
            for stage in self.plan.stages_of(rank)
        }

    def solution(self, budgets: Budgets) -> Solution | None:
        """Return the first solution that is found within the budgets, or None."""
        found = self.solve(budgets, thorough=False)
        return found if isinstance(found, Solution) else None

    def solve(self, budgets: Budgets, *, thorough: bool) -> Solution | str:
        """Return the evictions of each rank, or a description of the shortage.

        Cost-model timing may need more memory than the budgets have; then fall back to step-based timing. The order in which
        ranks decide matters, because one may take the memory that another rank depends on, so both orders are tried.

        Args:
            thorough: whether to search for a cheaper solution after one has been found.
        """
        best: Solution | None = None
        lacking = ""
        for by_steps, most_first in product((False, True) if self._costs is not None else (False,), (True, False)):
            found = self._solve(budgets, SEARCH_BUDGET if thorough else 0, by_steps, most_first)
            if isinstance(found, str):
                lacking = lacking or found
            elif best is None or found.cost < best.cost:
                best = found
            if best is not None and not thorough:
                break
        return lacking if best is None else best

    def is_cheapest(self, solution: Solution, budgets: Budgets) -> bool:
        """Return whether a solution is known to be the cheapest: it hides everything, and moves no more than has to move."""
        late, moved = solution.cost
        limits = ((rank, budget) for rank, budget in enumerate(budgets) if budget is not None and rank in solution.by_rank)
        return late == 0 and moved == sum(self.ranks[rank].steps.least_moved(limit) for rank, limit in limits)

    def _solve(self, budgets: Budgets, effort: int, by_steps: bool, most_first: bool) -> Solution | str:
        """Let one rank decide after the other, those with the most to evict first or last."""
        peaks = list(self.peaks)
        room = [None if budget is None else max(0, budget - peak) for budget, peak in zip(budgets, peaks)]
        excess = {r: peaks[r] - budget for r, budget in enumerate(budgets) if budget is not None and budget < peaks[r]}
        by_rank: dict[int, RankSolution] = {}
        for rank in sorted(excess, key=excess.__getitem__, reverse=most_first):
            capacities = [Capacity(peer, None if peer == HOST else room[peer]) for peer in self.to.of(rank, room)]
            limit = self.peaks[rank] - excess[rank]
            if self.rule == "eager" and capacities:
                decided = self.ranks[rank].decide_eagerly(limit, capacities[0])
            else:
                decided = self.ranks[rank].decide(limit, capacities, effort // len(excess), by_steps=by_steps)
            if isinstance(decided, str):
                return f"rank {rank} {decided}"
            by_rank[rank] = decided
            peaks[rank] = decided.peak
            for peer, taken in decided.remote_buffers.items():
                peaks[peer] += taken
                left = room[peer]
                room[peer] = None if left is None else left - taken
        return Solution(by_rank, peaks)

    def balanced(self, solution: Solution, budgets: Budgets) -> Plan:
        """Return the plan with the evictions of a solution."""
        actions = list(self.plan.actions)
        served = [list(lane) for lane in self.plan.served]
        for rank, solved in solution.by_rank.items():
            actions[rank] = solved.lane
            for peer in solved.remote_buffers:
                served[peer] += mirrored(solved.lane, rank, peer)
        in_bytes = self.plan.sizes is not None
        return replace(
            self.plan,
            actions=tuple(actions),
            served=tuple(map(tuple, served)),
            slots=self.plan.slots if in_bytes else budgets,
            budgets=budgets if in_bytes else None,
        )
