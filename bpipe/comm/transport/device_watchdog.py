"""A watchdog for devices that wait too long in a transfer. The host does not wait there, and would not notice."""

from __future__ import annotations

from collections.abc import Callable

from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.watchdog import Timeouts
from bpipe.comm.transport.in_flight import InFlight
from bpipe.logs import LOG

__all__: list[str] = []


class DeviceWatchdog:
    """A watchdog over the transfers of one rank. All of it runs in the control thread.

    The time counts from when this rank's device has reached a transfer and all before it are over. From then on it waits for the
    device of another rank, which computes for that long, or has stopped.

    Args:
        rank: its rank in the pipeline's group.
        in_flight: its transfers.
        timeouts: how long a transfer may wait.
        fail: breaks the pipeline on all ranks, and so ends their transfers.
        step: returns the number of the step that the host is at.
        is_shown: returns whether the host itself waits, and so warns, or has warned in this step, because one warning is enough.
    """

    def __init__(
        self,
        rank: int,
        in_flight: InFlight,
        timeouts: Timeouts,
        fail: Callable[[Failure], None],
        step: Callable[[], int],
        is_shown: Callable[[], bool],
    ) -> None:
        self._rank, self._in_flight, self._timeouts, self._fail = rank, in_flight, timeouts, fail
        self._step, self._is_shown = step, is_shown
        self._warned_of, self._is_over = "", False

    def tick(self, now: float) -> None:
        """Check how long the device has waited, and warn or fail if that is too long."""
        try:
            waiting = None if self._is_over else self._in_flight.first(now)
        except RuntimeError:  # the computing thread gets a device's error; no query is allowed while a graph is captured
            return
        if waiting is None or waiting.seconds < min(self._timeouts):
            return
        text = f"the device of rank {self._rank} has waited {waiting.seconds:.1f} s for the other end of {waiting.what}"
        if waiting.seconds >= self._timeouts.timeout_s:
            text += f": longer than timeout_s={self._timeouts.timeout_s:g}"
            LOG.error("%s", text)  # a thread that waits for the device has no other way to learn of it before the next step
            self._is_over = True
            self._fail(Failure(Cause.TIMED_OUT, self._rank, self._step(), "", text))
        elif waiting.what != self._warned_of and not self._is_shown():
            self._warned_of = waiting.what
            LOG.warning("%s", text)
