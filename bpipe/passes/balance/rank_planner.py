"""Search the evictions of one rank: greedy attempts with different settings, of which the cheapest wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from bpipe.passes.balance.eager import evict_eagerly
from bpipe.passes.balance.greedy import Eviction, GreedyEviction, PartSizes, are_uneven
from bpipe.passes.balance.insert_evictions import insert_evictions, mirrored
from bpipe.passes.balance.rank_steps import RankSteps
from bpipe.passes.balance.remote_capacity import Capacity
from bpipe.passes.balance.step_times import StepTimes
from bpipe.plan.action import HOST, Action
from bpipe.plan.meter import SizeOf
from bpipe.plan.reserved import reserve

__all__: list[str] = []

SIZE_EXPONENTS = (1.0, 0.5, 1.5, 0.0, 0.75, 2.0, 3.0)  # of a candidate's size, which counts against it; each finds other solutions
PATIENCE = 1_000_000  # candidates to examine without success before a rank gives up


class RankSolution(NamedTuple):
    """The evictions of a rank."""

    evictions: Sequence[Eviction]
    peak: int  # the rank's peak with these evictions
    was_refused: bool  # whether a peer had too little memory for one of its evictions
    lane: tuple[Action, ...]  # the rank's list with them
    remote_buffers: Mapping[int, int]  # that it needs, by acceptor

    @property
    def cost(self) -> tuple[int, int]:
        """The bytes whose transfers cannot be hidden, and all bytes that move."""
        return sum(e.size for e in self.evictions if not e.is_hidden), sum(e.size for e in self.evictions)

    @property
    def exposed(self) -> Sequence[Eviction]:
        """The evictions whose transfers cannot be hidden, the largest first."""
        return sorted((e for e in self.evictions if not e.is_hidden), key=lambda e: e.size, reverse=True)


@dataclass(frozen=True, slots=True)
class RankPlanner:
    """Decide the evictions of one rank and their peers, and place the transfers in its list."""

    rank: int  # its number
    steps: RankSteps  # its steps
    timings: Sequence[StepTimes]  # the times of its steps, the best first
    sizes: PartSizes  # of its stages
    moved: SizeOf  # the amount that an eviction moves

    def has_choice(self, solved: RankSolution) -> bool:
        """Return whether a thorough search may find a cheaper solution than one."""
        is_simple = not are_uneven(self.sizes) and max(map(len, self.sizes.values())) == 1
        return not is_simple or solved.was_refused or solved.cost[0] > 0

    def decide_eagerly(self, limit: int, capacity: Capacity) -> RankSolution | str:
        """Decide the evictions by the paper's rule, or return why they cannot keep the rank within its limit."""
        found = evict_eagerly(self.steps, limit, capacity.peer)
        if isinstance(found, str):
            return found
        solved = self._solved(*found, was_refused=False)
        if capacity.room is not None and solved.remote_buffers.get(capacity.peer, 0) > capacity.room:
            return f"needs {solved.remote_buffers[capacity.peer]} buffers on rank {capacity.peer}, which has only {capacity.room}"
        return solved

    def decide(self, limit: int, capacities: Sequence[Capacity], effort: int, *, by_steps: bool) -> RankSolution | str:
        """Decide the evictions that keep the rank within its limit, or return why none can.

        Args:
            effort: how many candidates to examine for a cheaper solution than the first one; not a time, so that all ranks
                find the same one.
            by_steps: whether to place transfers step by step even if a cost model says how long they take.
        """
        best: RankSolution | None = None
        shortage = "is over its budget and has no other rank to evict to"
        for attempt in self._attempts(limit, capacities, self.timings[-1:] if by_steps else self.timings, thorough=effort > 0):
            found, num_ranked = self._fitted(attempt)
            effort -= num_ranked
            if isinstance(found, str):
                shortage = found
            elif best is None or found.cost < best.cost:
                best = found
            if effort <= (-PATIENCE if best is None else 0):
                break
        return shortage if best is None else best

    def _attempts(
        self, limit: int, capacities: Sequence[Capacity], timings: Sequence[StepTimes], *, thorough: bool
    ) -> Iterator[GreedyEviction]:
        """Yield attempts with the first peer alone, then all peers; with whole microbatches, then fewer parts of each.

        With fewer parts of each, loads are spread more evenly.
        """
        exponents = SIZE_EXPONENTS[:1] if not are_uneven(self.sizes) else SIZE_EXPONENTS if thorough else SIZE_EXPONENTS[:3]
        peers = (capacities[:1], capacities)[: len(capacities)]
        for times, some, most_parts, exponent in product(timings, peers, self._numbers_of_parts(), exponents):
            yield GreedyEviction(self.steps, times, limit, self.sizes, some, most_parts, exponent)

    def _numbers_of_parts(self) -> Iterator[int]:
        """Yield the most parts of a microbatch that may be away: all, then fewer and fewer, halving if attempts are slow."""
        number, is_slow = max(map(len, self.sizes.values())), are_uneven(self.sizes)
        while number:
            yield number
            number = number // 2 if is_slow and number > 4 else number - 1

    def _fitted(self, attempt: GreedyEviction) -> tuple[RankSolution | str, int]:
        """Try again with less capacity until the remote activations fit into buffers, and count the candidates that are examined.

        A buffer that a larger activation has left is larger than the next one needs.
        """
        given, num_ranked = attempt.capacities, 0
        while True:
            evictions = attempt.run()
            num_ranked += attempt.num_ranked
            if isinstance(evictions, str):
                return evictions, num_ranked
            solved = self._solved(evictions, attempt.peak, was_refused=attempt.was_refused)
            lacking = [0 if room is None else max(0, solved.remote_buffers.get(peer, 0) - room) for peer, room in given]
            if not any(lacking):
                return solved, num_ranked
            smaller = zip(attempt.capacities, lacking)
            capacities = [Capacity(peer, None if room is None else room - less) for (peer, room), less in smaller]
            attempt = replace(attempt, capacities=capacities)

    def _solved(self, evictions: Sequence[Eviction], peak: int, *, was_refused: bool) -> RankSolution:
        lane = insert_evictions(self.steps, evictions)
        peers = sorted({eviction.peer for eviction in evictions} - {HOST})
        remote_buffers = {peer: sum(reserve(mirrored(lane, self.rank, peer), self.moved).sizes) for peer in peers}
        return RankSolution(evictions, peak, was_refused, lane, remote_buffers)
