"""Store evicted microbatches in the host's memory: pinned, and copied to and from on a stream of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.device import Stream
from bpipe.device.pinned import pinned, return_
from bpipe.memory.remote_buffers import RemoteBuffers
from bpipe.memory.side_copies import Copied, copy_beside
from bpipe.plan.action import PartKey
from bpipe.plan.reserved import Reserved

__all__: list[str] = []


class HostBuffers:
    """A store in the rank's host's memory; the buffers stay for the next step.

    On CPU the device's memory is the host's: copies are synchronous and save no memory, and serve only for tests.
    """

    def __init__(self, reserved: Reserved, device: torch.device, stream: Stream | None, *, in_bytes: bool) -> None:
        self._device, self._stream = device, stream
        self._buffers = (
            RemoteBuffers(reserved, device, in_bytes=in_bytes)
            if stream is None
            else _PinnedBuffers(reserved, device, stream, in_bytes=in_bytes)
        )
        self._kept: dict[PartKey, list[torch.Tensor]] = {}

    @property
    def host_bytes(self) -> int:
        """The bytes of all buffers."""
        return self._buffers.num_bytes

    def make(self) -> None:
        """Make the buffers now, if their sizes are known."""
        self._buffers.make()

    def put(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copied:
        """Copy messages, uint8 [size] each, to the host."""
        kept = self._kept[remote] = self._buffers.take(remote, [message.numel() for message in messages])
        return self._copy(messages, kept)

    def get(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copied:
        """Copy a remote activation's stored bytes back into messages, uint8 [size] each."""
        return self._copy(self._kept.pop(remote), messages)

    def _copy(self, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> Copied:
        return copy_beside(sources, targets, self._stream, self._device)

    def clear(self) -> None:
        """Free all memory once the copies in flight have ended. Does not block."""
        self._buffers.clear()
        self._kept.clear()


class _PinnedBuffers(RemoteBuffers):
    """Buffers in pinned memory, which the host must not free while a copy is in flight."""

    def __init__(self, reserved: Reserved, device: torch.device, stream: Stream, *, in_bytes: bool) -> None:
        self._stream = stream
        super().__init__(reserved, device, in_bytes=in_bytes)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return pinned(num_bytes, self._device)

    def _give_back(self, memory: list[torch.Tensor]) -> None:
        return_(memory, self._stream)
