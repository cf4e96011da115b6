"""Limit the transfers in flight to what a device has room for: each keeps multiprocessors busy until its other end comes."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bpipe.device import Event, Streams, current, has_come, on_stream, reached

__all__: list[str] = []

TRANSFERS_AT_ONCE = 8
YOUNG_S = 0.5


class Waiting(NamedTuple):
    """A transfer that is not over.

    Args:
        what: the transfer in words.
        seconds: how long this rank's end has been ready.
    """

    what: str
    seconds: float


class _Flight(NamedTuple):
    work: Any
    ready: Event  # this rank's device has reached it
    issued_s: float
    what: Callable[[], str]


class InFlight:
    """The transfers that a rank has issued and that are not over, in the order of issue.

    A transfer starts once all but the latest few before it are over. Because both ends of a transfer are issued at the same point
    of a global order (`schedules.issue_order`), the first one that is not over has room at both its ends.

    Args:
        device: the device that they run on.
        at_once: how many may be in flight.
        streams: the streams of the pipeline.
    """

    def __init__(self, device: torch.device, at_once: int, streams: Streams) -> None:
        self._device, self._at_once, self._streams = device, at_once, streams
        self._flights: deque[_Flight] = deque()
        self._changing = threading.RLock()  # the control thread looks, too, and a finalizer may run in the middle
        self._since: tuple[_Flight, float] | None = None  # the first one, and when it was seen to be ready

    @contextmanager
    def next(self, what: Callable[[], str]) -> Iterator[Callable[[Any], None]]:
        """Open a context to post one transfer in, on a stream that waits for room; yield the function that takes its work.

        Args:
            what: describes the transfer.
        """
        stream, before = None, self._before_next()
        if before is not None:
            stream = self._streams.of("transfers that wait for room", self._device)
            reached(self._device).wait(stream)
        with on_stream(stream):
            if before is not None:
                before.work.wait()
            ready = reached(self._device)
            yield lambda work: self._flights.append(_Flight(work, ready, time.monotonic(), what))

    def _before_next(self) -> _Flight | None:
        """Return the transfer that has to be over before another one starts; None if there is room."""
        with self._changing:
            self._forget_finished()
            return self._flights[-self._at_once] if len(self._flights) >= self._at_once else None

    def number(self) -> int:
        """Return how many transfers are not over, or wait for one that is not."""
        with self._changing:
            self._forget_finished()
            return len(self._flights)

    def _forget_finished(self) -> None:
        with current(self._device):
            while self._flights and (first := self._flights[0]).work.is_completed():
                if self._flights and self._flights[0] is first:
                    self._flights.popleft()

    def first(self, now: float) -> Waiting | None:
        """Return the first transfer that is not over, if this rank's end is ready: a wait for it is a wait for another rank.

        The device is not queried about transfers issued in the last half second, so it is hardly ever queried while all goes well.

        Args:
            now: seconds of `time.monotonic`; the wait counts from the first call that finds the transfer ready.
        """
        with self._changing:
            if not self._flights or now - self._flights[0].issued_s < YOUNG_S:
                return None
            self._forget_finished()
            flight = self._flights[0] if self._flights else None
        if flight is None or not has_come(flight.ready, self._device):
            self._since = None
            return None
        if self._since is None or self._since[0] is not flight:
            self._since = flight, now
        return Waiting(flight.what(), now - self._since[1])
