"""The critical path: the chain of actions that determines the duration of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import NamedTuple

from bpipe.plan.action import COMPUTE, HOST, RECEIVES, SENDS, SERVED, START_OF, Identity, Op
from bpipe.simulator.timeline import Span, Timeline

__all__ = ["Step", "critical_path"]


_INDEXES_KEPT = 16  # lanes whose index is cached, so that a plan of thousands of ranks need not keep all


class Step(NamedTuple):
    """One step of the chain: an action that ran on a rank, or a transfer in flight from it."""

    rank: int
    span: Span


def critical_path(timeline: Timeline) -> list[Step]:
    """Walk back from the end of the last computation, or exchange of gradients, to the event that each action waited for last.

    Returns:
        Computations and transfers in time order, each of which began when the one before it ended, or on a busy link
        when it had departed. So a simulated path covers the makespan; gaps in a measured one are the host's work between
        actions. Of a forward and a backward that ran side by side, it has the backward.

    Example:
        >>> from bpipe.schedules import Costs, build, simulate
        >>> [str(step.span.action) for step in critical_path(simulate(build("gpipe", 2, 1), Costs()))]
        ['0F0', '0SEND_F0', '1F0', '1B0', '1SEND_B0', '0B0']
    """
    return list(_Walk(timeline).back())[::-1]


class _Place(NamedTuple):
    """An action of a lane, and when it ran."""

    lane: int  # a rank's own one; those that ranks serve come behind those of all ranks
    position: int
    span: Span


class _Walk:
    """The walk back through the lanes of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.plan, self.num_ranks = timeline, timeline.plan, timeline.num_ranks
        self.lanes = (*self.plan.actions, *self.plan.served)
        self.times = (*timeline.actions, *timeline.served)
        self.positions = lru_cache(_INDEXES_KEPT)(self._positions)
        self.link = lru_cache(_INDEXES_KEPT)(self._link)

    def _positions(self, lane: int) -> dict[Identity, int]:
        return {action.identity: position for position, action in enumerate(self.lanes[lane])}

    def _place(self, lane: int, position: int) -> _Place:
        times = self.times[lane]
        return _Place(lane, position, Span(self.lanes[lane][position], times.begin_s[position], times.end_s[position]))

    def back(self) -> Iterator[Step]:
        """Yield the path from its end."""
        last = max(self.timeline.computing_ranks(), key=self.timeline.step_end_s)
        place: _Place | None = self._place(last, self.timeline.last_position(last))
        while place is not None:
            span = place.span
            if span.action.op in COMPUTE and not self._is_beside(place):
                yield Step(place.lane, span)
            if span.action.op in START_OF and span.seconds > 0:
                place = yield from self._through(self._awaited(place), span.end_s)
            else:
                place = self._before(place)

    def _is_beside(self, place: _Place) -> bool:
        """Return whether a computation ran side by side with the one behind it, which stands for both."""
        begins = self.plan.begins_pair(place.span.action)
        return begins and self._place(place.lane, place.position + 1).span.begin_s < place.span.end_s

    def _before(self, place: _Place) -> _Place | None:
        """Return the action that had to end before a lane reached a place; posting a transfer does not block."""
        actions, chain = self.lanes[place.lane], place.span.action.peer if place.lane >= self.num_ranks else None
        for position in range(place.position - 1, -1, -1):
            if not actions[position].is_post and chain in (None, actions[position].peer):
                return self._place(place.lane, position)
        return None

    def _awaited(self, place: _Place) -> _Place:
        """Return the sending end of the transfer that a lane waited for; the rank's own end if its host is the other one."""
        start = place.span.action.start_identity
        here = self._place(place.lane, self.positions(place.lane)[start])
        is_here = start[0] in SENDS or start[0] is Op.REDUCE_GRAD or here.span.action.peer == HOST
        return here if is_here else self._other_end(here)

    def _other_end(self, place: _Place) -> _Place:
        action = place.span.action
        assert action.peer is not None
        other = self.plan.other_end(action)
        lane = action.peer + self.num_ranks * (other[0] in SERVED)
        return self._place(lane, self.positions(lane)[other])

    def _through(self, send: _Place, arrival_s: float) -> Generator[Step, None, _Place | None]:
        """Follow transfers back to the lane that posted its end last, or that kept the link busy until then.

        A transfer is posted at both ends, or only at the rank's own if the other is a host. The one that kept a link busy is known
        only in a simulated timeline.
        """
        while True:
            action, rank = send.span.action, send.lane % self.num_ranks
            ends = (send,) if action.peer == HOST else (send, self._other_end(send))
            span = Span(action, max(end.span.begin_s for end in ends), arrival_s)
            yield Step(rank, span)
            later = max(ends, key=self._reached_s)
            if self.timeline.source != "simulated" or span.begin_s <= self._reached_s(later):
                return self._before(later)
            link = self.link(rank, action.peer, action.op in SENDS or action.is_exchange)
            send = link[bisect_left(link, (span.begin_s,)) - 1][1]
            arrival_s = send.span.end_s

    def _reached_s(self, place: _Place) -> float:
        before = self._before(place)
        return 0.0 if before is None else before.span.end_s

    def _link(self, rank: int, peer: int, is_sending: bool) -> list[tuple[float, _Place]]:
        """Return the transfers from a rank to another, or from or to its host, in the order in which they began."""
        ops = SENDS if is_sending else RECEIVES
        places = (
            self._place(lane, position)
            for lane in (rank, self.num_ranks + rank)
            for position, action in enumerate(self.lanes[lane])
            if (action.op in ops or action.is_exchange) and action.peer == peer
        )
        return sorted((place.span.begin_s, place) for place in places)
