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
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

from bpipe._version import __version__
from bpipe.cleanup import noted_on
from bpipe.comm.rendezvous.addresses import Endpoint, own_addresses, read_endpoint
from bpipe.comm.rendezvous.farewell import read_farewell, say_farewell
from bpipe.comm.rendezvous.incoming import IncomingConnections, serve
from bpipe.comm.rendezvous.interruptible import GivenUpError
from bpipe.comm.rendezvous.listening import Listeners
from bpipe.comm.rendezvous.outgoing import LOOK_S, OutgoingConnections
from bpipe.comm.rendezvous.peers import NAME_BYTES, PeerConnection, Peers, process_name
from bpipe.comm.rendezvous.secret import UNPROVED, difference, fingerprint, is_same, nonce, proof
from bpipe.comm.rendezvous.shortage import naming_shortage
from bpipe.comm.rendezvous.store import read, using_store
from bpipe.comm.wire.codec import decode, decode_text, encode
from bpipe.comm.wire.frames import SMALL_BODY, Frame, FrameReader, Kind
from bpipe.environment import INTERFACE_VARIABLES
from bpipe.errors import AgreementError, CommError, text_of

__all__: list[str] = []

GRACE_S = 0.5  # in which all ranks find that their secrets differ, before the first one leaves
RETURN_S = 5.0  # a rank whose connection has ended connects again within this time, if its process lives
LEAST_PAUSE_S, MOST_PAUSE_S = 0.001, 0.02  # between two looks at who has come
MANY = 64  # ranks: with more, each one looks less often, so that all together ask the store no more
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
        nonce: random bytes of this connection, if the speaker has a secret.
        proof: in an answer, that the speaker has it.
    """

    rank: int
    pipeline: int
    name: bytes
    to: bytes
    process: bytes
    nonce: bytes = b""
    proof: bytes = b""


def meet_peers(
    store: Any,
    key: str,
    rank: int,
    size: int,
    check: Callable[[str], None],
    *,
    links: Collection[int] | None = None,
    pipeline: int = 0,
    secret: bytes = b"",
) -> Peers:
    """Connect a rank to the ranks that it is linked with. Collective; blocks until these have come.

    Args:
        store: a store of torch.distributed that all ranks reach.
        key: the store's key that they use to find each other.
        check: called repeatedly with what is waited for; raises to give up.
        links: the ranks to connect to, which connect to this one; None for all others.
        pipeline: which of the group's pipelines this is.
        secret: by which the ranks know each other; empty if there is none.

    Raises:
        AgreementError: another rank opens a different pipeline, has a different secret or version of bpipe, or has given up in
            the meantime.
        CommError: the store does not answer, or this rank has run out of descriptors or memory.
    """
    links = {*range(size)} - {rank} if links is None else {*links}
    missing, seen = sorted(links), set[int]()
    try:
        with naming_shortage(), Listeners(own_addresses(store)) as listeners:
            name = os.urandom(NAME_BYTES)
            own = Endpoint(listeners.places, socket.gethostname(), name, fingerprint(secret, name))
            with _Meeting(store, key, rank, links, pipeline, secret, own, listeners) as meeting, naming_shortage():
                seen = meeting.seen
                check("it writes its addresses to the process group's store")
                with using_store():
                    store.set(f"{key}/{rank}", encode(own))
                pause_s = LEAST_PAUSE_S
                while missing := meeting.missing():
                    meeting.connect()
                    meeting.wait(pause_s)
                    check(meeting.describe(missing))
                    pause_s = min(2 * pause_s, MOST_PAUSE_S * max(1, size / MANY))
                return meeting.finish()
    except Exception as error:
        if not isinstance(error, GivenUpError | OtherPipelineError):  # of other pipelines both ranks learn by their hellos
            say_farewell(store, key, rank, {other: other in seen for other in missing}, text_of(error))
        raise


class _Meeting:
    """The connections of a rank while some are still missing; closed if the meeting fails."""

    def __init__(
        self,
        store: Any,
        key: str,
        rank: int,
        links: Collection[int],
        pipeline: int,
        secret: bytes,
        own: Endpoint,
        listeners: Listeners,
    ) -> None:
        self._store, self._key, self._rank, self._links, self._pipeline, self._own = store, key, rank, links, pipeline, own
        self._secret = secret
        self._differs: tuple[float, str] | None = None  # when a rank was found to have a different secret
        self._peers: dict[int, PeerConnection] = {}
        self._looked_s = time.monotonic()  # at whether one of those gives up who are to call this rank
        self._strange: set[int] = set()  # in whose place the store has something else
        self.seen: set[int] = set()  # whose endpoints it has, or had
        self._ended_s: dict[int, float] = {}  # when connections ended without a word, which may be an attempt that is made again
        self._selector = selectors.DefaultSelector()
        self._incoming = IncomingConnections(listeners.sockets, self._selector, len(links), self._on_hello)
        self._outgoing = OutgoingConnections(self._selector, self._find, self._first_word, self._on_answer)

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with noted_on(error):
            self._incoming.close(_refusal(error))
        with noted_on(error):
            self._outgoing.close(_refusal(error))
        refuse(self._peers.values(), error)
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
            strange = sorted(self._strange.intersection(missing))
            return f"{text}; ranks {strange} do not write as bpipe {__version__}: is it the same on all ranks?" if strange else text
        at = self._outgoing.endpoints[tried[0]]
        places = " and ".join(f"{address}, port {port}" for address, port in at.places)
        why = f" ({why})" if (why := self._outgoing.why_not(tried[0])) else ""
        return (
            f"{text}; rank {tried[0]} listens at {places}, of {at.host}, but does not answer there{why}: if ranks are on several "
            f"machines, set {INTERFACE_VARIABLES} to the interface between them, and BPIPE_PORT_RANGE to the "
            "ports that a firewall lets through"
        )

    def wait(self, most_s: float) -> None:
        """Take in what comes, until something does, but for `most_s` seconds at most.

        Raises:
            AgreementError: a rank opens a different pipeline, has a different secret, or has given up.
        """
        serve(self._selector, most_s)
        if self._differs is not None and time.monotonic() - self._differs[0] > GRACE_S:
            raise AgreementError(self._differs[1])
        for rank, ended_s in self._ended_s.items():
            if time.monotonic() - ended_s > RETURN_S:
                text = ", or its process ended, or the network was cut: its connection ended"
                raise _given_up(rank, f"{text}, and it has not come again in {RETURN_S:g} s")

    def connect(self) -> None:
        """Open connections to the missing ranks before this one, which have to accept those of the ranks after them.

        Raises:
            AgreementError: a missing rank gives up, or has another version of bpipe.
        """
        missing = self.missing()
        self._outgoing.open([other for other in missing if other < self._rank])
        if time.monotonic() - self._looked_s > LOOK_S:
            for other in missing:
                self._find(other)
            self._looked_s = time.monotonic()

    # Hellos

    def _find(self, other: int) -> Endpoint | None:
        with using_store():
            data = read(self._store, f"{self._key}/{other}")
        if data is None:
            return None
        try:
            endpoint = read_endpoint(data)
        except CommError:  # something else is under this key
            if (farewell := read_farewell(data)) is None:
                self._strange.add(other)
            elif self._own.name in farewell.to:
                raise _given_up(other, f": {farewell.why}") from None
            return None
        self._strange.discard(other)
        self.seen.add(other)
        if endpoint.version != __version__:
            raise AgreementError(
                f"rank {other} has bpipe {endpoint.version!r}, and rank {self._rank} has {__version__!r}: install the same "
                "version on all ranks"
            )
        return endpoint

    def _hello(self, to: bytes) -> Hello:
        return Hello(self._rank, self._pipeline, self._own.name, to, process_name(os.getpid()), nonce(self._secret))

    def _first_word(self, _: int, to: Endpoint) -> Frame:
        return Frame(Kind.HELLO, 0, encode(self._hello(to.name)))

    def _on_hello(self, connection: socket.socket, frame: Frame) -> None:
        """Answer, if this is a rank after this one that knows this one's name in this meeting."""
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                hello = decode(Hello, frame.body, "hello")
                if hello.to != self._own.name or hello.rank not in self._links or hello.rank < self._rank:
                    return
                # Before the answer: a rank that finds its secret to differ leaves, and removes what it has published.
                published = self._find(hello.rank) if self._secret or hello.nonce else None
                answer = self._hello(hello.name)
                said = frame.body, encode(answer)
                connection.sendall(Frame(Kind.HELLO, 0, encode(answer._replace(proof=proof(self._secret, "answer", *said)))).pack())
            except (OSError, CommError):
                return
            if bool(hello.nonce) != bool(self._secret):
                self._check_secret(hello.rank, hello.name, published)
                return
            unless_done.pop_all()
        # Its proof, empty without a secret, also says that it has this answer, and calls at no other place any more.
        self._incoming.expect_proof(connection, partial(self._on_proof, hello, published, proof(self._secret, "call", *said)))

    def _on_proof(self, hello: Hello, published: Endpoint | None, expected: bytes, connection: socket.socket, frame: Frame) -> None:
        if is_same(frame.body, expected):
            self._admit(hello, connection)
        else:
            connection.close()
            self._check_secret(hello.rank, hello.name, published)

    def _on_answer(self, connection: socket.socket, other: int, to: Endpoint, said: bytes, frame: Frame) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
            try:
                place = connection.getpeername()[:2]
                hello = decode(Hello, frame.body, "hello")
                if (hello.rank, hello.name, hello.to) != (other, to.name, self._own.name):
                    self._outgoing.was_wrong(other, place, "who answers there is in another meeting")
                    return
                both = said, encode(hello._replace(proof=b""))
                # Also to a rank with a different secret, so that it notices.
                connection.sendall(Frame(Kind.PROOF, 0, proof(self._secret, "call", *both)).pack())
            except (OSError, CommError):
                return
            if bool(hello.nonce) != bool(self._secret) or not is_same(hello.proof, proof(self._secret, "answer", *both)):
                self._outgoing.was_wrong(other, place, UNPROVED)
                self._check_secret(other, hello.name, to)
                return
            unless_done.pop_all()
        self._admit(hello, connection)

    def _check_secret(self, other: int, name: bytes, endpoint: Endpoint | None) -> None:
        """Take note that a rank's secret differs, if it says so in the store, too; else a stranger has come in its name."""
        if self._differs is None and endpoint is not None and endpoint.name == name:
            text = difference(self._secret, self._rank, other, endpoint)
            self._differs = (time.monotonic(), text) if text else None

    def _admit(self, hello: Hello, connection: socket.socket) -> None:
        with ExitStack() as unless_done:
            unless_done.callback(connection.close)
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
        except BlockingIOError:
            return
        except OSError:
            seen = b""
        if not seen:
            self._drop(rank)
            self._ended_s[rank] = time.monotonic()
            return
        first = next(FrameReader().feed(seen), None)
        if first is not None and (first.kind, first.number) == (Kind.REFUSAL, 0):
            raise _given_up(rank, f": {decode_text(first.body)}")
        if first is not None or len(seen) == SMALL_BODY:  # its first call
            self._selector.unregister(connection)


def _refusal(error: BaseException | None) -> Frame:
    return Frame(Kind.REFUSAL, 0, b"" if error is None else text_of(error).encode(errors="replace")[:MAX_REASON_BYTES])


def refuse(peers: Iterable[PeerConnection], error: BaseException | None) -> None:
    """Close connections to ranks that have come, after a word to them why this rank gives up before its first step."""
    for peer in peers:
        with noted_on(error):
            peer.send(_refusal(error))
        with noted_on(error):
            peer.close()


def _given_up(rank: int, why: str) -> AgreementError:
    return AgreementError(f"rank {rank} gave up while the ranks met for their first step{why}")
