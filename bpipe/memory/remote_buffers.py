"""The acceptor's buffers: memory for the microbatches of one evictor, reserved once and reused."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.device import check_fits
from bpipe.plan.action import PartKey
from bpipe.plan.reserved import Reserved

__all__: list[str] = []


class RemoteBuffers:
    """Buffers for one evictor, as the plan reserves them.

    They are allocated together, at the first arrival or before, and touched once, because fresh pages cost more than the transfer;
    a buffer grows if a remote activation is larger than planned.

    Args:
        in_bytes: whether sizes are bytes; if the plan counts slots, all buffers are made as large as the first remote
            activation.
    """

    def __init__(self, reserved: Reserved, device: torch.device, *, in_bytes: bool) -> None:
        self._reserved, self._device, self._in_bytes = reserved, device, in_bytes
        self._buffers = [self._new(0) for _ in reserved.sizes]

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, free ones too."""
        return sum(buffer.numel() for buffer in self._buffers)

    def take(self, remote: PartKey, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Assign a buffer to a remote activation and return its chunks, uint8 [size] each."""
        index, total = self._reserved.buffer_of[remote], sum(sizes)
        if not self.num_bytes:
            self._make(total)
        self._grow(index, total)
        return list(self._buffers[index][:total].split(list(sizes))) if sizes else []

    def make(self) -> None:
        """Allocate the buffers now if their sizes are known: within a step, an allocation may make the host wait for the device."""
        if self._in_bytes:
            self._make(0)

    def _make(self, remote_buffer_bytes: int) -> None:
        for index, planned in enumerate(self._reserved.sizes):
            self._grow(index, planned if self._in_bytes else remote_buffer_bytes)

    def _grow(self, index: int, num_bytes: int) -> None:
        if self._buffers[index].numel() < num_bytes:
            check_fits(num_bytes, self._device, "a remote activation")
            old, self._buffers[index] = self._buffers[index], self._new(0)
            self._give_back([old])  # before the new one is allocated, so that the two never exist together
            del old  # otherwise this frame would still own it
            self._buffers[index] = self._new(num_bytes).fill_(0)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _give_back(self, memory: list[torch.Tensor]) -> None:
        """Free memory. Later work on this thread's stream may reuse it."""
        memory.clear()

    def clear(self) -> None:
        """Free the memory of all buffers."""
        old, self._buffers = self._buffers, [self._new(0) for _ in self._buffers]
        self._give_back(old)
