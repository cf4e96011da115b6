"""Outgoing connections, which are opened at the same time and answered in any order; those that end are opened again."""

from __future__ import annotations

import errno
import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial

from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.incoming import read_frame
from bpipe.comm.rendezvous.shortage import explained, way_out
from bpipe.comm.wire.frames import ONLY_HELLO, Frame, FrameReader
from bpipe.errors import CommError

__all__: list[str] = []

CONNECT_S = 5.0  # a reachable machine accepts a connection within this time
FIRST_S = 0.1  # a near one within this: the kernel itself tries again only after a second, where strangers have filled the queue
PAUSE_S, MOST_DOUBLED = 0.005, 3  # between two attempts, and how often it doubles
OUTAGE = {errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH}  # of a network that may come back
LOOK_S = 0.25  # between two looks at whether a rank that does not answer has another endpoint by now


class _Attempt:
    """A connection that is not answered yet."""

    def __init__(self, connection: socket.socket, to: Endpoint, place: tuple[str, int]) -> None:
        self.connection, self.to, self.place = connection, to, place
        self.reader = FrameReader(ONLY_HELLO)
        self.said = b""  # in the hello, once it is sent
        self.began_s = self.looked_s = time.monotonic()


class OutgoingConnections:
    """The connections to other ranks whose answers have not arrived yet.

    Args:
        selector: becomes ready when data has arrived; then call `serve`.
        find: returns where who has this number listens; None if that is not known yet.
        hello: makes the hello to a number, at its endpoint.
        on_answer: called with each connection that was answered, its number, the endpoint, the body of the hello and the answer, a
            hello too. It owns the connection, which does not block.

    Attributes:
        endpoints: of all numbers that a connection was opened to.
        failed: why the latest attempt at each place failed, by number.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        find: Callable[[int], Endpoint | None],
        hello: Callable[[int, Endpoint], Frame],
        on_answer: Callable[[socket.socket, int, Endpoint, bytes, Frame], None],
    ) -> None:
        self._selector, self._find, self._hello, self._on_answer = selector, find, hello, on_answer
        self._attempts: dict[int, _Attempt] = {}
        self._num_failed: dict[int, int] = {}  # attempts of each number, which try its places in turn
        self._again_s: dict[int, float] = {}  # when to try again
        self.endpoints: dict[int, Endpoint] = {}
        self.failed: dict[int, dict[tuple[str, int], Exception | str]] = {}

    def open(self, numbers: Iterable[int]) -> None:
        """Open connections to those that have none, as far as it is known where they listen."""
        now = time.monotonic()
        for number in numbers:
            attempt = self._attempts.get(number)
            if attempt is None:
                if now >= self._again_s.get(number, 0.0) and (endpoint := self._find(number)) is not None:
                    self._connect(number, endpoint)
            elif (took_s := now - attempt.began_s) > self._patience_s(number, attempt) or self._has_moved(number, attempt, now):
                self._hear_all(number, attempt)
                if self._attempts.get(number) is attempt:
                    self._disconnect(number, TimeoutError(f"no answer in {took_s:.1f} s"))

    def close(self, last: Frame | None = None) -> None:
        """Close the connections that are not answered, after a last frame to those who may take one for this rank's."""
        for number, attempt in list(self._attempts.items()):
            with suppress(OSError):
                if attempt.said and last is not None:
                    attempt.connection.send(last.pack())
            self._forget(number).close()

    def has_reached(self, number: int) -> bool:
        """Return whether somebody listens where this one should be."""
        return (attempt := self._attempts.get(number)) is not None and bool(attempt.said)

    def was_wrong(self, number: int, place: tuple[str, int], why: Exception | str) -> None:
        """Take note that an attempt has failed, or that it was somebody else who answered.

        Raises:
            OSError: it has failed because this rank has run out of descriptors or memory.
        """
        if isinstance(why, OSError) and way_out(why):
            raise why
        self.failed.setdefault(number, {})[place] = why
        self._count_failure(number)

    def is_refused(self, number: int) -> bool:
        """Return whether somebody has refused the latest attempt at each of its places; an outage is silent, and refuses none."""
        failed = self.failed.get(number, {})
        return number in self.endpoints and all(_is_refusal(failed.get(place)) for place in self.endpoints[number].places)

    def why_not(self, number: int) -> str:
        """Return where the latest attempts failed, and why; empty if none did."""
        failed = self.failed.get(number, {}).items()
        return "; ".join(f"at {address}, port {port}: {explained(why)}" for (address, port), why in failed)

    def _has_moved(self, number: int, attempt: _Attempt, now: float) -> bool:
        """Return whether another endpoint is known by now; asked seldom, because that may be a request to the store."""
        if now - attempt.looked_s < LOOK_S:
            return False
        attempt.looked_s = now
        return self._find(number) != attempt.to

    def _patience_s(self, number: int, attempt: _Attempt) -> float:
        """Return how long to wait at a place: briefly at first, because a full queue or a stranger may be there."""
        num_places = len(attempt.to.places)
        if num_places == 1 and attempt.said:
            return math.inf
        first_s = LOOK_S if attempt.said else FIRST_S
        return float(min(CONNECT_S, first_s * 2 ** min(8, self._num_failed.get(number, 0) // num_places)))

    def _connect(self, number: int, to: Endpoint) -> None:
        if not to.places:
            return
        self.endpoints[number] = to
        place = to.places[self._num_failed.get(number, 0) % len(to.places)]
        try:
            with ExitStack() as unless_done:
                family, kind, protocol, _, address = socket.getaddrinfo(
                    *place, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
                )[0]
                connection = unless_done.enter_context(socket.socket(family, kind, protocol))
                connection.setblocking(False)
                with suppress(BlockingIOError):
                    connection.connect(address)
                self._selector.register(connection, selectors.EVENT_WRITE, partial(self._speak, number))
                self._attempts[number] = _Attempt(connection, to, place)
                unless_done.pop_all()
        except (OSError, OverflowError, UnicodeError) as error:
            self.was_wrong(number, place, error)

    def _speak(self, number: int, connection: socket.socket) -> None:
        """Say hello, once the other machine has accepted the connection."""
        attempt = self._attempts[number]
        try:
            hello = self._hello(number, attempt.to)
            connection.sendall(hello.pack())  # raises if the connection was refused
        except OSError as error:
            self._disconnect(number, error)
            return
        attempt.said = hello.body
        self._selector.modify(connection, selectors.EVENT_READ, partial(self._hear, number))

    def _hear(self, number: int, connection: socket.socket) -> None:
        attempt = self._attempts[number]
        try:
            answer = read_frame(connection, attempt.reader)
        except (OSError, CommError) as error:
            self._disconnect(number, error)
            return
        if answer is not None:
            self._forget(number)
            self._on_answer(connection, number, attempt.to, attempt.said, answer)

    def _hear_all(self, number: int, attempt: _Attempt) -> None:
        """Hear what has come, because an answer may have come while this process stood still."""
        missing = 0 if attempt.said else attempt.reader.num_missing
        while self._attempts.get(number) is attempt and attempt.reader.num_missing != missing:
            missing = attempt.reader.num_missing
            self._hear(number, attempt.connection)

    def _disconnect(self, number: int, why: Exception) -> None:
        """Give up an attempt; `open` makes another one."""
        self.was_wrong(number, self._attempts[number].place, why)
        self._forget(number).close()

    def _count_failure(self, number: int) -> None:
        self._num_failed[number] = failed = self._num_failed.get(number, 0) + 1
        rounds, rest = divmod(failed, len(self.endpoints[number].places))
        if not rest:  # all of its places were tried
            self._again_s[number] = time.monotonic() + PAUSE_S * 2 ** min(rounds - 1, MOST_DOUBLED)

    def _forget(self, number: int) -> socket.socket:
        connection = self._attempts.pop(number).connection
        self._selector.unregister(connection)
        return connection


def _is_refusal(why: Exception | str | None) -> bool:
    return why is not None and not isinstance(why, TimeoutError) and getattr(why, "errno", None) not in OUTAGE
