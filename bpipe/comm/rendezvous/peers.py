"""The connections of a rank to others, for control messages that must arrive even if transfers are stuck."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from contextlib import suppress
from functools import cache
from typing import NamedTuple

from bpipe.comm.wire.frames import Frame, FrameReader
from bpipe.errors import CommError

__all__: list[str] = []

NAME_BYTES = 16


class PeerConnection:
    """The connection to one rank.

    Args:
        process: distinguishes its process from all others.
    """

    def __init__(self, connection: socket.socket, rank: int, process: bytes) -> None:
        self.rank, self.process = rank, process
        self.reader = FrameReader()
        self.connection = connection
        self._queue: deque[bytes] = deque()
        self._sending = threading.Lock()

    def send(self, frame: Frame) -> None:
        """Send a frame, or leave it to the thread that is already sending one, because the thread that reads must not wait for it.

        Nothing is sent to a peer that is gone; the thread that reads from it notices that.
        """
        self._queue.append(frame.pack())
        while self._queue and self._sending.acquire(blocking=False):
            try:
                while self._queue:
                    self._send_whole(memoryview(self._queue.popleft()))
            except BaseException as error:  # a part of a frame may have left
                self._disconnect()
                if not isinstance(error, OSError):
                    raise
            finally:
                self._sending.release()

    def _send_whole(self, data: memoryview) -> None:
        """Send all of the data; the connection's timeout applies to each piece of it."""
        while data:
            data = data[self.connection.send(data) :]

    def _disconnect(self) -> None:
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def receive(self) -> bytes:
        """Return what has arrived, or nothing once the peer is gone. Call it only when the connection is readable."""
        try:
            return self.connection.recv(2**16)
        except TimeoutError as error:
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


@cache
def process_name(pid: int) -> bytes:
    """Return 16 bytes that distinguish a process from all others; a fork gets its own."""
    return os.urandom(NAME_BYTES)
