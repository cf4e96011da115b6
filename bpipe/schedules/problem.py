"""A plan to be balanced: which ranks need to evict, in which order they decide, and what the others still have room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.schedules.action import HOST
from bpipe.schedules.costs import Costs
from bpipe.schedules.destinations import Destinations
from bpipe.schedules.evict import Shortage
from bpipe.schedules.evictor import Evictor, Settled
from bpipe.schedules.guests import Offer
from bpipe.schedules.meter import slot
from bpipe.schedules.pace import Pace, measured, steady
from bpipe.schedules.plan import Plan
from bpipe.schedules.rank_steps import steps_of
from bpipe.schedules.sizes import Sizes
from bpipe.schedules.weave import mirrored

__all__: list[str] = []

Budgets = tuple[int | None, ...]


class Solution(NamedTuple):
    """What each rank that needs to evicts, and the most that each rank occupies then."""

    settled: Mapping[int, Settled]
    peaks: Sequence[int]

    @property
    def cost(self) -> tuple[int, int]:
        """The bytes that cannot be hidden, and those that move."""
        costs = [one.decision.cost for one in self.settled.values()]
        return sum(late for late, _ in costs), sum(moved for _, moved in costs)


class Problem:
    """What does not change from one attempt to the next.

    Args:
        plan: a plan of computations alone.
        sizes: what a microbatch takes in bytes; None to count slots.
        to: who may take guests.
        costs: how long computations and transfers take, if known.
        rule: "fewest" or "eager".

    Raises:
        ConfigurationError: destinations or costs do not fit the plan.
    """

    def __init__(self, plan: Plan, sizes: Sizes | None, to: Destinations, costs: Costs | None, rule: str) -> None:
        to.check(plan.num_ranks)
        self.plan, self.to, self.rule = replace(plan, sizes=sizes), to, rule
        ranks = steps_of(self.plan)
        self.static = (0,) * plan.num_ranks if sizes is None else sizes.static
        self.peaks = [static + rank.peak for static, rank in zip(self.static, ranks)]  # without evictions
        paces: list[list[Pace]] = [[] for _ in ranks] if costs is None else [[pace] for pace in measured(self.plan, ranks, costs)]
        self.ranks: list[Evictor] = []
        for rank, steps in enumerate(ranks):
            parts = self._parts(rank)
            largest = max(map(sum, parts.values()), default=0)
            paces[rank].append(steady(len(steps.steps), largest, hides=costs is None))
            self.ranks.append(Evictor(rank, steps, paces[rank], parts, slot if sizes is None else sizes.moved))

    def _parts(self, rank: int) -> dict[int, Sequence[int]]:
        sizes = self.plan.sizes
        stages = [stage for stage, owner in enumerate(self.plan.stage_ranks) if owner == rank]
        return {stage: (1,) if sizes is None else sizes.stages[stage].parts for stage in stages}

    def checked(self, given: int | Sequence[int | None] | None) -> Budgets:
        """One budget a rank.

        Raises:
            ConfigurationError: they make none.
        """
        p, name = self.plan.num_ranks, "slots" if self.plan.sizes is None else "budgets"
        budgets = (given,) * p if isinstance(given, int) or given is None else tuple(given)
        if len(budgets) != p or any(k is not None and (not isinstance(k, int) or k < 1) for k in budgets):
            raise ConfigurationError(f"{name}={shown(budgets)}: give one number of at least 1, or one for each of {p} ranks")
        return budgets

    def solve(self, budgets: Budgets, *, thorough: bool) -> Solution | str:
        """What each rank evicts, those with the most to evict first, or in words what the budgets lack.

        Args:
            budgets: one a rank.
            thorough: whether to look for fewer bytes where some evictions have been found.
        """
        peaks = list(self.peaks)
        room = [None if budget is None else max(0, budget - peak) for budget, peak in zip(budgets, peaks)]
        excess = {rank: peaks[rank] - budget for rank, budget in enumerate(budgets) if budget is not None}
        settled: dict[int, Settled] = {}
        for rank in sorted((rank for rank, over in excess.items() if over > 0), key=excess.__getitem__, reverse=True):
            decided = self._decide(rank, (budgets[rank] or 0) - self.static[rank], room, thorough)
            if isinstance(decided, Shortage):
                return f"rank {rank} {decided.text}"
            settled[rank] = decided
            peaks[rank] = self.static[rank] + decided.decision.peak
            for peer, taken in decided.rooms.items():
                peaks[peer] += taken
                left = room[peer]
                room[peer] = None if left is None else left - taken
        return Solution(settled, peaks)

    def _decide(self, rank: int, limit: int, room: Sequence[int | None], thorough: bool) -> Settled | Shortage:
        offers = [Offer(peer, None if peer == HOST else room[peer]) for peer in self.to.of(rank, room)]
        if self.rule == "eager" and offers:
            return self.ranks[rank].decide_eagerly(limit, offers[0])
        return self.ranks[rank].decide(limit, offers, thorough=thorough)

    def balanced(self, solution: Solution, budgets: Budgets) -> Plan:
        """The plan with its evictions."""
        actions = list(self.plan.actions)
        served = [list(lane) for lane in self.plan.served]
        for rank, settled in solution.settled.items():
            actions[rank] = settled.lane
            for peer in settled.rooms:
                served[peer] += mirrored(settled.lane, rank, peer)
        in_bytes = self.plan.sizes is not None
        return replace(
            self.plan,
            actions=tuple(actions),
            served=tuple(map(tuple, served)),
            slots=self.plan.slots if in_bytes else budgets,
            budgets=budgets if in_bytes else None,
        )


def shown(budgets: Budgets) -> str:
    """One number where all are the same."""
    return str(budgets[0]) if len(set(budgets)) == 1 else str(budgets)
