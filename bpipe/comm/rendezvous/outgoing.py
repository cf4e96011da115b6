"""Outgoing connections, which are opened at the same time and answered in any order; those that end are opened again."""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial

from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.incoming import read_frame
from bpipe.comm.wire.frames import ONLY_HELLO, Frame, FrameReader
from bpipe.errors import CommError

__all__: list[str] = []

CONNECT_S = 5.0  # a reachable machine accepts a connection within this time
LOOK_S = 0.25  # between two looks at whether a rank that does not answer has another endpoint by now


class _Attempt:
    """A connection that is not answered yet."""

    def __init__(self, connection: socket.socket, to: Endpoint) -> None:
        self.connection, self.to = connection, to
        self.reader = FrameReader(ONLY_HELLO)
        self.said = b""  # in the hello, once it is sent
        self.began_s = self.looked_s = time.monotonic()


class OutgoingConnections:
    """The connections to other ranks whose answers have not arrived yet.

    Args:
        selector: becomes ready when data has arrived; then call `serve`.
        find: returns where a rank listens; None if that is not known yet.
        hello: makes the hello to an endpoint.
        on_answer: called with each connection that was answered, its rank, the endpoint, the body of the hello and the answer, a
            hello too. It owns the connection, which does not block.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        find: Callable[[int], Endpoint | None],
        hello: Callable[[Endpoint], Frame],
        on_answer: Callable[[socket.socket, int, Endpoint, bytes, Frame], None],
    ) -> None:
        self._selector, self._find, self._hello, self._on_answer = selector, find, hello, on_answer
        self._attempts: dict[int, _Attempt] = {}
        self._num_failed: dict[int, int] = {}  # attempts of each rank, which try its places in turn
        self.endpoints: dict[int, Endpoint] = {}  # of all ranks that a connection was opened to

    def open(self, ranks: Iterable[int]) -> None:
        """Open connections to the ranks that have none, as far as it is known where they listen."""
        now = time.monotonic()
        for rank in ranks:
            attempt = self._attempts.get(rank)
            if attempt is None:
                if (endpoint := self._find(rank)) is not None:
                    self._connect(rank, endpoint)
            elif now - attempt.looked_s >= LOOK_S:
                attempt.looked_s = now
                if self._find(rank) != attempt.to or now - attempt.began_s > self._patience_s(rank, attempt):
                    self._disconnect(rank)

    def close(self, last: Frame) -> None:
        """Close the connections that are not answered, after a last frame to those who may take one for this rank's."""
        for rank, attempt in list(self._attempts.items()):
            with suppress(OSError):
                if attempt.said:
                    attempt.connection.send(last.pack())
            self._disconnect(rank)

    def _patience_s(self, rank: int, attempt: _Attempt) -> float:
        """Return how long to wait at a place: briefly at first if there are others, because who listens there may be a stranger."""
        num_places = len(attempt.to.places)
        if num_places == 1:
            return math.inf if attempt.said else CONNECT_S
        return float(min(CONNECT_S, LOOK_S * 2 ** min(8, self._num_failed.get(rank, 0) // num_places)))

    def _connect(self, rank: int, to: Endpoint) -> None:
        if not to.places:
            return
        self.endpoints[rank] = to
        place = to.places[self._num_failed.get(rank, 0) % len(to.places)]
        with suppress(OSError, OverflowError, UnicodeError), ExitStack() as unless_done:
            unless_done.callback(self._count_failure, rank)
            family, kind, protocol, _, address = socket.getaddrinfo(*place, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0]
            connection = unless_done.enter_context(socket.socket(family, kind, protocol))
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.connect(address)
            self._selector.register(connection, selectors.EVENT_WRITE, partial(self._speak, rank))
            self._attempts[rank] = _Attempt(connection, to)
            unless_done.pop_all()

    def _speak(self, rank: int, connection: socket.socket) -> None:
        """Say hello, once the other machine has accepted the connection."""
        attempt = self._attempts[rank]
        try:
            hello = self._hello(attempt.to)
            connection.sendall(hello.pack())  # raises if the connection was refused
        except OSError:
            self._disconnect(rank)
            return
        attempt.said = hello.body
        self._selector.modify(connection, selectors.EVENT_READ, partial(self._hear, rank))

    def _hear(self, rank: int, connection: socket.socket) -> None:
        attempt = self._attempts[rank]
        try:
            answer = read_frame(connection, attempt.reader)
        except (OSError, CommError):
            self._disconnect(rank)
            return
        if answer is not None:
            self._forget(rank)
            self._on_answer(connection, rank, attempt.to, attempt.said, answer)

    def _disconnect(self, rank: int) -> None:
        """Give up an attempt; `open` makes another one."""
        self._count_failure(rank)
        self._forget(rank).close()

    def _count_failure(self, rank: int) -> None:
        self._num_failed[rank] = self._num_failed.get(rank, 0) + 1

    def _forget(self, rank: int) -> socket.socket:
        connection = self._attempts.pop(rank).connection
        self._selector.unregister(connection)
        return connection
