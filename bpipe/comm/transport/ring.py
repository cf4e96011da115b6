"""Chunks of shared memory through which tensors pass from one process of a host to another: one copy in, one copy out."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from bpipe.memory.shared_file import NoSharedMemoryError, SharedFile

__all__: list[str] = []

CHUNK = 4 * 1024**2  # bytes: few enough to stay in the processor's cache, enough that a byte on the connection costs nothing
NUM_CHUNKS = 2  # one is filled while the other one is emptied
READY, EMPTIED, UNSHARED = b"\1", b"\2", b"\3"


class Ring:
    """One end of the chunks, which belong to one direction of a connection between two processes.

    The sender fills a chunk and sends a byte; the receiver empties it and sends a byte back. The memory is taken from the host
    with the first message. If there is none then, the sender sends another byte, and this message and all later ones go over the
    connection: so the receiver need not know beforehand.

    Args:
        file: the memory, which both ends map.
        connection: carries the bytes; nothing else may travel against the direction of the tensors.
        say_why: called with the reason if there is no memory.
    """

    def __init__(self, file: SharedFile, connection: socket.socket, say_why: Callable[[str], None]) -> None:
        self._file, self._connection, self._say_why = file, connection, say_why
        self._is_unshared = False
        self._chunks: list[np.ndarray] = []
        self._num_filled = self._num_emptied = 0  # as far as this end has to know

    @property
    def num_bytes(self) -> int:
        """The bytes that it takes from the host."""
        return self._file.num_bytes

    def push(self, parts: Iterable[memoryview]) -> bool:
        """Copy a message in, as the receiver makes room. Blocks until the receiver has copied all of it out.

        Returns:
            False if there is no memory: then the message must follow over the connection.

        Otherwise a connection might be closed that has bytes of the receiver's to read, and the kernel would then drop what the
        receiver has yet to read.

        Raises:
            OSError: the connection has ended.
        """
        if not self._can_push():
            self._connection.sendall(UNSHARED)
            return False
        for pieces in _in_chunks(parts):
            self._wait_until_waiting(NUM_CHUNKS - 1)
            chunk, start = self._next(), 0
            for piece in pieces:
                np.copyto(chunk[start : start + len(piece)], np.frombuffer(piece, np.uint8))
                start += len(piece)
            self._num_filled += 1
            self._connection.sendall(READY)
        self._wait_until_waiting(0)
        return True

    def _can_push(self) -> bool:
        """Take the memory if this end has not done so; return whether there is any."""
        if not self._chunks and not self._is_unshared:
            try:
                self._file.grow(NUM_CHUNKS * CHUNK)
                self._map()
            except NoSharedMemoryError as error:
                self._is_unshared = True
                self._say_why(error.why)
        return not self._is_unshared

    def _wait_until_waiting(self, number: int) -> None:
        """Wait until no more chunks than these are to be emptied."""
        while self._num_filled - self._num_emptied > number:
            self._hear(EMPTIED)
            self._num_emptied += 1

    def pull(self, parts: Iterable[memoryview]) -> bool:
        """Copy a message out, as it comes. Blocks.

        Returns:
            False if the message comes over the connection.

        Raises:
            NoSharedMemoryError: this process may not map the memory.
            OSError: the connection has ended.
        """
        is_first = True
        for pieces in _in_chunks(parts):
            if self._hear(READY, UNSHARED if is_first else READY) == UNSHARED:
                return False
            is_first = False
            if not self._chunks:
                self._map()
            chunk, start = self._next(), 0
            for piece in pieces:
                np.copyto(np.frombuffer(piece, np.uint8), chunk[start : start + len(piece)])
                start += len(piece)
            self._num_filled += 1
            self._connection.sendall(EMPTIED)
        return True

    def _map(self) -> None:
        self._chunks = np.split(self._file.map(0, NUM_CHUNKS * CHUNK), NUM_CHUNKS)

    def _next(self) -> np.ndarray:
        return self._chunks[self._num_filled % NUM_CHUNKS]

    def _hear(self, *expected: bytes) -> bytes:
        byte = self._connection.recv(1)
        if byte not in expected:
            raise ConnectionError(f"{byte!r} came in place of {expected[0]!r}" if byte else "it was closed")
        return byte


def _in_chunks(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the pieces of a message that go into each chunk; both ends cut alike."""
    pieces: list[memoryview] = []
    free = CHUNK
    for part in parts:
        while part:
            pieces.append(part[:free])
            free -= len(pieces[-1])
            part = part[len(pieces[-1]) :]
            if not free:
                yield pieces
                pieces, free = [], CHUNK
    if pieces:
        yield pieces
