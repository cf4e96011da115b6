"""The transfers in flight on a rank, the tensors that they carry, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

from bpipe.comm.transport.base import Transport
from bpipe.device.waits import DeviceWaits
from bpipe.engine.microbatch_state import MicrobatchStates, Transfers
from bpipe.plan.action import START_OF
from bpipe.schedules import Action, Op

__all__: list[str] = []

T = TypeVar("T")


class Traffic:
    """One rank's transfers during one step.

    Args:
        transport: posts and waits.
        rank: this rank in the plan.
        step: the number of the step.
        microbatches: the states of the microbatches whose transfers these are.
        device_waits: records on which streams the device waits, if the host does not.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        step: int,
        microbatches: MicrobatchStates,
        device_waits: DeviceWaits | None = None,
    ) -> None:
        self.transport, self.rank, self.step, self.microbatches = transport, rank, step, microbatches
        self._device_waits = device_waits
        self.waited_s: dict[Op, float] = defaultdict(float)

    def wait(self, transfers: Transfers, completion: Action) -> bytes | None:
        """Wait for the transfer that an action completes, and release its tensors; return the note that came with it, if any."""
        start = START_OF[completion.op], completion.part
        waits = self._device_waits
        begin = None if waits is None else waits.begin()
        note = self.timed(completion.op, transfers[start].transfer.wait)
        if waits is not None:
            waits.end(completion.op, begin)
        del transfers[start]  # not earlier: the transfer reads its tensors in place
        return note

    def timed(self, op: Op, call: Callable[[], T]) -> T:
        """Make a call that may block, and add its seconds to an operation's waiting time."""
        start = time.perf_counter()
        result = call()
        self.waited_s[op] += time.perf_counter() - start
        return result
