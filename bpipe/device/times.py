"""Measure when a device ran a rank's computations, on the host's clock and without waiting for the device inside a step."""

from __future__ import annotations

import time
from array import array
from collections import deque

import torch

from bpipe.device import Event, has_come, timed_moment

__all__: list[str] = []


class DeviceTimes:
    """Timing events around the computations of one rank, on an asynchronous device.

    The device's clock is aligned with the host's once, here, which waits for both. Each step's first event is then measured
    from the previous step's, because the device counts in single precision: short spans stay exact to a microsecond.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = timed_moment(device)
        self._anchor.synchronize()
        self._anchor_ns = time.perf_counter_ns()
        self._events: list[Event] = []  # those of the present step: begin, end, begin, end ...
        self._finished: deque[tuple[list[Event], array[int]]] = deque()

    def start(self) -> None:
        """Start a step."""
        self._events = []

    def mark(self) -> None:
        """Mark where a computation of the step begins or ends, on the current stream."""
        self._events.append(timed_moment(self._device))

    def moment(self) -> Event:
        """Record an event on the current stream, to be given to `mark_pair`."""
        return timed_moment(self._device)

    def mark_pair(self, begin: Event) -> None:
        """Mark where two computations end that have run side by side since an event."""
        end = self.moment()
        self._events += [begin, end, begin, end]

    def finish(self, into: array[int]) -> None:
        """End a queued step: its marks go `into` an array, in nanoseconds of the host's clock, once the device has run it."""
        if self._events:
            self._finished.append((self._events, into))
        self._events = []
        self.resolve(wait=False)

    def resolve(self, *, wait: bool) -> None:
        """Read the times of the steps that the device has run or, with `wait`, of all steps. Blocks only with `wait`."""
        while self._finished and (wait or has_come(self._finished[0][0][-1], self._device)):
            events, into = self._finished.popleft()
            events[-1].synchronize()
            first_ns = self._anchor_ns + _ns(self._anchor, events[0])
            into.extend(first_ns + _ns(events[0], event) for event in events)
            self._anchor, self._anchor_ns = events[0], first_ns


def _ns(begin: Event, end: Event) -> int:
    milliseconds: float = begin.elapsed_time(end)
    return round(milliseconds * 1e6)
