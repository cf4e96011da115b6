"""The connections of a rank to others, for control messages that must arrive even if transfers are stuck."""

from __future__ import annotations

import os
import selectors
import socket
import threading
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from bpipe.comm.wire.frames import Frame, FrameReader
from bpipe.errors import CommError

__all__: list[str] = []

NAME_BYTES = 16
MOST_WAITING = 1024  # frames; ranks say little to each other, and read it at once


class PeerConnection:
    """The connection to one rank.

    Args:
        process: distinguishes its process from all others.
    """

    def __init__(self, connection: socket.socket, rank: int, process: bytes) -> None:
        self.rank, self.process = rank, process
        self.reader = FrameReader()
        self.connection = connection
        self._waiting: deque[memoryview] = deque()
        self._sending = threading.Lock()

    @property
    def num_waiting(self) -> int:
        """Return how many frames have not left, because the peer has not read those before them."""
        return len(self._waiting)

    def send(self, frame: Frame) -> bool:
        """Send a frame as `send_packed` does."""
        return self.send_packed(frame.pack())

    def send_packed(self, data: bytes) -> bool:
        """Send as much of a frame as the kernel takes at once, behind those that wait. No thread ever waits for the peer.

        Nothing is sent to a peer that is gone; the thread that reads from it notices that.

        Returns:
            Whether the frame was taken. It is dropped if too many wait already.
        """
        with self._sending:
            if len(self._waiting) >= MOST_WAITING:
                return False
            self._waiting.append(memoryview(data))
            self._push()
        return True

    def flush(self) -> None:
        """Send more of what waits. Call it when the connection is writable."""
        with self._sending:
            self._push()

    def _push(self) -> None:
        try:
            while self._waiting:
                rest = self._waiting[0][self.connection.send(self._waiting[0]) :]
                if rest:
                    self._waiting[0] = rest
                else:
                    self._waiting.popleft()
        except BlockingIOError:
            pass
        except BaseException as error:  # a part of a frame may have left
            self._waiting.clear()
            self._disconnect()
            if not isinstance(error, OSError):
                raise

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> bytes:
        """Return what has arrived, or nothing once the peer is gone. Call it only when the connection is readable."""
        try:
            return self.connection.recv(2**16)
        except BlockingIOError as error:
            raise CommError("a connection was readable, and had nothing to read") from error
        except OSError:
            return b""

    def close(self) -> None:
        """Close the connection, after reading what has arrived, because a close with unread data might discard what was sent."""
        self._disconnect()
        with suppress(OSError):
            while self.connection.recv(2**16, socket.MSG_DONTWAIT):
                pass
        self.connection.close()


class Peers(NamedTuple):
    """All connections of a rank.

    Args:
        name: 16 random bytes, this rank's name in the meeting, which is never used again.
        connections: to the ranks that it is linked with, in order.
    """

    name: bytes
    connections: list[PeerConnection]

    def reached(self) -> dict[int, str]:
        """Return the address of each rank whose connection has not ended."""
        found = {}
        for peer in self.connections:
            with suppress(OSError):
                found[peer.rank] = peer.connection.getpeername()[0]
        return found


def close_all(peers: Collection[PeerConnection], patience_s: float) -> None:
    """Close connections, once the peers have read what waits for them.

    Args:
        patience_s: the longest time to wait until some peer reads some more: of those that are frozen nobody is waited for longer.
    """
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            if peer.num_waiting:
                selector.register(peer.connection, selectors.EVENT_WRITE, peer)
        while selector.get_map() and (ready := selector.select(patience_s)):
            for key, _ in ready:
                key.data.flush()
                if not key.data.num_waiting:
                    selector.unregister(key.fileobj)
    for peer in peers:
        peer.close()


@cache
def process_name(pid: int) -> bytes:
    """Return 16 bytes that distinguish a process from all others; a fork gets its own."""
    return os.urandom(NAME_BYTES)
