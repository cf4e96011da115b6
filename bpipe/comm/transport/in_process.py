"""Channels between ranks that share a process and a thread.

Nothing here blocks, because the caller runs the ranks' actions in an order that does each thing before an action waits for it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import Meanwhile, NullControlPlane
from bpipe.comm.transport.base import Transfer, Transport
from bpipe.device import Event, Streams, current_stream, is_asynchronous, on_stream, reached
from bpipe.errors import CommError
from bpipe.schedules import Channel

__all__: list[str] = []


class _Posted:
    """One end of a copy, which is done once the other end has been posted too."""

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        device: torch.device | None,
        note: bytes | None = None,
        *,
        may_have_note: bool = False,
    ) -> None:
        self.tensors: Sequence[torch.Tensor] = tensors
        self.note, self.may_have_note = note, may_have_note
        self._device = device if tensors else None
        self.ready = None if self._device is None else reached(self._device)
        self.copied: Event | None = None
        self.is_done = False

    def wait(self) -> bytes | None:
        if not self.is_done:
            raise CommError("a loopback transfer is waited for before its other end was posted; drive schedules with Loopback.step")
        if self.copied is not None and self._device is not None:
            current_stream(self._device).wait_event(self.copied)
        self.tensors = ()
        return self.note

    def has_come(self) -> bool:
        return self.is_done


class Wires:
    """The queues of all channels of one pipeline in a loopback."""

    def __init__(self) -> None:
        self.headers: dict[Channel, deque[bytes]] = defaultdict(deque)
        self._sends: dict[Channel, deque[_Posted]] = defaultdict(deque)
        self._receives: dict[Channel, deque[_Posted]] = defaultdict(deque)
        self.streams = Streams()  # of all ranks

    def clear(self) -> None:
        """Forget what a failed step left behind."""
        self.headers.clear()
        self._sends.clear()
        self._receives.clear()

    def post(self, channel: Channel, posted: _Posted, *, sends: bool) -> _Posted:
        (self._sends if sends else self._receives)[channel].append(posted)
        while self._sends[channel] and self._receives[channel]:
            self._copy(channel, self._sends[channel].popleft(), self._receives[channel].popleft())
        return posted

    def _copy(self, channel: Channel, sent: _Posted, received: _Posted) -> None:
        if sent.may_have_note != received.may_have_note or (sent.note is not None and not sent.may_have_note):
            raise CommError(f"{channel}: the two ends do not agree whether a message may come with a note")
        kinds = [[(tensor.dtype, tensor.numel()) for tensor in end.tensors] for end in (sent, received)]
        if kinds[0] != kinds[1]:
            sizes = [[tensor.nbytes for tensor in end.tensors] for end in (sent, received)]
            raise CommError(f"{channel}: messages of {sizes[0]} bytes were sent and {sizes[1]} received: {kinds[0]} and {kinds[1]}")
        if received.ready is None or sent.ready is None:
            self._copy_tensors(sent, received)
        else:
            stream: Any = self.streams.of(channel, received.tensors[0].device)
            with on_stream(stream):
                stream.wait_event(sent.ready)
                stream.wait_event(received.ready)
                self._copy_tensors(sent, received)
                sent.copied = received.copied = stream.record_event()
        received.note = sent.note
        sent.is_done = received.is_done = True

    @staticmethod
    def _copy_tensors(sent: _Posted, received: _Posted) -> None:
        for target, source in zip(received.tensors, sent.tensors):
            target.copy_(source, non_blocking=True)


class LoopbackTransport(Transport):
    """One rank's end of a loopback."""

    def __init__(self, wires: Wires, device: torch.device) -> None:
        self.device = device
        self.control = NullControlPlane()
        self._wires, self.streams = wires, wires.streams
        self._waits_for = device if is_asynchronous(device) else None  # whose streams a copy waits for

    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        raise CommError("the ranks of a loopback agree inside Loopback.step")

    def refuse(self, why: str) -> None:
        """Do nothing, because no thread waits: the error itself reaches the caller that drives the loopback."""

    def enlist(self) -> None:
        """Do nothing, because the caller that drives a loopback names its schedules, so that none can be mistaken for another."""

    def connect(self, channels: Sequence[Channel], group_ranks: Sequence[int], *, are_sized: bool = False) -> None:
        """Do nothing, because there is nothing to open."""

    def send(
        self,
        channel: Channel,
        tensors: Sequence[torch.Tensor],
        header: bytes | None = None,
        note: bytes | None = None,
        *,
        may_have_note: bool = False,
    ) -> Transfer:
        if header is not None:
            self._wires.headers[channel].append(header)
        return self._wires.post(channel, _Posted(tensors, self._waits_for, note, may_have_note=may_have_note), sends=True)

    def receive(self, channel: Channel, tensors: Sequence[torch.Tensor], *, may_have_note: bool = False) -> Transfer:
        return self._wires.post(channel, _Posted(tensors, self._waits_for, may_have_note=may_have_note), sends=False)

    def receive_header(self, channel: Channel) -> bytes:
        return self._wires.headers[channel].popleft()

    def settle(self, most_s: float) -> None:
        """Do nothing, because no other threads queue work."""

    def close(self) -> None:
        """Forget what a step that failed has left under way: no rank goes on without this one."""
        self._wires.clear()
