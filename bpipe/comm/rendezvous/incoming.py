"""Incoming connections, read in any order so that a silent one does not delay the others.

The first frame on a connection, a hello, says who opened it. A stranger that sends something else, perhaps a port scanner, is
disconnected. One that sends nothing stays until there are too many.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import NamedTuple

from bpipe.comm.rendezvous.shortage import passing_over
from bpipe.comm.wire.frames import ONLY_HELLO, ONLY_PROOF, Frame, FrameReader
from bpipe.errors import CommError

__all__: list[str] = []

MOST_SILENT = 64  # connections besides those that are expected
LOOK_S = 1.0  # between two looks at whether to go on
ACCEPTED_AT_ONCE = 16  # before those that have said something are heard

OnReady = Callable[[socket.socket], None]  # the data of each socket in a selector: what to call once it is ready
OnFrame = Callable[[socket.socket, Frame], None]


class _Awaited(NamedTuple):
    """A frame that is awaited on a connection, and what to call with it."""

    reader: FrameReader
    on_frame: OnFrame


class IncomingConnections:
    """The connections at listening sockets whose hello has not arrived yet.

    Args:
        listeners: the sockets.
        selector: becomes ready when data has arrived; then call `serve`.
        num_expected: how many connections are expected.
        on_hello: called with each connection whose hello has arrived, and with the hello. It owns the connection, which does not
            block, and nothing behind the hello was read from them.
        admits: whether a connection is accepted at all.
    """

    def __init__(
        self,
        listeners: Iterable[socket.socket],
        selector: selectors.BaseSelector,
        num_expected: int,
        on_hello: OnFrame,
        admits: Callable[[socket.socket], bool] = lambda _: True,
    ) -> None:
        self._admits = admits
        self._selector, self._most, self._on_hello = selector, num_expected + MOST_SILENT, on_hello
        self._silent: dict[socket.socket, _Awaited] = {}  # the oldest first
        self._proving: dict[socket.socket, _Awaited] = {}  # likewise, of those that have said hello
        on_ready: OnReady = self._accept
        for listener in listeners:
            listener.setblocking(False)
            selector.register(listener, selectors.EVENT_READ, on_ready)

    def __enter__(self) -> IncomingConnections:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self, last: Frame | None = None) -> None:
        """Close all of them, after a last frame to those that have said hello."""
        for connection in list(self._proving):
            with suppress(OSError):
                if last is not None:
                    connection.send(last.pack())
        for connection in [*self._silent, *self._proving]:
            self._disconnect(connection)

    def expect_proof(self, connection: socket.socket, on_proof: OnFrame) -> None:
        """Read another frame, a proof, from a connection whose hello has arrived; then `on_proof` owns the connection."""
        self._await(connection, self._proving, MOST_SILENT, _Awaited(FrameReader(ONLY_PROOF), on_proof))

    def _accept(self, listener: socket.socket) -> None:
        with passing_over():  # there are no more, or one has ended already
            for _ in range(ACCEPTED_AT_ONCE):
                connection, _ = listener.accept()
                if not self._admits(connection):
                    connection.close()
                    continue
                connection.setblocking(False)
                self._await(connection, self._silent, self._most, _Awaited(FrameReader(ONLY_HELLO), self._on_hello))
                self._hear(connection)  # at once: whose hello has come is not dropped for the strangers behind him

    def _await(self, connection: socket.socket, among: dict[socket.socket, _Awaited], most: int, awaited: _Awaited) -> None:
        if len(among) >= most:
            self._disconnect(next(iter(among)))
        self._selector.register(connection, selectors.EVENT_READ, self._hear)
        among[connection] = awaited

    def _disconnect(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._silent.pop(connection, None)
        self._proving.pop(connection, None)

    def _hear(self, connection: socket.socket) -> None:
        awaited = self._silent.get(connection) or self._proving[connection]
        try:
            frame = read_frame(connection, awaited.reader)
        except (OSError, CommError):
            self._disconnect(connection)
            return
        if frame is not None:
            self._forget(connection)
            awaited.on_frame(connection, frame)


def read_frame(connection: socket.socket, reader: FrameReader) -> Frame | None:
    """Read more of a frame from a connection that does not block, and nothing behind it; return it once it is whole.

    Raises:
        CommError: something else has arrived.
        OSError: the connection has ended.
    """
    try:
        data = connection.recv(reader.num_missing)
    except BlockingIOError:
        return None
    if not data:
        raise ConnectionError("the connection has ended")
    return next(reader.feed(data), None)


def serve(selector: selectors.BaseSelector, most_s: float) -> None:
    """Wait until something is ready, but for `most_s` seconds at most, and call what is registered with it."""
    for key, _ in selector.select(most_s):
        if selector.get_map().get(key.fd) is key:  # an earlier one of these may have taken it out
            key.data(key.fileobj)


@contextmanager
def served(selector: selectors.BaseSelector) -> Iterator[None]:
    """Serve a selector in a thread as long as this context lasts, because the caller waits for something else."""
    woken, waker = socket.socketpair()
    with woken, waker, ThreadPoolExecutor(1, "bpipe-opening") as pool:
        selector.register(woken, selectors.EVENT_READ, selector.unregister)
        serving = pool.submit(_serve_until, selector, woken.fileno())
        try:
            yield
        finally:
            waker.send(b"\0")
            serving.result()


def _serve_until(selector: selectors.BaseSelector, descriptor: int) -> None:
    """Serve a selector until a descriptor is no longer registered."""
    while descriptor in selector.get_map():
        serve(selector, LOOK_S)
