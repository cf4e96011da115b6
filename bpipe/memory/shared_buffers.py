"""An acceptor's buffers in memory that the evictor maps too: the evictor copies its microbatches there and back by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from bpipe.comm.transport.worker import Worker
from bpipe.comm.wire.message import memory_of
from bpipe.errors import TransferError
from bpipe.memory.shared_file import Lent, SharedFile
from bpipe.plan.action import PartKey
from bpipe.plan.reserved import Reserved

__all__: list[str] = []

HEAD = 64  # bytes before a buffer's data: which remote activation it has


class Place(NamedTuple):
    """Where a remote activation is: the head of its buffer, uint8 [HEAD], and one chunk, uint8 [size], for each message."""

    head: np.ndarray
    chunks: list[np.ndarray]


class SharedBuffers:
    """Buffers for one evictor, as the plan reserves them. The acceptor and the evictor each have such an object of the same memory.

    Both may make them larger. They are arrays, not tensors, because they are not this process's own memory at the evictor.

    Args:
        reserved: which buffer holds which remote activation, and the size of each buffer.
        in_bytes: whether sizes are bytes; if the plan counts slots, all buffers are made as large as the first remote activation.
        files: the memory of each buffer; by default, new memory.
    """

    def __init__(self, reserved: Reserved, files: Sequence[SharedFile] | None = None, *, in_bytes: bool) -> None:
        self._reserved, self._in_bytes = reserved, in_bytes
        self.files = [SharedFile() for _ in reserved.sizes] if files is None else list(files)
        self._mapped: dict[int, np.ndarray] = {}  # by index

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, free ones too."""
        return sum(max(0, file.num_bytes - HEAD) for file in self.files)

    @contextmanager
    def offered(self) -> Iterator[list[Lent]]:
        """Open a context to pass the memory on to the evictor in; then take it, which may take seconds, if the sizes are known."""
        yield [Lent(file.descriptor) for file in self.files]
        if self._in_bytes:
            self._grow(self._reserved.sizes)

    def take(self, remote: PartKey, sizes: Sequence[int]) -> Place:
        """Assign a buffer to a remote activation of these bytes."""
        index, total = self._reserved.buffer_of[remote], sum(sizes)
        if not self.num_bytes:
            self._grow([total] * len(self.files))
        buffer = self._map(index, HEAD + total)
        return Place(buffer[:HEAD], np.split(buffer[HEAD : HEAD + total], np.cumsum(sizes)[:-1]) if sizes else [])

    def _grow(self, sizes: Sequence[int]) -> None:
        for file, size in zip(self.files, sizes):
            file.grow(HEAD + size)

    def _map(self, index: int, num_bytes: int) -> np.ndarray:
        if index not in self._mapped or len(self._mapped[index]) < num_bytes:
            self.files[index].grow(num_bytes)
            self._mapped[index] = self.files[index].map()
        return self._mapped[index]

    def clear(self) -> None:
        """Free the memory, unless the other process still has it."""
        self.files = []
        self._mapped.clear()


class PeerMemory:
    """The microbatches that this rank keeps in the memory of another process of its host, which does nothing for them.

    Args:
        buffers: the memory.
        name: the other rank's, for messages.
    """

    def __init__(self, buffers: SharedBuffers, name: str) -> None:
        self._buffers, self._name = buffers, name
        self._worker = Worker("bpipe-evict")
        self._kept: dict[PartKey, Place] = {}

    def store(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copying:
        """Copy messages, uint8 [size] each, to the other process."""
        place = self._kept[remote] = self._buffers.take(remote, [message.numel() for message in messages])
        return Copying(self._worker.submit(partial(_copy_in, remote, messages, place)), messages)

    def fetch(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copying:
        """Copy what was stored back into messages, uint8 [size] each."""
        return Copying(self._worker.submit(partial(_copy_out, remote, self._kept.pop(remote), messages, self._name)), messages)

    def clear(self) -> None:
        """Give the memory back, once the copies under way have ended."""
        self._worker.join()
        self._kept.clear()
        self._buffers.clear()


class Copying:
    """A copy that a thread makes. It keeps the tensors until it is waited for, as the plan assumes."""

    def __init__(self, future: Future[None], tensors: Sequence[torch.Tensor]) -> None:
        self._future, self._tensors = future, tensors

    def wait(self) -> None:
        """Wait until the copy has ended.

        Raises:
            TransferError: what is to be loaded is no longer there.
        """
        self._future.result()
        self._tensors = ()


def _copy_in(remote: PartKey, messages: Sequence[torch.Tensor], place: Place) -> None:
    place.head[:] = 0  # until all of it is there
    for message, chunk in zip(messages, place.chunks, strict=True):
        np.copyto(chunk, _array(message))
    place.head[:] = _head_of(remote)


def _copy_out(remote: PartKey, place: Place, messages: Sequence[torch.Tensor], name: str) -> None:
    if not np.array_equal(place.head, _head_of(remote)):
        stage, microbatch, _ = remote
        raise TransferError(
            f"the memory of {name} no longer has what this rank has stored there of microbatch {microbatch} of stage {stage}: "
            "something else has written to it"
        )
    for message, chunk in zip(messages, place.chunks, strict=True):
        np.copyto(_array(message), chunk)


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as an array; `Tensor.numpy` would prevent its storage from being freed."""
    return np.frombuffer(memory_of(tensor), np.uint8) if tensor.numel() else np.empty(0, np.uint8)


def _head_of(remote: PartKey) -> np.ndarray:
    head = np.zeros(HEAD // 8, np.int64)
    head[: 1 + len(remote)] = 1, *remote
    return head.view(np.uint8)
