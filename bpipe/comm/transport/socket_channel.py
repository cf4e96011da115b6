"""A connection for one channel, which carries what is small: headers, and tensors that are copied faster than a thread is woken.

Between processes of one host, it carries large tensors too, through memory that both share.

Each message is preceded by its length, whose highest bit says that a note follows, with its own length. The sender hands the
message to the kernel and goes on; the receiver reads it when it waits for it, in the thread that waits. What the kernel has no
room for is sent by a separate thread, so that no send ever blocks.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

import torch

from bpipe.comm.transport.base import Transfer
from bpipe.comm.transport.ring import Ring
from bpipe.comm.transport.worker import Worker
from bpipe.comm.wire.message import memory_of
from bpipe.device import check_fits
from bpipe.device.huge_pages import prefer_huge_pages
from bpipe.errors import CommError, TransferError

__all__: list[str] = []

SMALL = 256 * 1024  # bytes: messages up to this size are sent here
LENGTH = struct.Struct("<Q")
NOTED = 1 << 63  # in a message's length: a note follows
MOST_NOTE_BYTES = 2**40
MOST_AHEAD = 2**24  # bytes of memory that are made before they come
MOST_PARTS = 512  # of one system call
_EMPTY = memoryview(LENGTH.pack(0))  # a message of no tensors


class SocketChannel:
    """One end of a channel's connection.

    Args:
        connection: a blocking connection to the other end.
        name: the channel's name, for messages.
        ring: passes large messages on, between processes of one host.
    """

    def __init__(self, connection: socket.socket, name: str, ring: Ring | None = None) -> None:
        self._connection, self._name, self._ring = connection, name, ring
        self._worker: Worker | None = None
        self._latest: Future[None] | None = None  # of its jobs

    @property
    def has_ring(self) -> bool:
        """Whether large messages may travel here as well."""
        return self._ring is not None

    @property
    def num_bytes(self) -> int:
        """The bytes of the host's memory that it takes."""
        return 0 if self._ring is None else self._ring.num_bytes

    def _through_ring(self, parts: list[memoryview]) -> Ring | None:
        """Return what a message travels through, if not through the connection itself; both ends decide alike."""
        return self._ring if self._ring is not None and sum(map(len, parts)) > SMALL else None

    def _submit(self, job: Callable[[], None]) -> Future[None]:
        self._worker = self._worker or Worker("bpipe-channel")
        self._latest = self._worker.submit(job)
        return self._latest

    def end(self) -> None:
        """End all waits at both ends. Any thread may call it."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. What the kernel has already taken still arrives."""
        if self._latest is not None and not self._latest.done():
            self.end()  # which wakes the thread
        if self._worker is not None:
            self._worker.join()
        self._connection.close()

    def _lost(self, why: object) -> TransferError:
        return TransferError(f"a transfer failed: the connection of {self._name} ended ({why})")


class Sender(SocketChannel):
    """The sender's end."""

    def __init__(self, connection: socket.socket, name: str, ring: Ring | None = None) -> None:
        super().__init__(connection, name, ring)
        self._late: Future[None] | None = None

    def send(self, header: bytes | None, tensors: Sequence[torch.Tensor] | None, note: bytes | None = None) -> Transfer:
        """Send a header, or tensors as one message, maybe with a note, or both. Returns at once."""
        parts = [] if header is None else _message([memoryview(header)])
        if tensors is None:
            return _Sent(self._post(parts, None), None)
        body = [memory_of(tensor) for tensor in tensors]
        length, *rest = _message(body, note)
        if (ring := self._through_ring(body)) is not None:
            self._late = self._submit(partial(self._push_through, ring, [*parts, length], body, rest[len(body) :], tensors))
            return _Sent(self._late, tensors)
        return _Sent(self._post([*parts, length, *rest], tensors), tensors)

    def send_empty(self) -> Transfer | None:
        """Send a message without tensors. Returns at once, and nearly always None, which means that all of it has left."""
        rest = self._post([_EMPTY], None)
        return None if rest is None else _Sent(rest, None)

    def _post(self, parts: list[memoryview], owners: object) -> Future[None] | None:
        """Send what the connection takes at once, and the rest, if there is any, from a thread."""
        if self._late is None or self._late.done():
            if self._late is not None:
                self._late.result()  # nothing may follow a message that was not sent
            parts = self._pushed(parts, socket.MSG_DONTWAIT)
        if not parts:
            return None
        self._late = self._submit(partial(self._push_late, parts, owners))
        return self._late

    def _push_late(self, parts: list[memoryview], owners: object) -> None:
        """Send all parts; the owners of their memory stay alive until then."""
        self._pushed(parts, 0)

    def _push_through(
        self, ring: Ring, before: list[memoryview], body: list[memoryview], behind: list[memoryview], owners: object
    ) -> None:
        """Send the body of a message through shared memory, if there is any, and the rest over the connection."""
        self._pushed(before, 0)
        try:
            is_through = ring.push(body)
        except OSError as error:
            self.end()
            raise self._lost(error) from error
        self._pushed(behind if is_through else [*body, *behind], 0)

    def _pushed(self, parts: list[memoryview], flags: int) -> list[memoryview]:
        """Send as much as the connection takes; return the rest."""
        try:
            while parts:
                parts = _behind(parts, self._connection.sendmsg(parts[:MOST_PARTS], (), flags))
        except BlockingIOError:
            pass
        except OSError as error:
            self.end()  # a part may have left
            raise self._lost(error) from error
        return parts


class Receiver(SocketChannel):
    """The receiver's end. Only one thread at a time may use it."""

    def __init__(self, connection: socket.socket, name: str, ring: Ring | None = None) -> None:
        super().__init__(connection, name, ring)
        self._posted: deque[_Receipt] = deque()  # those that no other thread reads
        self._ahead: Future[None] | None = None  # of the last one that another thread reads
        self._error: CommError | None = None  # after it, the start of the next message is unknown

    def receive(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Post a receive of one message into contiguous tensors. Messages arrive in posting order, whichever is waited for."""
        receipt = _Receipt(self, tensors)
        self._posted.append(receipt)
        if self._through_ring([memory_of(tensor) for tensor in tensors]) is not None:
            for tensor in tensors:
                prefer_huge_pages(tensor)
            self._read_ahead()
        return receipt

    def _read_ahead(self) -> None:
        """Let a thread read all that was posted, so that large tensors arrive while this thread computes."""
        for receipt in self._posted:
            receipt.ahead = self._ahead = self._submit(partial(self._read_into, receipt))
        self._posted.clear()

    def read_header(self, most_bytes: int) -> bytes:
        """Wait for the next header, after everything that was posted.

        Raises:
            CommError: it is longer than `most_bytes`.
        """
        self.read_posted()
        return self._read_sized("header", most_bytes)

    def _read_sized(self, what: str, most_bytes: int) -> bytes:
        length = bytearray(LENGTH.size)
        self._fill([memoryview(length)])
        (size,) = LENGTH.unpack(length)
        if size > most_bytes:
            raise CommError(f"{self._name}: a {what} of {size} bytes arrived, which may have {most_bytes}")
        check_fits(size, torch.device("cpu"), f"{self._name}, a {what}")
        data = bytearray()
        while missing := min(size - len(data), MOST_AHEAD):  # what has not come takes no memory yet
            data.extend(bytes(missing))
            with memoryview(data) as whole, whole[-missing:] as rest:
                self._fill([rest])
        return bytes(data)

    def has_begun(self, receipt: _Receipt) -> bool:
        """Return whether a receive is over, or its message has begun to come."""
        if receipt.tensors is None or receipt.ahead is not None:
            return receipt.ahead is None or receipt.ahead.done()
        is_next = self._posted[0] is receipt and (self._ahead is None or self._ahead.done())
        return is_next and self._has_data()

    def _has_data(self) -> bool:
        """Return whether a read would not wait: there are bytes, or the connection has ended. `select` takes no file over 1023."""
        try:
            self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True  # which the read will raise
        return True

    def read_posted(self, last: _Receipt | None = None) -> None:
        """Wait for the receives that were posted: all of them, or those up to `last`."""
        ahead = self._ahead if last is None or last.ahead is None else last.ahead
        if ahead is not None:
            ahead.result()
        while self._posted and (last is None or last.tensors is not None):
            self._read_into(self._posted[0])
            self._posted.popleft()

    def _read_into(self, receipt: _Receipt) -> None:
        assert receipt.tensors is not None
        receipt.note = self._read([memory_of(tensor) for tensor in receipt.tensors])
        receipt.tensors = None

    def _read(self, parts: list[memoryview]) -> bytes | None:
        if self._error is not None:
            raise self._error
        try:
            return self._read_message(parts)
        except CommError as error:
            self._error = error
            raise

    def _read_message(self, parts: list[memoryview]) -> bytes | None:
        """Read a message into the given memory, and return the note that came with it, if one did."""
        expected, length, ring = sum(map(len, parts)), bytearray(LENGTH.size), self._through_ring(parts)
        rest = [memoryview(length), *parts] if ring is None else [memoryview(length)]
        num_parts = len(rest) - 1
        while rest and len(rest) > num_parts:  # the length first, with the data that has come after it
            rest = _behind(rest, self._taken(rest, 0))
        (size,) = LENGTH.unpack(length)
        if size & ~NOTED != expected:
            raise CommError(f"{self._name}: a message of {size & ~NOTED} bytes arrived where {expected} were expected")
        self._fill(rest)
        if ring is not None:
            self._fill([] if self._pull(ring, parts) else parts)
        return self._read_sized("note", MOST_NOTE_BYTES) if size & NOTED else None

    def _pull(self, ring: Ring, parts: list[memoryview]) -> bool:
        try:
            return ring.pull(parts)
        except OSError as error:
            raise self._lost(error) from error

    def _fill(self, parts: list[memoryview]) -> None:
        while parts:
            parts = _behind(parts, self._taken(parts, socket.MSG_WAITALL))

    def _taken(self, parts: list[memoryview], flags: int) -> int:
        try:
            count, *_ = self._connection.recvmsg_into(parts[:MOST_PARTS], 0, flags)
        except OSError as error:
            raise self._lost(error) from error
        if not count:
            raise self._lost("its other end is gone")
        return count


class _Receipt:
    """A receive that was posted; its tensors are None once they are filled. `ahead` is set if a thread reads it."""

    def __init__(self, receiver: Receiver, tensors: Sequence[torch.Tensor]) -> None:
        self._receiver = receiver
        self.ahead: Future[None] | None = None
        self.tensors: Sequence[torch.Tensor] | None = tensors
        self.note: bytes | None = None

    def wait(self) -> bytes | None:
        self._receiver.read_posted(self)
        return self.note

    def has_come(self) -> bool:
        return self._receiver.has_begun(self)


class _Sent:
    """A send, whose rest a thread may still be sending. It keeps its tensors as long as any other send, as the plan assumes."""

    def __init__(self, rest: Future[None] | None, tensors: Sequence[torch.Tensor] | None) -> None:
        self._rest, self._tensors = rest, tensors

    def wait(self) -> None:
        if self._rest is not None:
            self._rest.result()
        self._tensors = None

    def has_come(self) -> bool:
        return self._rest is None or self._rest.done()


def _message(parts: list[memoryview], note: bytes | None = None) -> list[memoryview]:
    size = sum(map(len, parts))
    if note is None:
        return [memoryview(LENGTH.pack(size)), *parts]
    return [memoryview(LENGTH.pack(size | NOTED)), *parts, memoryview(LENGTH.pack(len(note)) + note)]


def _behind(parts: list[memoryview], count: int) -> list[memoryview]:
    """Return what is left of some memory after its first `count` bytes."""
    for index, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[index + 1 :]]
        count -= len(part)
    return []
