"""The transfers in flight on a rank, the tensors that they carry, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container
from typing import TypeVar

import torch

from bpipe.comm.transport.base import Transport
from bpipe.device.waits import DeviceWaits
from bpipe.engine.microbatch_state import MicrobatchState, MicrobatchStates
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
        stages: the stages on this rank.
        device_waits: records on which streams the device waits, if the host does not.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        step: int,
        microbatches: MicrobatchStates,
        stages: Container[int] = (),
        device_waits: DeviceWaits | None = None,
    ) -> None:
        self.transport, self.rank, self.step, self.microbatches = transport, rank, step, microbatches
        self.stages, self._device_waits = stages, device_waits
        self.waited_s: dict[Op, float] = defaultdict(float)

    def wait(self, state: MicrobatchState, completion: Action) -> bytes | None:
        """Wait for the transfer that an action completes, and release its tensors; return the note that came with it, if any."""
        transfers, start = state.transfers, (START_OF[completion.op], completion.part)
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

    def result_of(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """Return the tensors that a forward has just made for the next stage."""
        own, behind = self.microbatches.get((stage, microbatch)), self.microbatches.get((stage + 1, microbatch))
        message = None if own is None else own.output
        if message is None and behind is not None:
            message = behind.input
        return [] if message is None else [tensor for tensor in message.tensors if tensor is not None]
