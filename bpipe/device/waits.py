"""Measure how long a device waits for transfers. The host does not wait for these, so its clock does not show them."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch

from bpipe.device import Event, has_come, timed_moment
from bpipe.schedules import Op

__all__: list[str] = []


class _Wait(NamedTuple):
    op: Op
    begin: Event
    end: Event


class DeviceWaits:
    """The waits of the compute stream, each between two events that are read after they have completed, so the host never waits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._waits: list[_Wait] = []
        self._finished: deque[tuple[int, list[_Wait]]] = deque()
        self._latest: tuple[int, dict[Op, float]] = (-1, dict.fromkeys(Op, 0.0))

    def begin(self) -> Event:
        """Return an event that marks where the current stream begins to wait."""
        return timed_moment(self._device)

    def end(self, op: Op, begin: Event) -> None:
        """Record that the work queued since `begin` was a wait for an operation."""
        self._waits.append(_Wait(op, begin, timed_moment(self._device)))

    def _are_over(self, waits: list[_Wait]) -> bool:
        """Return whether waits are over: the last one decides, because they are all on one stream, in order."""
        return not waits or has_come(waits[-1].end, self._device)

    def finish(self, step: int) -> tuple[int, dict[Op, float]]:
        """End a step that was queued; return the latest step whose waits are over (-1: none yet), and its seconds by operation."""
        self._finished.append((step, self._waits))
        self._waits = []
        while self._finished and self._are_over(self._finished[0][1]):
            number, waits = self._finished.popleft()
            seconds = dict.fromkeys(Op, 0.0)
            for wait in waits:
                seconds[wait.op] += wait.begin.elapsed_time(wait.end) / 1e3
            self._latest = number, seconds
        return self._latest
