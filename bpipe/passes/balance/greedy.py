"""Decide the evictions of one rank, their times and their peers: the fewest that keep it within its limit.

    occupied      before the first step t that has more than the limit:
    F0 F1 F2 F3   evict the microbatch needed again last: start before t-1, wait before t,
    1  2  3  4    load it from before the step ahead of its backward, wait before its backward.

If parts differ in size, evict the one that most relieves the steps over the limit, relative to its size. With the times of a
cost model, a transfer starts as many steps ahead as it takes, and evictions that can be hidden this way come first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from bpipe.passes.balance.rank_steps import Part, RankSteps, Stay, Which
from bpipe.passes.balance.remote_capacity import Capacity, LinkOccupancy, RemoteCapacity
from bpipe.passes.balance.step_times import StepTimes

__all__: list[str] = []


# For each stage of a rank and each slice of a microbatch that has its own sizes: the size of each part that can move.
PartSizes = Mapping[tuple[int, int], Sequence[int]]


class Eviction(NamedTuple):
    """A part of a microbatch, or all of it, that leaves and comes back, with the steps before which its transfers start and end."""

    which: Part
    size: int
    peer: int
    start: int
    left: int
    load: int
    back: int
    is_hidden: bool = True


def are_uneven(sizes: PartSizes) -> bool:
    """Return whether the parts that can move differ in size."""
    return len({size for parts in sizes.values() for size in parts if size}) > 1


@dataclass
class GreedyEviction:
    """One run over a rank's steps that evicts the best candidate whenever the limit is exceeded."""

    rank: RankSteps  # its steps
    times: StepTimes  # the begin times of its steps, and the durations of transfers
    limit: int  # the most that it may occupy
    sizes: PartSizes  # of its stages
    capacities: Sequence[Capacity]  # the peers that may store them, best first
    most_parts: int  # the most parts of one microbatch that may be away, so that loads come evenly
    size_exponent: float = 1.0  # the exponent of a candidate's size, which counts against it
    num_ranked: int = field(default=0, init=False)  # how many candidates were examined: for the search budget
    evictions: list[tuple[Eviction, RemoteCapacity]] = field(default_factory=list, init=False)
    was_refused: bool = field(default=False, init=False)  # whether a peer had too little memory for one of its evictions

    def __post_init__(self) -> None:
        shared = LinkOccupancy(), LinkOccupancy()
        links = [(LinkOccupancy(), LinkOccupancy()) if self.times.is_simulated else shared for _ in self.capacities]
        self._remotes = [RemoteCapacity(capacity, len(self.rank.steps), *pair) for capacity, pair in zip(self.capacities, links)]
        self._occupied = list(self.rank.occupied)
        self._live: dict[Part, int] = {}  # parts here that were never evicted, and their sizes
        self._num_away: defaultdict[Which, int] = defaultdict(int)  # parts evicted of each microbatch
        self._full: set[Which] = set()  # microbatches of which no more parts may leave
        self._is_even = not are_uneven(self.sizes)
        self._k = len({unit for _, unit in self.sizes})

    @property
    def peak(self) -> int:
        """The most that the rank occupies with the evictions that are decided by now."""
        return max(self._occupied, default=0)

    def run(self) -> tuple[Eviction, ...] | str:
        """Decide all evictions, or return why they cannot keep to the limit."""
        occupied, limit = self._occupied, self.limit
        for t, (saved, no_longer) in enumerate(zip(self.rank.saved, self.rank.needed)):
            if saved:
                stage, unit, _ = saved[0]
                sizes = self.sizes[stage, unit % self._k]
                self._live.update((part, size) for part, size in zip(saved, sizes) if size)
            while occupied[t] > limit:
                if not self._evict_before(t):
                    action = (self.rank.steps[t] or self.rank.steps[t + 1])[0]
                    return f"occupies {occupied[t]} of {limit} at {action} and can evict nothing in time"
            for part in no_longer:
                self._live.pop(part, None)
        if not self._is_even:
            self._take_back()
        return tuple(self._loaded_earlier())

    def _evict_before(self, t: int) -> bool:
        """Evict the best candidate that can be hidden, else the best one; return False if there is none."""
        chosen: tuple[Eviction, RemoteCapacity] | None = None
        for which in self._ranked(t):
            candidate = self._candidate(which, t)
            if candidate is not None and (chosen is None or candidate[0].is_hidden):
                chosen = candidate
                if candidate[0].is_hidden:
                    break
        if chosen is None:
            return False
        self._choose(*chosen)
        return True

    def _choose(self, eviction: Eviction, remote: RemoteCapacity) -> None:
        self.evictions.append((eviction, remote))
        seconds, times = self.times.duration(remote.peer, eviction.size), self.times.begins
        remote.out.take(times[eviction.left], seconds)
        remote.back.take(times[eviction.back], seconds)
        remote.add(eviction.size, eviction.start, eviction.back - 1)
        self._relieve(-eviction.size, eviction)
        del self._live[eviction.which]
        microbatch = eviction.which[:2]
        self._num_away[microbatch] += 1
        if self._num_away[microbatch] >= self.most_parts:
            self._full.add(microbatch)

    def _relieve(self, change: int, eviction: Eviction) -> None:
        span = slice(eviction.left, eviction.load)
        self._occupied[span] = [occupied + change for occupied in self._occupied[span]]

    def _ranked(self, t: int) -> list[Part]:
        """Return the parts that could leave before step t and be back in time, best first."""
        stays, full = self.rank.stays, self._full
        needed = {
            which: needed
            for which, (_, leaves, needed) in ((which, stays[which]) for which in self._live)
            if leaves <= t < needed - 1 and which[:2] not in full
        }
        self.num_ranked += len(self._live)
        if self._is_even:
            return sorted(needed, key=needed.__getitem__, reverse=True)
        worth = self._worth(t, needed)
        return sorted(needed, key=worth.__getitem__, reverse=True)

    def _worth(self, t: int, needed: Mapping[Part, int]) -> dict[Part, tuple[float, int]]:
        """Compute how much each part relieves the steps over the limit from t on, relative to its size, and when it is needed."""
        excess = [max(0, occupied - self.limit) for occupied in self._occupied[t : max(needed.values(), default=t)]]
        relief = {size: list(accumulate(min(size, over) for over in excess)) for size in set(map(self._live.__getitem__, needed))}
        weight = {size: size**self.size_exponent for size in relief}
        sizes = self._live
        return {which: (relief[sizes[which]][end - 2 - t] / weight[sizes[which]], end) for which, end in needed.items()}

    def _candidate(self, which: Part, t: int) -> tuple[Eviction, RemoteCapacity] | None:
        """Return an eviction to the first peer with free memory that hides it, else to the first peer with free memory."""
        found: tuple[Eviction, RemoteCapacity] | None = None
        for remote in self._remotes:
            eviction = self._planned(which, self.rank.stays[which], t, remote)
            if eviction is None or not (found is None or eviction.is_hidden):
                continue
            if not remote.has_room(eviction.size, eviction.start, eviction.back - 1):
                self.was_refused = True
                continue
            found = eviction, remote
            if eviction.is_hidden:
                break
        return found

    def _planned(self, which: Part, stay: Stay, t: int, remote: RemoteCapacity) -> Eviction | None:
        """Place an eviction's transfers as late as their links allow.

        Return None if that is too early and no cost model says how long a transfer would wait.
        """
        size, times = self._live[which], self.times.begins
        seconds = self.times.duration(remote.peer, size)
        start = min(t - 1, self.times.step_at(remote.out.latest(times[t], seconds)))
        load = min(stay.needed - 1, self.times.step_at(remote.back.latest(times[stay.needed], seconds)))
        fits = start > stay.saved and load > t
        if not (fits or self.times.is_simulated):
            return None
        start, load = max(start, stay.saved + 1), max(load, t + 1)
        return Eviction(which, size, remote.peer, start, t, load, stay.needed, fits and self.times.hides)

    def _take_back(self) -> None:
        """Drop evictions that later ones have made unnecessary, the largest first."""
        for eviction, remote in sorted(self.evictions, key=lambda pair: pair[0].size, reverse=True):
            if max(self._occupied[eviction.left : eviction.load]) + eviction.size <= self.limit:
                self._relieve(eviction.size, eviction)
                remote.add(-eviction.size, eviction.start, eviction.back - 1)
                self.evictions.remove((eviction, remote))

    def _loaded_earlier(self) -> Iterator[Eviction]:
        """Yield the evictions; a load in an idle step starts one backward earlier if the limit allows it.

        A rank that never waits has no idle time at its end, so the whole transfer would be exposed.
        """
        for eviction, _ in sorted(self.evictions, key=lambda pair: pair[0].load):
            before = eviction.load - 1
            is_idle = not self.rank.steps[eviction.load] and before > eviction.left
            if is_idle and self._occupied[before] + eviction.size <= self.limit:
                self._occupied[before] += eviction.size
                yield eviction._replace(load=before)
            else:
                yield eviction
