"""An acceptor's buffers in memory that the evictor maps too: the evictor copies its microbatches there and back by itself."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from bpipe.comm.transport.worker import Worker
from bpipe.comm.wire.message import memory_of
from bpipe.errors import TransferError
from bpipe.memory.shared_file import SharedFile
from bpipe.plan.action import PartKey
from bpipe.plan.reserved import Reserved

__all__: list[str] = []

HEAD = ALIGNED = 64  # bytes before the rooms, and before the data of each one: a room's head says what is in it
TAG = struct.Struct("=16s6q")  # whose, the number of the copy, the remote activation, its bytes, and that it is whole
TOTAL = struct.Struct("=q")  # at the beginning of the memory: the bytes of all rooms, for whoever does not make them


class Room(NamedTuple):
    """The place of a buffer in the memory, without its head: where it begins, and how many bytes it has."""

    begin: int
    size: int

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.begin + -(-self.size // ALIGNED) * ALIGNED


class Place(NamedTuple):
    """Where a remote activation is: the head of its buffer, uint8 [HEAD], and one chunk, uint8 [size], for each message."""

    head: np.ndarray
    chunks: list[np.ndarray]


class SharedBuffers:
    """Buffers for one evictor, as the plan reserves them. The acceptor and the evictor each have such an object of the same memory.

    They are rooms in one file, so that the number of open files does not grow with that of the microbatches. A room that is too
    small moves to the end of the file. They are arrays, not tensors, because they are not this process's own memory at the evictor.

    Args:
        reserved: which buffer holds which remote activation, and the size of each buffer.
        file: the memory; by default, new memory.
        in_bytes: whether sizes are bytes; if the plan counts slots, all buffers are made as large as the first remote activation.

    Raises:
        NoSharedMemoryError: it cannot be made.
    """

    def __init__(self, reserved: Reserved, file: SharedFile | None = None, *, in_bytes: bool) -> None:
        self._reserved, self._in_bytes = reserved, in_bytes
        self.file = SharedFile() if file is None else file
        self._is_over = False
        self._rooms: list[Room] = []  # by index
        self._mapped: list[np.ndarray] = []  # each with its head, by index

    @property
    def num_bytes(self) -> int:
        """The bytes of all buffers, free ones too, whoever has made them."""
        total = b"" if self._is_over else os.pread(self.file.descriptor, TOTAL.size, 0)
        return int(TOTAL.unpack(total)[0]) if len(total) == TOTAL.size else 0

    def reserve(self) -> None:
        """Take the memory of all buffers, which may take seconds, if their sizes are known.

        Raises:
            NoSharedMemoryError: there is not enough.
        """
        self.file.grow(HEAD)
        if self._in_bytes:
            self._make(self._reserved.sizes)

    def map(self) -> None:
        """Reach the memory, which the other process has reserved, if the sizes of its buffers are known.

        Raises:
            NoSharedMemoryError: this process may not map as much.
        """
        if self._in_bytes:
            self._reach(self._reserved.sizes)

    def take(self, remote: PartKey, sizes: Sequence[int]) -> Place:
        """Assign a buffer to a remote activation of these bytes.

        Raises:
            NoSharedMemoryError: the buffer is too small, and there is no memory for a larger one.
        """
        index, total = self._reserved.buffer_of[remote], sum(sizes)
        if not self._mapped:
            self._reach([total] * len(self._reserved.sizes))
        if self._rooms[index].size < total:
            self._move(index, total)
        room = self._mapped[index]
        return Place(room[:HEAD], np.split(room[HEAD : HEAD + total], np.cumsum(sizes)[:-1]) if sizes else [])

    def _make(self, sizes: Sequence[int]) -> None:
        begin = HEAD
        for size in sizes:
            self._rooms.append(Room(begin + HEAD, size))
            begin = self._rooms[-1].end
        self.file.grow(begin)
        self._count()

    def _reach(self, sizes: Sequence[int]) -> None:
        if not self._rooms:
            self._make(sizes)
        whole = self.file.map()
        self._mapped = [whole[room.begin - HEAD : room.end] for room in self._rooms]

    def _move(self, index: int, size: int) -> None:
        """Give a buffer more memory, in a place behind all others. Nothing is in it, and no copy from it is under way."""
        old, begin = self._rooms[index], self.file.num_bytes
        new = Room(begin + HEAD, size)
        self.file.grow(new.end)
        self._mapped[index] = self.file.map(begin, new.end)
        self._rooms[index] = new
        self.file.free(old.begin - HEAD, HEAD + old.size)
        self._count()

    def _count(self) -> None:
        os.pwrite(self.file.descriptor, TOTAL.pack(sum(room.size for room in self._rooms)), 0)

    def clear(self) -> None:
        """Free the memory, unless the other process still has it."""
        self._is_over = True
        self.file.close()
        self._mapped = []


class PeerMemory:
    """A store in the memory of another process of this host, which does nothing for what is kept there.

    A buffer's head names this object by a random number, and the copy by its own one, so that what an earlier step or another
    pipeline left there is not taken for what is loaded. What the bytes behind the head are is not looked at.

    Args:
        buffers: the memory.
        name: the other rank's, for messages.
    """

    def __init__(self, buffers: SharedBuffers, name: str) -> None:
        self._buffers, self._name = buffers, name
        self._worker = Worker("bpipe-evict")
        self._tag = os.urandom(16)
        self._num_stored = 0
        self._kept: dict[PartKey, tuple[Place, bytes]] = {}  # with the head that it must have
        self.host_bytes = 0  # the other process counts them

    def put(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copying:
        """Copy messages, uint8 [size] each, to the other process."""
        return Copying(self._worker.submit(partial(self._copy_in, remote, messages)), messages)

    def get(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Copying:
        """Copy what was stored back into messages, uint8 [size] each."""
        return Copying(self._worker.submit(partial(self._copy_out, remote, messages)), messages)

    def _copy_in(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> None:
        sizes = [message.numel() for message in messages]
        place, head = self._buffers.take(remote, sizes), TAG.pack(self._tag, self._num_stored, *remote, sum(sizes), 1)
        self._kept[remote] = place, head
        self._num_stored += 1
        place.head[:] = 0  # until all of it is there
        for message, chunk in zip(messages, place.chunks, strict=True):
            np.copyto(chunk, _array(message))
        place.head[:] = np.frombuffer(head, np.uint8)

    def _copy_out(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> None:
        place, head = self._kept.pop(remote)
        if place.head.tobytes() != head:
            stage, microbatch, _ = remote
            raise TransferError(
                f"the memory of {self._name} no longer has what this rank has stored there of microbatch {microbatch} of stage "
                f"{stage}: something else has written to it"
            )
        for message, chunk in zip(messages, place.chunks, strict=True):
            np.copyto(_array(message), chunk)

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
            NoSharedMemoryError: there is no memory for what is to be stored.
        """
        self._future.result()
        self._tensors = ()

    def has_come(self) -> bool:
        return self._future.done()


def _array(tensor: torch.Tensor) -> np.ndarray:
    """Return the memory of a tensor as an array; `Tensor.numpy` would prevent its storage from being freed."""
    return np.frombuffer(memory_of(tensor), np.uint8) if tensor.numel() else np.empty(0, np.uint8)
