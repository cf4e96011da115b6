"""The host's memory as a place for evicted microbatches: pinned, and filled and emptied on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from bpipe.memory.guests import Rooms
from bpipe.schedules.rooms import Guest, Reserved

__all__: list[str] = []


class HostRooms:
    """What one rank keeps in its host's memory; the rooms stay for the next step.

    On CPU the device's memory is the host's: a copy is made when it is asked for, and nothing is gained but the test of it.

    Args:
        reserved: the rooms, as `Rooms` takes them.
        device: where the microbatches come from.
        in_bytes: likewise.
    """

    def __init__(self, reserved: Reserved, device: torch.device, *, in_bytes: bool) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._rooms = Rooms(reserved, torch.device("cpu"), in_bytes=in_bytes, is_pinned=device.type == "cuda")
        self._kept: dict[Guest, list[torch.Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all rooms."""
        return self._rooms.num_bytes

    def store(self, guest: Guest, messages: Sequence[torch.Tensor]) -> HostCopy:
        """Copy messages, uint8 [size] each, to the host."""
        kept = self._kept[guest] = self._rooms.take(guest, [message.numel() for message in messages])
        return self._copy(messages, kept)

    def fetch(self, guest: Guest, messages: Sequence[torch.Tensor]) -> HostCopy:
        """Copy what was stored back."""
        return self._copy(self._kept.pop(guest), messages)

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> HostCopy:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            for source, target in zip(sources, targets):
                target.copy_(source, non_blocking=True)
            event = None if self._stream is None else self._stream.record_event()
        return HostCopy(event, self._device, [*sources, *targets])

    def clear(self) -> None:
        """Give all memory back, once what is under way has ended."""
        if self._stream is not None:
            self._stream.synchronize()
        self._rooms.clear()
        self._kept.clear()


class HostCopy:
    """A copy to or from the host: the current stream waits for it, the host does not."""

    def __init__(self, event: torch.cuda.Event | None, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        self._event, self._device = event, device
        self._tensors: Sequence[torch.Tensor] = tensors

    def wait(self) -> None:
        """Return once what comes after may use what was copied, or free what it was copied from."""
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        self._tensors = ()
