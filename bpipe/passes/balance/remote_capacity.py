"""The peers that store a rank's evicted activations: their free memory at each step, and the busy times of their links."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from typing import NamedTuple

__all__: list[str] = []


class Capacity(NamedTuple):
    """The free memory that a peer has for one evictor."""

    peer: int  # the acceptor, or HOST
    room: int | None  # the amount that it can store at once; None for any amount


class LinkOccupancy:
    """The times at which one direction of a link is busy: it carries one transfer at a time."""

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def latest(self, end: float, seconds: float) -> float:
        """Return the latest start such that the link is free for `seconds` and the transfer ends by `end`."""
        begin = end - seconds
        for index in range(bisect_left(self._begins, end) - 1, -1, -1):
            if self._ends[index] <= begin:
                break
            begin = min(begin, self._begins[index] - seconds)
        return begin

    def take(self, end: float, seconds: float) -> None:
        """Occupy the link for `seconds`, as late as it is free to end by `end`."""
        begin = self.latest(end, seconds)
        index = bisect_right(self._begins, begin)
        self._begins.insert(index, begin)
        self._ends.insert(index, begin + seconds)


class RemoteCapacity:
    """The activations of one evictor at one peer, and the links between them."""

    def __init__(self, capacity: Capacity, num_steps: int, out: LinkOccupancy, back: LinkOccupancy) -> None:
        self.peer, self._room = capacity
        self.out, self.back = out, back
        self._used = [0] * (num_steps + 1)

    def has_room(self, size: int, first: int, last: int) -> bool:
        return self._room is None or max(self._used[first : last + 1]) + size <= self._room

    def add(self, size: int, first: int, last: int) -> None:
        """Store an activation from step `first` through step `last`; a negative size removes one."""
        if self._room is not None:
            self._used[first : last + 1] = [used + size for used in self._used[first : last + 1]]
