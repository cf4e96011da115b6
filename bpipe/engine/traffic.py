"""The transfers under way on a rank, the tensors they carry, and the time spent waiting for them."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TypeVar

import torch

from bpipe.comm.transport.base import Transfer, Transport
from bpipe.comm.wire.header import Subject
from bpipe.comm.wire.message import Layout
from bpipe.device.waits import DeviceWaits
from bpipe.plan.action import START_OF
from bpipe.schedules import Action, Channel, Op

__all__: list[str] = []

Place = tuple[Op, int, int]  # an operation on a microbatch of a stage
Started = tuple[Op, int, int, int]  # a transfer, and the part that it moves
Mail = tuple[Layout, list[torch.Tensor | None]]  # a message's layout and tensors

T = TypeVar("T")


def versions_of(tensors: Iterable[torch.Tensor | None]) -> list[tuple[torch.Tensor, int]]:
    """Return the tensors that can tell whether they were changed, with their versions."""
    return [(tensor, tensor._version) for tensor in tensors if tensor is not None and not tensor.is_inference()]


class Traffic:
    """One rank's transfers during one step.

    Args:
        transport: posts and waits.
        rank: this rank in the plan.
        step: the number of the step.
        stages: those on this rank.
        device_waits: on which streams wait, where the host does not.
    """

    def __init__(
        self,
        transport: Transport,
        rank: int,
        step: int,
        stages: Container[int] = (),
        device_waits: DeviceWaits | None = None,
    ) -> None:
        self.transport, self.rank, self.step = transport, rank, step
        self._stages, self._device_waits = stages, device_waits
        self.arrived: dict[Place, Mail] = {}  # for a forward or backward that is about to run
        self.outgoing: dict[Place, Mail] = {}  # for a send that is about to be posted
        self.versions: dict[Place, list[tuple[torch.Tensor, int]]] = {}  # of those, where other computations may run before it is
        self.waited_s: dict[Op, float] = defaultdict(float)
        self._under_way: dict[Started, tuple[Transfer, Sequence[torch.Tensor]]] = {}

    def channel(self, action: Action) -> Channel:
        return action.channel(self.rank)

    def subject(self, stage: int, microbatch: int) -> Subject:
        """Return what a header of this step is about."""
        return Subject(self.step, stage, microbatch)

    def posted(self, action: Action, transfer: Transfer, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Remember a transfer, and tensors that it sends from where they lie."""
        self._under_way[action[:4]] = (transfer, tensors)

    def wait(self, completion: Action) -> bytes | None:
        """Wait for the transfer that an action completes, and let go of its tensors; return the note that came with it, if any."""
        start = (START_OF[completion.op], *completion[1:4])
        waits = self._device_waits
        begin = None if waits is None else waits.begin()
        note = self.timed(completion.op, self._under_way[start][0].wait)
        if waits is not None:
            waits.end(completion.op, begin)
        del self._under_way[start]  # not before: the transfer reads its tensors where they lie
        return note

    def timed(self, op: Op, call: Callable[[], T]) -> T:
        """Make a call that may block, and count its seconds for an operation."""
        start = time.perf_counter()
        result = call()
        self.waited_s[op] += time.perf_counter() - start
        return result

    def is_own(self, stage: int) -> bool:
        """Return whether a stage is on this rank."""
        return stage in self._stages

    def result_of(self, stage: int, microbatch: int) -> list[torch.Tensor]:
        """Return the tensors that a forward has just left for the next stage."""
        mail = self.outgoing.get((Op.SEND_F, stage, microbatch)) or self.arrived.get((Op.F, stage + 1, microbatch))
        return [] if mail is None else [tensor for tensor in mail[1] if tensor is not None]

    def holds(self) -> Iterator[torch.Tensor]:
        """Yield the tensors between stages that the pipeline itself holds now."""
        for _, tensors in (*self.outgoing.values(), *self.arrived.values()):
            yield from (tensor for tensor in tensors if tensor is not None)
        for _, sent in self._under_way.values():
            yield from sent
