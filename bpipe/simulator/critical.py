"""The critical path: the chain of actions that determines the duration of a step."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Generator, Iterator
from functools import lru_cache
from typing import NamedTuple

from bpipe.plan.action import COMPUTE, HOST, RECEIVES, SENDS, SERVED, START_OF, Action, Identity, Op
from bpipe.simulator.timeline import Lane, Span, Timeline

__all__ = ["Step", "critical_path"]


_INDEXES_KEPT = 16  # lanes whose index is cached, so that a plan of thousands of ranks need not keep all


class Step(NamedTuple):
    """One step of the chain: an action that ran on a rank, or a transfer in flight from it."""

    rank: int
    span: Span


def critical_path(timeline: Timeline) -> list[Step]:
    """Walk back from the end of the last computation, or exchange of twins, to the event that each action waited for last.

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
    """An action of a lane."""

    rank: int
    served: bool
    position: int


class _Walk:
    """The walk back through the lanes of a timeline."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.plan = timeline, timeline.plan
        self.positions = lru_cache(_INDEXES_KEPT)(self._positions)
        self.link = lru_cache(_INDEXES_KEPT)(self._link)

    def _lane(self, rank: int, served: bool) -> tuple[tuple[Action, ...], Lane]:
        side = (self.plan.served, self.timeline.served) if served else (self.plan.actions, self.timeline.actions)
        return side[0][rank], side[1][rank]

    def _positions(self, rank: int, served: bool) -> dict[Identity, int]:
        return {action.identity: position for position, action in enumerate(self._lane(rank, served)[0])}

    def _span(self, place: _Place) -> Span:
        actions, lane = self._lane(place.rank, place.served)
        return Span(actions[place.position], lane.begin_s[place.position], lane.end_s[place.position])

    def back(self) -> Iterator[Step]:
        """Yield the path from its end."""
        last = max(self.timeline.computing_ranks(), key=self.timeline.step_end_s)
        place: _Place | None = _Place(last, False, self.timeline.last_position(last))
        while place is not None:
            span = self._span(place)
            if span.action.op in COMPUTE and not self._is_beside(place, span):
                yield Step(place.rank, span)
            if span.action.op in START_OF and span.seconds > 0:
                place = yield from self._through(self._awaited(place, span.action), span.end_s)
            else:
                place = self._before(place)

    def _is_beside(self, place: _Place, span: Span) -> bool:
        """Return whether a computation ran side by side with the one behind it, which stands for both."""
        return self.plan.begins_pair(span.action) and self._span(place._replace(position=place.position + 1)).begin_s < span.end_s

    def _before(self, place: _Place) -> _Place | None:
        """Return the action that had to end before a lane reached a place; posting a transfer does not block."""
        actions, _ = self._lane(place.rank, place.served)
        peer = actions[place.position].peer if place.served else None
        for position in range(place.position - 1, -1, -1):
            if not actions[position].is_post and (not place.served or actions[position].peer == peer):
                return _Place(place.rank, place.served, position)
        return None

    def _awaited(self, place: _Place, completion: Action) -> _Place:
        """Return the sending end of the transfer that a lane waited for; the rank's own end if its host is the other one."""
        start = completion.start_identity
        here = place._replace(position=self.positions(place.rank, place.served)[start])
        is_here = start[0] in SENDS or start[0] is Op.REDUCE_GRAD or completion.peer == HOST
        return here if is_here else self._other_end(here)

    def _ends(self, send: _Place) -> tuple[_Place, ...]:
        """Return the places where a transfer is posted: at both ends, or only at the rank's own if the other is a host."""
        return (send,) if self._span(send).action.peer == HOST else (send, self._other_end(send))

    def _other_end(self, place: _Place) -> _Place:
        action = self._span(place).action
        assert action.peer is not None
        if (twin := self.plan.twin(action.stage)) is not None and action.is_exchange:
            return _Place(action.peer, False, self.positions(action.peer, False)[action.op, twin, *action[2:4]])
        other = self.plan.other_end(action)
        served = other[0] in SERVED
        return _Place(action.peer, served, self.positions(action.peer, served)[other])

    def _through(self, send: _Place, arrival_s: float) -> Generator[Step, None, _Place | None]:
        """Follow transfers back to the lane that posted its end last, or that kept the link busy until then.

        The transfer that kept a link busy is known only in a simulated timeline.
        """
        while True:
            ends = self._ends(send)
            span = Span(self._span(send).action, max(self._span(end).begin_s for end in ends), arrival_s)
            yield Step(send.rank, span)
            later = max(ends, key=self._reached_s)
            if self.timeline.source != "simulated" or span.begin_s <= self._reached_s(later):
                return self._before(later)
            link = self.link(send.rank, span.action.peer, span.action.op in SENDS or span.action.is_exchange)
            send = link[bisect_left(link, (span.begin_s,)) - 1][1]
            arrival_s = self._span(send).end_s

    def _reached_s(self, place: _Place) -> float:
        before = self._before(place)
        return 0.0 if before is None else self._span(before).end_s

    def _link(self, rank: int, peer: int, is_sending: bool) -> list[tuple[float, _Place]]:
        """Return the transfers from a rank to another, or from or to its host, in the order in which they began."""
        ops = SENDS if is_sending else RECEIVES
        places = (
            _Place(rank, served, position)
            for served in (False, True)
            for position, action in enumerate(self._lane(rank, served)[0])
            if (action.op in ops or action.is_exchange) and action.peer == peer
        )
        return sorted((self._span(place).begin_s, place) for place in places)
