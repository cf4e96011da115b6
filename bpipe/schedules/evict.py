"""What one rank evicts, when and to whom: as little as keeps it within its limit.

    occupied      before the first step t that has more than the limit:
    F0 F1 F2 F3   evict what is needed again last: start before t-1, wait before t,
    1  2  3  4    load it from before the step ahead of its backward, wait before its backward.

With times, a transfer starts as many steps ahead as it takes, and what can be hidden so is evicted first.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from bpipe.schedules.action import BACKWARD, COMPUTE, MIRROR, Action, Op
from bpipe.schedules.rank_steps import Part, RankSteps, Which

__all__: list[str] = []

MOST_PARTS = 1 << 30


class Guests:
    """The room that one rank, or a host, has for the guests of one evictor, step by step of the evictor.

    Args:
        peer: the acceptor.
        room: what it can take; None for any amount.
        seconds: how long a transfer of some size takes, where a cost model says it.
    """

    def __init__(self, peer: int, room: int | None, num_steps: int, seconds: Callable[[int], float] | None = None) -> None:
        self.peer, self.room, self._seconds = peer, room, seconds
        self._used = [0] * (num_steps + 1)

    @property
    def most(self) -> int:
        """The most that it keeps at once."""
        return max(self._used)

    def clear(self) -> None:
        """Forget all guests."""
        self._used = [0] * len(self._used)

    def has_room(self, size: int, first: int, last: int) -> bool:
        return self.room is None or max(self._used[first : last + 1]) + size <= self.room

    def add(self, size: int, first: int, last: int) -> None:
        if self.room is not None:
            self._used[first : last + 1] = [used + size for used in self._used[first : last + 1]]

    def seconds(self, size: int) -> float:
        return 0.0 if self._seconds is None else self._seconds(size)


class Eviction(NamedTuple):
    """A part of a microbatch, or all of it, that leaves and comes back; four steps before which something happens."""

    which: Part
    size: int
    peer: int
    start: int
    left: int
    load: int
    back: int


class _Candidate(NamedTuple):
    """What could be evicted; the largest is chosen."""

    is_hidden: bool
    needed: int
    size: int
    eviction: Eviction
    guests: Guests


class Shortage(NamedTuple):
    """Why a rank cannot keep within its limit."""

    text: str


@dataclass
class Sweep:
    """One pass over a rank's steps.

    Args:
        rank: its steps.
        limit: the most it may occupy.
        parts: for each of its stages, the size of each part of a microbatch that can move.
        guests: who may take them, best first.
        most_parts: how many parts of one microbatch may be away, so that loads come evenly.
    """

    rank: RankSteps
    limit: int
    parts: dict[int, Sequence[int]]
    guests: Sequence[Guests]
    most_parts: int = MOST_PARTS
    evictions: list[Eviction] = field(default_factory=list)
    _live: dict[Part, int] = field(default_factory=dict)  # here, never evicted, and its size
    _num_away: defaultdict[Which, int] = field(default_factory=lambda: defaultdict(int))  # parts evicted of each microbatch
    _started: defaultdict[int, int] = field(default_factory=lambda: defaultdict(int))

    def run(self) -> list[Eviction] | Shortage:
        """Decide all evictions, or say what cannot be done."""
        rank = self.rank
        largest = max(map(sum, self.parts.values()), default=0)
        change = [0] * (len(rank.steps) + 1)
        moved = 0
        for t, (action, level) in enumerate(zip(rank.steps, rank.level)):
            if action is not None and action.op is Op.F:
                self._live |= self._parts_of(action)
            moved += change[t]
            while level + moved > self.limit:
                chosen = max(self._candidates(t, largest), key=lambda candidate: candidate[:3], default=None)
                if chosen is None:
                    return Shortage(f"occupies {level + moved} at {action} and has nothing that it could evict in time")
                eviction = chosen.eviction
                self._choose(eviction, chosen.guests)
                change[eviction.load] += eviction.size
                moved -= eviction.size
                change[t] -= eviction.size
            if action is not None and action.op in BACKWARD:
                for part in self._parts_of(action):
                    self._live.pop(part, None)
        occupied = [own + extra for own, extra in zip(rank.level, accumulate(change))]
        return list(_loaded_earlier(self.evictions, rank, occupied, self.limit))

    def _parts_of(self, action: Action) -> dict[Part, int]:
        """What a computation saves or needs: one piece its part, a whole one all parts."""
        sizes, which = self.parts[action.stage], action[1:3]
        if action.part:
            return {(*which, action.part): sizes[action.part - 1]}
        return {(*which, part): size for part, size in enumerate(sizes, start=len(sizes) > 1) if size}

    def _choose(self, eviction: Eviction, guests: Guests) -> None:
        self.evictions.append(eviction)
        self._started[eviction.start] += eviction.size
        guests.add(eviction.size, eviction.start, eviction.back - 1)
        del self._live[eviction.which]
        self._num_away[eviction.which[:2]] += 1

    def _candidates(self, t: int, largest: int) -> Iterator[_Candidate]:
        """What could leave before step t and be back in time, with somebody who has room; the furthest needed first."""
        for which in sorted(self._live, key=self.rank.backward.__getitem__, reverse=True):
            is_late = self.rank.leaves[which] > t or self.rank.backward[which] - 1 <= t
            if is_late or self._num_away[which[:2]] >= self.most_parts:
                continue
            candidate = self._candidate(which, t, largest)
            if candidate is not None:
                yield candidate
                if candidate.is_hidden:
                    return

    def _candidate(self, which: Part, t: int, largest: int) -> _Candidate | None:
        needed, earliest, size = self.rank.backward[which], self.rank.forward[which] + 1, self._live[which]
        for guests in self.guests:
            seconds = guests.seconds(size)
            start = self._begin(t, earliest, seconds, size, largest)
            load = self._latest(needed, t + 1, seconds)
            if start is None or not guests.has_room(size, start, needed - 1):
                continue
            is_hidden = self._fits(start, t, seconds) and self._fits(load, needed, seconds)
            return _Candidate(is_hidden, needed, size, Eviction(which, size, guests.peer, start, t, load, needed), guests)
        return None

    def _begin(self, t: int, earliest: int, seconds: float, size: int, largest: int) -> int | None:
        """The latest step from before which an eviction can be complete before t, and at which not too much starts already."""
        latest = self._latest(t, earliest, seconds)
        if latest < earliest:
            return None
        turns = (step for step in range(latest, earliest - 1, -1) if self._started[step] + size <= largest)
        return next(turns, None)

    def _latest(self, end: int, earliest: int, seconds: float) -> int:
        """The latest step, from `earliest` on, from before which so many seconds pass until `end`."""
        if not self.rank.times or end - 1 <= earliest:
            return end - 1
        begins = self.rank.times
        fitting = bisect_right(begins, begins[end] - seconds, 0, end) - 1
        return min(max(fitting, earliest), end - 1)

    def _fits(self, begin: int, end: int, seconds: float) -> bool:
        times = self.rank.times
        return not times or times[end] - times[begin] >= seconds


def _loaded_earlier(evictions: Sequence[Eviction], rank: RankSteps, occupied: list[int], limit: int) -> Iterator[Eviction]:
    """Start loads that would run in an idle step one backward earlier where the limit has room.

    A rank that never waits has no idle steps in its ending, and would see the whole transfer.
    """
    for eviction in sorted(evictions, key=lambda eviction: eviction.load):
        before = eviction.load - 1
        if rank.steps[eviction.load] is None and before > eviction.left and occupied[before] + eviction.size <= limit:
            occupied[before] += eviction.size
            yield eviction._replace(load=before)
        else:
            yield eviction


def emit(rank: RankSteps, evictions: Sequence[Eviction]) -> tuple[Action, ...]:
    """The rank's list with its evictions in it.

    At one boundary memory is given back before it is taken: on this rank by completed evictions, on the acceptor by completed
    loads.
    """
    moves: dict[int, list[list[Action]]] = defaultdict(lambda: [[], [], [], []])
    for eviction in evictions:
        for order, (op, step) in enumerate(
            (
                (Op.WAIT_EVICT, eviction.left),
                (Op.LOAD, eviction.load),
                (Op.WAIT_LOAD, eviction.back),
                (Op.EVICT, eviction.start),
            )
        ):
            moves[step][order].append(Action(op, *eviction.which, eviction.peer))
    lane: list[Action] = []
    step = 0
    for action in rank.actions:
        while action.op in COMPUTE and step < len(rank.steps):
            for group in moves.get(step, ()):
                lane += group
            step += 1
            if rank.steps[step - 1] is not None:
                break
        lane.append(action)
    return tuple(lane)


def mirrored(actions: Sequence[Action], evictor: int, acceptor: int) -> tuple[Action, ...]:
    """The acceptor's end of an evictor's transfers: the same events in the same order, so that neither can wait in a circle."""
    return tuple(a._replace(op=MIRROR[a.op], peer=evictor) for a in actions if a.op in MIRROR and a.peer == acceptor)
