"""Open connections from sender to receiver, for as many channels as the ranks agree on.

It is done as ranks meet: every caller says hello, is answered, and proves that he belongs, and all of this at the same time, so
that strangers hold up nobody. From the moment at which a rank tells its address to the others, it accepts and judges callers.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.addresses import Address, Endpoint, read_endpoint
from bpipe.comm.rendezvous.incoming import IncomingConnections, read_frame, serve, served
from bpipe.comm.rendezvous.listening import Listeners
from bpipe.comm.rendezvous.outgoing import OutgoingConnections
from bpipe.comm.rendezvous.secret import NONCE_BYTES, UNPROVED, is_same, proof
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import ONLY_PROOF, Frame, FrameReader, Kind
from bpipe.errors import CommError, TransferError

__all__: list[str] = []

TOKEN_BYTES = 16
REACH_S = 10.0  # a rank that has told its address is there within this time, if its machine says that nobody is
NOWHERE: Mapping[int, str] = {}
LOOK_S = 0.05  # between two looks at whether something has failed, or a call is to be made again


class _Hello(NamedTuple):
    """The first message on a channel's connection, in both directions.

    Args:
        channel: its index.
        to: what only these ranks know: the receiver's name in this opening. In an answer, what the caller made up.
        nonce: random bytes of this connection.
        proof: in an answer, that the speaker has the token, and the secret if there is one.
    """

    channel: int
    to: bytes
    nonce: bytes
    proof: bytes = b""


def open_connections(
    ends: Sequence[tuple[int, int]],
    rank: int,
    addresses: Sequence[Address],
    token: bytes,
    control: ControlPlane,
    check: Callable[[str], None],
    reached: Mapping[int, str] = NOWHERE,
    secret: bytes = b"",
) -> dict[int, socket.socket]:
    """Open this rank's connections, and return them by index. Collective; blocks until all of this rank's are there.

    Args:
        ends: for each connection the ranks that send and receive on it, the same on all ranks.
        rank: this rank.
        addresses: the addresses that the others connect to.
        token: 16 bytes that only these ranks know.
        control: their control plane.
        check: called repeatedly with what is waited for; raises to give up.
        reached: the address of each rank that this one has a connection with, to be tried first.
        secret: by which the ranks know each other; empty if there is none.

    Raises:
        TransferError: a rank cannot be reached, or who answers there does not belong to the pipeline.
    """
    with Listeners(addresses) as listeners, _Opening(ends, rank, token + secret, listeners, reached) as opening:
        own = Endpoint(listeners.places, name=opening.name)
        with served(opening.selector):
            told = control.exchange(Collective.CONNECT, encode(own))
        opening.know([read_endpoint(data) for data in told])
        while missing := opening.missing():
            opening.connect(missing)
            serve(opening.selector, LOOK_S)
            check(opening.describe(missing))
        return opening.finish()


class _Opening:
    """The connections of a rank while some are still missing; closed if the opening fails.

    Args:
        key: what only these ranks have, by which they prove that they belong.

    Attributes:
        name: this rank's in the opening, which is never used again.
    """

    def __init__(
        self, ends: Sequence[tuple[int, int]], rank: int, key: bytes, listeners: Listeners, reached: Mapping[int, str]
    ) -> None:
        self._ends, self._rank, self._key, self._reached = ends, rank, key, reached
        self._own = [index for index, pair in enumerate(ends) if rank in pair]
        self.name = os.urandom(NONCE_BYTES)
        self._endpoints: Sequence[Endpoint] = ()
        self._since_s = 0.0  # when the first calls were made
        self._opened: dict[int, socket.socket] = {}
        self._asking: dict[int, socket.socket] = {}  # which have been answered, and not been told that they are kept
        self.selector = selectors.DefaultSelector()
        num_expected = sum(receiver == rank for _, receiver in ends)
        self._incoming = IncomingConnections(listeners.sockets, self.selector, num_expected, self._on_hello)
        self._outgoing = OutgoingConnections(self.selector, self._find, self._first_word, self._on_answer)

    def __enter__(self) -> _Opening:
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as after:
            after.callback(self.selector.close)
            for connection in [*self._asking.values(), *self._opened.values()]:
                after.callback(connection.close)
            after.callback(self._outgoing.close)
            after.callback(self._incoming.close)

    def know(self, endpoints: Sequence[Endpoint]) -> None:
        """Take note of where all ranks listen."""
        self._endpoints, self._since_s = endpoints, time.monotonic()

    def missing(self) -> list[int]:
        """Return the connections of this rank that are not there yet."""
        return [index for index in self._own if index not in self._opened]

    def connect(self, missing: Iterable[int]) -> None:
        """Call those who receive from this rank.

        Raises:
            TransferError: one of them cannot be reached.
        """
        calls = [index for index in missing if self._ends[index][0] == self._rank and index not in self._asking]
        self._outgoing.open(calls)
        if time.monotonic() - self._since_s > REACH_S:
            for index in calls:
                if not self._outgoing.has_reached(index) and self._outgoing.is_refused(index):
                    raise TransferError(f"rank {self._ends[index][1]} cannot be reached {self._outgoing.why_not(index)}")

    def describe(self, missing: Sequence[int]) -> str:
        ranks = sorted({rank for index in missing for rank in self._ends[index]} - {self._rank} or {self._rank})
        text = f"connections with ranks {ranks} for its channels are being opened"
        unheard = [index for index in missing if self._outgoing.why_not(index)]
        return text if not unheard else f"{text}; rank {self._ends[unheard[0]][1]} is called {self._outgoing.why_not(unheard[0])}"

    def finish(self) -> dict[int, socket.socket]:
        """Hand over the connections."""
        for connection in self._opened.values():
            connection.settimeout(None)
        done, self._opened = self._opened, {}
        return done

    # As the receiver

    def _on_hello(self, connection: socket.socket, frame: Frame) -> None:
        """Answer, if this is a channel to this rank and the caller knows its name."""
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                hello = decode(_Hello, frame.body, "hello")
                if hello.to != self.name or not self._receives(hello.channel):
                    return
                answer = _Hello(hello.channel, hello.nonce, os.urandom(NONCE_BYTES))
                said = frame.body, encode(answer)
                connection.sendall(Frame(Kind.HELLO, 0, encode(answer._replace(proof=proof(self._key, "answer", *said)))).pack())
            except (OSError, CommError):
                return
            unless_done.pop_all()
        self._incoming.expect_proof(connection, partial(self._on_proof, hello.channel, proof(self._key, "call", *said)))

    def _receives(self, index: int) -> bool:
        return 0 <= index < len(self._ends) and self._ends[index][1] == self._rank

    def _on_proof(self, index: int, expected: bytes, connection: socket.socket, frame: Frame) -> None:
        """Keep a connection, and tell the caller. If he has called before, he has not heard so, and that call has ended."""
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            if not is_same(frame.body, expected):
                return
            try:
                connection.sendall(Frame(Kind.PROOF, 0).pack())
            except OSError:
                return
            unless_done.pop_all()
        if (earlier := self._opened.pop(index, None)) is not None:
            earlier.close()
        self._opened[index] = connection

    # As the sender

    def _find(self, index: int) -> Endpoint:
        receiver = self._ends[index][1]
        return _sorted(self._endpoints[receiver], self._reached.get(receiver))

    def _first_word(self, index: int, to: Endpoint) -> Frame:
        return Frame(Kind.HELLO, 0, encode(_Hello(index, to.name, os.urandom(NONCE_BYTES))))

    def _on_answer(self, connection: socket.socket, index: int, to: Endpoint, said: bytes, frame: Frame) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                place = connection.getpeername()[:2]
                hello = decode(_Hello, frame.body, "hello")
                both = said, encode(hello._replace(proof=b""))
                if not is_same(hello.proof, proof(self._key, "answer", *both)):
                    self._outgoing.was_wrong(index, place, UNPROVED)
                    return
                connection.sendall(Frame(Kind.PROOF, 0, proof(self._key, "call", *both)).pack())
            except (OSError, CommError):
                return
            unless_done.pop_all()
        self._asking[index] = connection
        self.selector.register(connection, selectors.EVENT_READ, partial(self._on_kept, index, FrameReader(ONLY_PROOF)))

    def _on_kept(self, index: int, reader: FrameReader, connection: socket.socket) -> None:
        try:
            is_kept = read_frame(connection, reader) is not None
        except (OSError, CommError):  # call again
            self._stop_asking(index).close()
            return
        if is_kept:
            self._opened[index] = self._stop_asking(index)

    def _stop_asking(self, index: int) -> socket.socket:
        connection = self._asking.pop(index)
        self.selector.unregister(connection)
        return connection


def _sorted(endpoint: Endpoint, first: str | None) -> Endpoint:
    return endpoint._replace(places=tuple(sorted(endpoint.places, key=lambda place: place[0] != first)))
