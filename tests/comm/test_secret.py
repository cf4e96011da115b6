"""Ranks that share a secret let in nobody else, whatever that one has overheard; ranks whose secrets differ all say so."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
import torch

from bpipe.comm.health.collective import Collective
from bpipe.comm.rendezvous import farewell, meeting, outgoing
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.meeting import Hello, meet_peers
from bpipe.comm.rendezvous.peers import Peers, process_name
from bpipe.comm.rendezvous.secret import channel_proof, difference, fingerprint, proof
from bpipe.comm.transport import connect
from bpipe.comm.transport.c10d import C10dTransport
from bpipe.comm.transport.connect import open_connections
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, FrameReader, Kind
from bpipe.errors import AgreementError, CommError, TransferError
from bpipe.schedules import Channel, Purpose
from tests.comm.meetings import quietly, store, together
from tests.comm.test_connect import HERE, TOKEN, Line, Together
from tests.comm.test_peers import close, endpoint_of
from tests.patience import PATIENCE_S, until
from tests.ranks import run_ranks

__all__ = ["store"]

OURS, THEIRS = b"open sesame", b"open barley"


def meet(store: Any, secrets: list[bytes]) -> list[Any]:
    def on_rank(rank: int) -> Peers:
        return meet_peers(store, "key", rank, len(secrets), quietly, secret=secrets[rank])

    return together([partial(on_rank, rank) for rank in range(len(secrets))])


def test_ranks_with_the_same_secret_meet(store: Any) -> None:
    found = meet(store, [OURS] * 4)
    assert [[peer.rank for peer in one.connections] for one in found] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    close(found)


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("right, wrong", [(OURS, THEIRS), (OURS, b""), (b"", OURS)], ids=["differs", "lacks it", "has it"])
def test_ranks_whose_secrets_differ_all_say_so(
    store: Any, odd: int, right: bytes, wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one leaves when all have found the difference: by the clock a busy machine may be too late for that."""
    monkeypatch.setattr(meeting, "GRACE_S", PATIENCE_S)
    monkeypatch.setattr("bpipe.comm.rendezvous.farewell.TELL_S", 0.1)  # who has found it needs not be told
    has_found, check = set[int](), meeting._Meeting._check_secret

    def checks(self: Any, *args: Any) -> None:
        check(self, *args)
        has_found.update({self._rank} if self._differs else ())
        if len(has_found) == 3:
            monkeypatch.setattr(meeting, "GRACE_S", 0.0)

    monkeypatch.setattr(meeting._Meeting, "_check_secret", checks)
    found = meet(store, [wrong if rank == odd else right for rank in range(3)])
    for error in found:
        assert isinstance(error, AgreementError)
        assert "BPIPE_SECRET to the same text on all ranks" in str(error) and f"{odd}" in str(error)
        assert ("different secrets" if right and wrong else "has none") in str(error)
        assert OURS.decode() not in str(error)


class Slow:
    """A store that takes longer to answer a rank than another one stays that has found a difference."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def compare_set(self, *words: str) -> bytes:
        time.sleep(0.15)
        found: bytes = self._store.compare_set(*words)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("secrets", [(OURS, THEIRS), (OURS, b""), (b"", OURS)], ids=["differs", "lacks it", "has it"])
def test_a_busy_rank_sees_the_difference_though_the_other_one_has_left(
    store: Any, secrets: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GRACE_S", 0.05)
    monkeypatch.setattr(farewell, "TELL_S", 0.0)
    monkeypatch.setattr(outgoing, "LOOK_S", PATIENCE_S)  # the one who leaves does not call again before it is answered

    def leaves() -> Peers:
        try:
            return meet_peers(store, "key", 1, 2, quietly, secret=secrets[1])
        finally:
            store.delete_key("key/1")

    found = together([lambda: meet_peers(Slow(store), "key", 0, 2, quietly, secret=secrets[0]), leaves])
    assert all(isinstance(error, AgreementError) for error in found), found


STALLS = {  # a rank, and after what it stands still until the other one has found the difference, and left
    "the caller, after its hello": (1, outgoing.OutgoingConnections, "_speak"),
    "the called one, after its answer": (0, meeting._Meeting, "_on_hello"),
}


@pytest.mark.parametrize("secrets", [(OURS, THEIRS), (OURS, b""), (b"", OURS)], ids=["differs", "lacks it", "has it"])
@pytest.mark.parametrize("who, of, name", STALLS.values(), ids=STALLS)
def test_a_rank_that_stood_still_hears_of_the_difference(
    store: Any, who: int, of: Any, name: str, secrets: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own connection has the answer, if not yet the other one, although the other's key is gone from the store."""
    monkeypatch.setattr(meeting, "GRACE_S", 0.0)
    monkeypatch.setattr(farewell, "TELL_S", 0.0)
    has_left, threads, make = threading.Event(), dict[int, int](), getattr(of, name)

    def stalls(self: Any, *args: Any) -> Any:
        result = make(self, *args)
        if threads[who] == threading.get_ident():
            has_left.wait(0.6)
            time.sleep(0.4)  # longer than a caller waits at one of several places
        return result

    def on_rank(rank: int) -> Peers:
        threads[rank] = threading.get_ident()
        try:
            return meet_peers(store, "key", rank, 2, quietly, secret=secrets[rank])
        finally:
            store.delete_key(f"key/{rank}")
            if rank != who:
                has_left.set()

    monkeypatch.setattr(of, name, stalls)
    found = together([partial(on_rank, rank) for rank in range(2)])
    assert all(isinstance(error, AgreementError) and "BPIPE_SECRET" in str(error) for error in found), found


def test_what_a_rank_publishes_tells_which_of_the_two_differs() -> None:
    there = Endpoint((), name=b"n" * 16, fingerprint=fingerprint(OURS, b"n" * 16))
    assert difference(OURS, 0, 1, there) == ""
    assert difference(THEIRS, 3, 1, there).startswith("ranks 1 and 3 have different secrets")
    assert difference(b"", 0, 1, there).startswith("rank 1 has a secret, and rank 0 has none")
    assert difference(OURS, 0, 1, Endpoint((), name=b"n")).startswith("rank 0 has a secret, and rank 1 has none")
    assert difference(b"", 0, 1, Endpoint((), name=b"n")) == ""


def test_proofs_tell_roles_parts_and_secrets_apart() -> None:
    args = [(OURS, "call", b"ab", b"c"), (OURS, "call", b"a", b"bc"), (OURS, "answer", b"ab", b"c"), (THEIRS, "call", b"ab", b"c")]
    assert len({proof(*each) for each in args}) == len(args)
    ends = [(0, (0, 1), "sender"), (0, (1, 0), "sender"), (1, (0, 1), "sender"), (0, (0, 1), "receiver")]
    assert len({channel_proof(OURS, role, TOKEN, index, pair, [b"a", b"b"]) for index, pair, role in ends}) == len(ends)


# Strangers who can read the store, and so know the names


Talk = Callable[[socket.socket, Endpoint], None]


def hello_to(to: Endpoint, nonce: bytes = b"n" * 16, name: bytes = b"m" * 16) -> Frame:
    return Frame(Kind.HELLO, 0, encode(Hello(1, 0, name, to.name, b"p" * 16, nonce)))


def heard(connection: socket.socket) -> Frame:
    reader = FrameReader()
    while True:
        connection.settimeout(PATIENCE_S)
        data = connection.recv(4096)
        assert data
        for frame in reader.feed(data):
            return frame


def is_hung_up_on(connection: socket.socket) -> None:
    """Wait until the other end has closed a connection."""
    connection.settimeout(PATIENCE_S)
    with suppress(ConnectionError):
        while connection.recv(4096):
            pass


def without_a_nonce(connection: socket.socket, to: Endpoint) -> None:
    connection.sendall(hello_to(to, b"").pack())


def without_a_proof(connection: socket.socket, to: Endpoint) -> None:
    connection.sendall(hello_to(to).pack() + Frame(Kind.CALL, 1, b"\1x").pack())


def with_another_proof(connection: socket.socket, to: Endpoint) -> None:
    hello = hello_to(to)
    connection.sendall(hello.pack())
    answer = decode(Hello, heard(connection).body, "hello")
    said = hello.body, encode(answer._replace(proof=b""))
    connection.sendall(Frame(Kind.PROOF, 0, proof(THEIRS, "call", *said)).pack())


def with_the_answer_s_proof(connection: socket.socket, to: Endpoint) -> None:
    connection.sendall(hello_to(to).pack())
    answer = decode(Hello, heard(connection).body, "hello")
    connection.sendall(Frame(Kind.PROOF, 0, answer.proof).pack())


def with_an_overheard_proof(connection: socket.socket, to: Endpoint) -> None:
    """What a true rank once said on another connection."""
    hello = hello_to(to)
    connection.sendall(hello.pack())
    heard(connection)
    earlier = encode(Hello(0, 0, to.name, b"m" * 16, b"p" * 16, b"another nonce"))
    connection.sendall(Frame(Kind.PROOF, 0, proof(OURS, "call", hello.body, earlier)).pack())


def with_an_empty_proof(connection: socket.socket, to: Endpoint) -> None:
    connection.sendall(hello_to(to).pack() + Frame(Kind.PROOF, 0, b"").pack())


TALKS = [
    *(without_a_nonce, without_a_proof, with_another_proof),
    *(with_the_answer_s_proof, with_an_overheard_proof, with_an_empty_proof),
]


@pytest.mark.parametrize("talk", TALKS, ids=lambda talk: talk.__name__)
def test_a_stranger_who_knows_the_names_does_not_get_in_and_ends_nothing(
    store: Any, talk: Talk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "GRACE_S", 0.0)  # a difference of secrets ends the meeting at once
    looks: list[str] = []

    def on_rank_1() -> Peers:
        to = endpoint_of(store, 0)
        store.set("key/1", encode(Endpoint((), name=b"m" * 16, fingerprint=fingerprint(OURS, b"m" * 16))))
        for _ in range(3):
            with socket.create_connection(to.places[0], timeout=PATIENCE_S) as connection:
                talk(connection, to)
                is_hung_up_on(connection)
        num_looks = len(looks)
        until(lambda: len(looks) > num_looks + 2, "rank 0 goes on, unless a difference of secrets has ended the meeting")
        return meet_peers(store, "key", 1, 2, quietly, secret=OURS)

    found = together([lambda: meet_peers(store, "key", 0, 2, looks.append, secret=OURS), on_rank_1])
    assert [peer.process for one in found for peer in one.connections] == [process_name(os.getpid())] * 2
    close(found)


def test_with_the_secret_the_same_stranger_gets_in(store: Any) -> None:
    """So that the test before this one shows what it says."""

    def call(stays: ExitStack) -> None:
        to = endpoint_of(store, 0)
        connection = stays.enter_context(socket.create_connection(to.places[0], timeout=PATIENCE_S))
        hello = hello_to(to)
        connection.sendall(hello.pack())
        answer = decode(Hello, heard(connection).body, "hello")
        said = hello.body, encode(answer._replace(proof=b""))
        assert answer.proof == proof(OURS, "answer", *said)
        connection.sendall(Frame(Kind.PROOF, 0, proof(OURS, "call", *said)).pack())

    with ExitStack() as stays:
        found, said = together([lambda: meet_peers(store, "key", 0, 2, quietly, secret=OURS), partial(call, stays)])
    assert said is None
    assert [peer.process for peer in found.connections] == [b"p" * 16]
    close([found])


def test_one_who_answers_in_a_rank_s_place_is_not_believed(store: Any) -> None:
    """He has the rank's address, and knows its name from the store; the rank itself has another address besides."""
    answered: list[bytes] = []

    def impostor(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            said = decode(Hello, heard(connection).body, "hello")
            mine = Hello(0, 0, said.to, said.name, b"p" * 16, b"n" * 16, b"f" * 32)
            connection.sendall(Frame(Kind.HELLO, 0, encode(mine)).pack())
            answered.append(said.name)
            is_hung_up_on(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:

        class Hijacked:
            def compare_set(self, key: str, *_: str) -> bytes:
                endpoint = decode(Endpoint, store.get(key), "endpoint")
                return encode(endpoint._replace(places=(listener.getsockname(), *endpoint.places)))

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        first, second, _ = together(
            [
                lambda: meet_peers(store, "key", 0, 2, quietly, secret=OURS),
                lambda: meet_peers(Hijacked(), "key", 1, 2, quietly, secret=OURS),
                lambda: impostor(listener),
            ]
        )
    assert answered and [peer.process for one in (first, second) for peer in one.connections] == [process_name(os.getpid())] * 2
    close([first, second])


# Channels

ENDS = [(0, 1), (1, 0)]


def opened(secrets: list[bytes], says: Sequence[bytes] = ()) -> list[Any]:
    group = Together(2)

    def on_rank(rank: int) -> dict[int, socket.socket]:
        return open_connections(ENDS, rank, HERE, TOKEN, Line(group, rank, says), quietly, secret=secrets[rank])

    found = together([partial(on_rank, rank) for rank in range(2)])
    for stranger in group.strangers:
        stranger.close()
    return found


def test_channels_open_between_those_who_have_the_secret() -> None:
    says = [Frame(Kind.HELLO, index, body).pack() for index in (0, 1, 7) for body in (TOKEN, b"", b"x" * 32)]
    found = opened([OURS, OURS], says)
    for index, (sender, receiver) in enumerate(ENDS):
        found[sender][index].sendall(b"%d" % index)
        assert found[receiver][index].recv(1) == b"%d" % index
    for of_rank in found:
        for connection in of_rank.values():
            connection.close()


def test_who_knows_the_token_alone_opens_no_channel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "REACH_S", 0.3)
    monkeypatch.setattr(outgoing, "FIRST_S", PATIENCE_S)  # a busy machine may take longer to say hello
    told = [str(error) for error in opened([OURS, THEIRS]) if isinstance(error, TransferError)]
    assert len(told) == 2
    # One of them may come after the other has given up.
    assert any("who answers there has not proved that it has the secret in BPIPE_SECRET" in text for text in told)


class Answering:
    """What a rank that opens channels asks of another one, which is played here: it has the token, and not the secret."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.heard: list[bytes] = []

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        return [encode(Endpoint((self.listener.getsockname(),), name=b"n" * 16)), data]

    def answer(self, proof_of: Callable[[bytes, bytes], bytes]) -> None:
        connection, _ = self.listener.accept()
        self.listener.close()
        with connection:
            hello = heard(connection)
            mine = connect._Hello(0, b"", b"m" * 16)
            said = proof_of(hello.body, encode(mine))
            connection.sendall(Frame(Kind.HELLO, 0, encode(mine._replace(proof=said))).pack() + Frame(Kind.PROOF, 0).pack())
            with suppress(OSError, CommError):
                self.heard.append(heard(connection).body)


@pytest.mark.parametrize("key, is_let_in", [(TOKEN, False), (TOKEN + THEIRS, False), (TOKEN + OURS, True)])
def test_one_who_accepts_in_a_rank_s_place_is_believed_with_the_secret_alone(
    key: bytes, is_let_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "REACH_S", 0.2)
    monkeypatch.setattr(outgoing, "FIRST_S", PATIENCE_S)
    played: Any = Answering()
    with played.listener:
        opened, _ = together(
            [
                lambda: open_connections([(1, 0)], 1, HERE, TOKEN, played, quietly, secret=OURS),
                lambda: played.answer(lambda *said: proof(key, "answer", *said)),
            ]
        )
    assert bool(played.heard) == is_let_in
    if is_let_in:
        opened[0].close()
    else:
        assert "rank 0 cannot be reached at 127.0.0.1" in str(opened)


# Processes


def with_secrets(rank: int, secrets: list[str]) -> str:
    os.environ["BPIPE_SECRET"] = secrets[rank]
    meeting.GRACE_S = 5.0  # on a busy machine a rank may find only then that secrets differ
    transport, channel = C10dTransport(None, torch.device("cpu")), Channel(Purpose.FORWARD, 0, 1)
    try:
        transport.exchange(Collective.STEP, b"")
        transport.connect([channel, Channel(Purpose.BACKWARD, 1, 0)], (0, 1))
    except CommError as error:
        return str(error)
    if rank == 0:
        transport.send(channel, [torch.ones(1)]).wait()
        return "sent"
    received = torch.zeros(1)
    transport.receive(channel, [received]).wait()
    return f"received {received.item():g}"


def test_processes_with_a_secret() -> None:
    assert run_ranks(with_secrets, 2, ["one", "one"]) == ["sent", "received 1"]
    (told,) = set(run_ranks(with_secrets, 2, ["one", ""]))
    assert told.startswith("rank 0 has a secret, and rank 1 has none: set the environment variable BPIPE_SECRET")
