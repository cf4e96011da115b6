"""The rendezvous of a pipeline's ranks: each connects to those that it is linked with.

The ranks find each other through the store of their process group, once. After that no store is needed: a process that ends
closes its connections, and its peers see that at once, no matter which rank hosts the store. Each rank connects to those of its
links that come before it. It waits for all connections at the same time, because one that stays silent must not hold up the others.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from bpipe.cleanup import noted_on
from bpipe.comm.rendezvous.addresses import Endpoint, own_address
from bpipe.comm.rendezvous.incoming import MOST_SILENT, IncomingConnections, serve
from bpipe.comm.rendezvous.outgoing import OutgoingConnections
from bpipe.comm.rendezvous.peers import NAME_BYTES, PeerConnection, Peers, process_name
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import SMALL_BODY, Frame, FrameReader, Kind
from bpipe.errors import AgreementError, CommError, text_of

__all__: list[str] = []

RETURN_S = 5.0  # a rank whose connection has ended connects again within this time, if its process lives
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02  # between two looks at who has come
MANY = 64  # ranks: with more, each one looks less often, so that all together ask the store no more
MOST_SEND_S = 30.0  # without progress: a peer's reader is a thread that does nothing else
LOST_MACHINE_S = 15  # without an answer of its kernel
MAX_REASON_BYTES = 1024


class OtherPipelineError(AgreementError):
    """Another rank opens a different one of the group's pipelines, or counts them differently."""

    def __init__(self, theirs: int, message: str) -> None:
        super().__init__(message)
        self.theirs = theirs


class Hello(NamedTuple):
    """The first message in both directions: the sender's rank, and the receiver's.

    Args:
        name: the speaker's name in this meeting.
        to: the name of the receiving rank; it is known only from that rank's endpoint in the store.
        process: distinguishes the speaker's process from all others.
    """

    rank: int
    pipeline: int
    name: bytes
    to: bytes
    process: bytes


def meet_peers(
    store: Any,
    key: str,
    rank: int,
    size: int,
    check: Callable[[str], None],
    *,
    links: Collection[int] | None = None,
    pipeline: int = 0,
) -> Peers:
    """Connect a rank to the ranks that it is linked with. Collective; blocks until these have come.

    Args:
        store: a store of torch.distributed that all ranks reach.
        key: the store's key that they use to find each other.
        check: called repeatedly with what is waited for; raises to give up.
        links: the ranks to connect to, which connect to this one; None for all others.
        pipeline: which of the group's pipelines this is.

    Raises:
        AgreementError: another rank opens a different pipeline, or has given up in the meantime.
    """
    address, links = own_address(store), {*range(size)} - {rank} if links is None else {*links}
    with socket.create_server((address.text, 0), family=address.family, backlog=len(links) + MOST_SILENT) as listener:
        own = Endpoint(address.text, listener.getsockname()[1], socket.gethostname(), os.urandom(NAME_BYTES))
        with _Meeting(store, key, rank, links, pipeline, own, listener) as meeting:
            store.set(f"{key}/{rank}", encode(own))
            pause_s = LEAST_PAUSE_S
            while missing := meeting.missing():
                meeting.connect()
                meeting.wait(pause_s)
                check(meeting.describe(missing))
                pause_s = min(2 * pause_s, MOST_PAUSE_S * max(1, size / MANY))
            return meeting.finish()


class _Meeting:
    """The connections of a rank while some are still missing; closed if the meeting fails."""

    def __init__(
        self, store: Any, key: str, rank: int, links: Collection[int], pipeline: int, own: Endpoint, listener: socket.socket
    ) -> None:
        self._store, self._key, self._rank, self._links, self._pipeline, self._own = store, key, rank, links, pipeline, own
        self._peers: dict[int, PeerConnection] = {}
        self._ended_s: dict[int, float] = {}  # when connections ended without a word, which may be an attempt that is made again
        self._selector = selectors.DefaultSelector()
        self._incoming = IncomingConnections(listener, self._selector, len(links), self._on_hello)
        self._outgoing = OutgoingConnections(self._selector, self._find, self._hello, self._on_answer)

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        why = Frame(Kind.REFUSAL, 0, b"" if error is None else text_of(error).encode(errors="replace")[:MAX_REASON_BYTES])
        with noted_on(error):
            self._incoming.__exit__()
        with noted_on(error):
            self._outgoing.close(why)
        for peer in self._peers.values():
            with noted_on(error):
                peer.send(why)
            with noted_on(error):
                peer.close()
        self._selector.close()

    def missing(self) -> list[int]:
        """Return the ranks that have not come."""
        return [other for other in sorted(self._links) if other not in self._peers]

    def finish(self) -> Peers:
        """Hand over the connections."""
        done, self._peers = self._peers, {}
        return Peers(self._own.name, [done[other] for other in sorted(done)])

    def describe(self, missing: list[int]) -> str:
        text = f"ranks {missing} have not reached their first step"
        tried = [other for other in missing if other in self._outgoing.endpoints]
        if not tried:
            return text
        at = self._outgoing.endpoints[tried[0]]
        return (
            f"{text}; rank {tried[0]} listens at {at.address}, port {at.port}, of {at.host}, but does not answer there: "
            "if ranks are on several machines, set GLOO_SOCKET_IFNAME to the interface between them"
        )

    def wait(self, most_s: float) -> None:
        """Take in what comes, until something does, but for `most_s` seconds at most.

        Raises:
            AgreementError: a rank opens a different pipeline, or has given up.
        """
        serve(self._selector, most_s)
        for rank, ended_s in self._ended_s.items():
            if time.monotonic() - ended_s > RETURN_S:
                raise _given_up(rank, ", or its process ended")

    def connect(self) -> None:
        """Open connections to the missing ranks before this one, which have to accept those of the ranks after them."""
        self._outgoing.open([other for other in self.missing() if other < self._rank])

    # Hellos

    def _find(self, other: int) -> Endpoint | None:
        key = f"{self._key}/{other}"
        if not self._store.check([key]):
            return None
        with suppress(CommError):  # something else is under this key
            return decode(Endpoint, self._store.get(key), "endpoint")
        return None

    def _hello(self, to: Endpoint) -> Frame:
        return Frame(Kind.HELLO, 0, encode(Hello(self._rank, self._pipeline, self._own.name, to.name, process_name(os.getpid()))))

    def _on_hello(self, connection: socket.socket, frame: Frame) -> None:
        """Answer, if this is a rank after this one that knows this one's name in this meeting."""
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                hello = decode(Hello, frame.body, "hello")
                if hello.to != self._own.name or hello.rank not in self._links or hello.rank < self._rank:
                    return
                connection.sendall(self._hello(Endpoint("", 0, name=hello.name)).pack())
            except (OSError, CommError):
                return
            self._check_pipeline(hello)
            unless_done.pop_all()
        self._add(hello, connection)

    def _on_answer(self, connection: socket.socket, other: int, to: Endpoint, frame: Frame) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                hello = decode(Hello, frame.body, "hello")
            except CommError:
                return
            if (hello.rank, hello.name, hello.to) != (other, to.name, self._own.name):  # of another meeting
                return
            self._check_pipeline(hello)
            unless_done.pop_all()
        self._add(hello, connection)

    def _check_pipeline(self, hello: Hello) -> None:
        if hello.pipeline != self._pipeline:
            numbers = sorted([(self._rank, self._pipeline), (hello.rank, hello.pipeline)])
            have = ", ".join(f"rank {rank} has {number}" for rank, number in numbers)
            raise OtherPipelineError(
                hello.pipeline,
                f"the ranks disagree on which of the group's pipelines this is: {have}. "
                "Make the same schedules, and call their steps in the same order, on all ranks.",
            )

    # Those who are there

    def _add(self, hello: Hello, connection: socket.socket) -> None:
        try:
            prepare(connection, TCP_USER_TIMEOUT=1000 * LOST_MACHINE_S)
        except OSError:  # it has ended already
            connection.close()
            return
        connection.settimeout(MOST_SEND_S)
        if hello.rank in self._peers:
            self._drop(hello.rank)
        self._ended_s.pop(hello.rank, None)
        self._peers[hello.rank] = PeerConnection(connection, hello.rank, hello.process)
        self._selector.register(connection, selectors.EVENT_READ, partial(self._look_at, hello.rank))

    def _drop(self, rank: int) -> None:
        peer = self._peers.pop(rank)
        with suppress(KeyError):  # it has gone on to its first call
            self._selector.unregister(peer.connection)
        peer.close()

    def _look_at(self, rank: int, connection: socket.socket) -> None:
        """See whether a rank that has come gives up, or has to come again because its connection has ended."""
        try:
            seen = connection.recv(SMALL_BODY, socket.MSG_PEEK)
        except OSError:
            seen = b""
        if not seen:
            self._drop(rank)
            self._ended_s[rank] = time.monotonic()
            return
        first = next(FrameReader().feed(seen), None)
        if first is not None and (first.kind, first.number) == (Kind.REFUSAL, 0):
            raise _given_up(rank, f": {first.body.decode(errors='replace')}")
        if first is not None or len(seen) == SMALL_BODY:  # its first call
            self._selector.unregister(connection)


def _given_up(rank: int, why: str) -> AgreementError:
    return AgreementError(f"rank {rank} gave up while the ranks met for their first step{why}")
