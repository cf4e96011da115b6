"""Ranks find each other through a store, and nobody else gets in."""

from __future__ import annotations

import os
import select
import socket
import threading
from datetime import timedelta
from itertools import groupby
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.health.links import links
from bpipe.comm.rendezvous import meeting
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.interruptible import GivenUpError
from bpipe.comm.rendezvous.meeting import Hello, OtherPipelineError, meet_peers
from bpipe.comm.rendezvous.peers import Peers, process_name
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError, CommError, is_printable
from tests.comm.meetings import meet, quietly, store, together
from tests.patience import PATIENCE_S, until

__all__ = ["store"]


KEPT = Frame(Kind.PROOF).pack()  # what a rank says once its hello is answered


def hello_of(rank: int, to: bytes, pipeline: int = 0) -> bytes:
    return Frame(Kind.HELLO, 0, encode(Hello(rank, pipeline, os.urandom(16), to, os.urandom(16)))).pack()


def endpoint_of(store: Any, rank: int) -> Endpoint:
    """Where a rank listens, once it does."""
    until(lambda: store.check([f"key/{rank}"]), f"rank {rank} says where it listens")
    return decode(Endpoint, store.get(f"key/{rank}"), "endpoint")


def close(found: list[Peers]) -> None:
    for one in found:
        for peer in one.connections:
            peer.close()


def test_each_rank_reaches_each_other(store):
    found = meet(store, 4)
    assert len({one.name for one in found}) == 4
    assert [[peer.rank for peer in one.connections] for one in found] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    for one in found:
        for peer in one.connections:
            peer.send(Frame(Kind.LEFT, 7))
    for one in found:
        for peer in one.connections:
            assert select.select([peer.connection], [], [], PATIENCE_S)[0]
            assert list(peer.reader.feed(peer.receive())) == [Frame(Kind.LEFT, 7)]
            peer.close()


class CountingStore:
    """A store that counts what it is asked."""

    def __init__(self, store: Any) -> None:
        self._store, self.num_set, self.num_found = store, 0, 0

    def set(self, key: str, value: bytes) -> None:
        self.num_set += 1
        self._store.set(key, value)

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        found = self._store.compare_set(key, expected, wanted)
        self.num_found += found != wanted.encode()
        return found


def test_of_many_ranks_each_reaches_only_its_links(store):
    size, stores = 16, [CountingStore(store) for _ in range(16)]
    found = together(
        [lambda r=r: meet_peers(stores[r], "key", r, size, quietly, links=links(r, size)) for r in range(size)],
    )
    assert [{peer.rank for peer in one.connections} for one in found] == [links(rank, size) for rank in range(size)]
    assert [one.num_set for one in stores] == [1] * size
    assert max(one.num_found for one in stores) <= len(links(0, size))
    close(found)


def test_meetings_over_one_store_do_not_mix(store):
    first = meet(store, 3)
    second = meet(store, 3)  # the first one's places are still in the store
    assert first[0].name != second[0].name
    for one in first + second:
        for peer in one.connections:
            peer.close()


def test_strangers_do_not_get_in(store):
    """Garbage, silence, another meeting's hello: the rank that is expected is taken, and nobody else."""
    stop, said = threading.Event(), list[bytes]()

    def disturb() -> None:
        while not stop.wait(0.005):
            if store.check(["key/0"]):
                port = decode(Endpoint, store.get("key/0"), "endpoint").places[0][1]
                for data in (
                    b"",
                    b"GET / HTTP/1.1\r\n\r\n" * 8,
                    Frame(Kind.HELLO, 0, encode(Hello(1, 0, *[os.urandom(16)] * 3))).pack(),
                ):
                    try:
                        with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                            stranger.sendall(data)
                            said.append(data)
                    except OSError:
                        continue

    disturber = threading.Thread(target=disturb)
    disturber.start()

    def meet_after_them() -> Peers:
        until(lambda: len(said) >= 30, "strangers come to rank 0, and each says one thing or another")
        return meet_peers(store, "key", 1, 2, quietly)

    try:
        found = together([lambda: meet_peers(store, "key", 0, 2, quietly), meet_after_them])
    finally:
        stop.set()
        disturber.join()
    assert [peer.process for one in found for peer in one.connections] == [process_name(os.getpid())] * 2
    for one in found:
        for peer in one.connections:
            peer.close()


@pytest.fixture
def _some_never_come(monkeypatch):
    """A rank that gives up waits for them, to tell them."""
    monkeypatch.setattr("bpipe.comm.rendezvous.farewell.TELL_S", 0.1)


@pytest.mark.usefixtures("_some_never_come")
def test_one_that_gives_up_is_missed_by_those_who_came(store):
    """Rank 1 gives up when rank 0 has come: rank 0 hears it, and waits no longer for rank 2."""

    def give_up(note: str) -> None:
        if note == "ranks [2] have not reached their first step":
            raise TimeoutError(note)

    first, second = together(
        [lambda: meet_peers(store, "key", 0, 3, quietly), lambda: meet_peers(store, "key", 1, 3, give_up)],
    )
    assert isinstance(first, CommError) and "rank 1 gave up while the ranks met for their first step: " in str(first)
    assert isinstance(second, TimeoutError)


@pytest.mark.usefixtures("_some_never_come")
def test_a_rank_that_says_where_it_is_and_is_not_there_is_named(store):
    store.set("key/0", encode(Endpoint((("127.0.0.1", 1),), "elsewhere", b"x" * 16)))
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        meet_peers(store, "key", 1, 2, note)
    assert "rank 0 listens at 127.0.0.1, port 1, of elsewhere, but does not answer there" in notes[-1]


def test_silent_connections_hold_up_nobody(store, monkeypatch):
    """More of them than a rank keeps; before, each one held it up for 5 s, and all for longer than `together` waits."""
    monkeypatch.setattr("bpipe.comm.rendezvous.incoming.MOST_SILENT", 8)
    silent: list[socket.socket] = []

    def meet_after_the_silent_ones() -> Peers:
        to = endpoint_of(store, 0)
        silent.extend(socket.create_connection(to.places[0]) for _ in range(20))
        return meet_peers(store, "key", 1, 2, quietly)

    found = together([lambda: meet_peers(store, "key", 0, 2, quietly), meet_after_the_silent_ones])
    close(found)
    assert all(connection.recv(1) == b"" for connection in silent)  # the rank has closed them, one way or the other
    for connection in silent:
        connection.close()


def test_a_call_that_ends_is_dropped_and_the_next_one_awaited(store, monkeypatch):
    """Rank 1 calls twice, and its first call ends without a word, as when nobody has answered it in time."""
    monkeypatch.setattr(meeting, "RETURN_S", PATIENCE_S)
    notes: list[str] = []  # of rank 0

    def call_twice() -> Peers:
        to = endpoint_of(store, 0)
        with socket.create_connection(to.places[0]) as first:
            first.sendall(hello_of(1, to.name) + KEPT)
            assert first.recv(1)  # rank 0 takes it for rank 1
        return meet_peers(store, "key", 1, 3, quietly)

    def come_when_it_has_returned() -> Peers:
        missing = ["ranks [1, 2] have not reached their first step", "ranks [2] have not reached their first step"] * 2
        until(lambda: [note for note, _ in groupby(notes[1:])] == missing, "rank 1 comes again")
        monkeypatch.setattr(meeting, "RETURN_S", 0.0)
        looks = len(notes)
        until(lambda: len(notes) > looks + 2, "rank 0 looks who has not come again in time")
        return meet_peers(store, "key", 2, 3, quietly)

    found = together([lambda: meet_peers(store, "key", 0, 3, notes.append), call_twice, come_when_it_has_returned])
    assert [[peer.rank for peer in one.connections] for one in found] == [[1, 2], [0, 2], [0, 1]]
    close(found)


@pytest.mark.usefixtures("_some_never_come")
def test_a_rank_that_ends_and_does_not_come_back_has_given_up(store, monkeypatch):
    monkeypatch.setattr("bpipe.comm.rendezvous.meeting.RETURN_S", 0.2)

    def end() -> None:
        to = endpoint_of(store, 0)
        with socket.create_connection(to.places[0]) as connection:
            connection.sendall(hello_of(1, to.name) + KEPT)
            assert connection.recv(1)

    first, _ = together([lambda: meet_peers(store, "key", 0, 3, quietly), end])
    assert isinstance(first, AgreementError)
    assert "rank 1 gave up while the ranks met for their first step, or its process ended" in str(first)


def test_who_answers_nothing_is_called_no_longer_once_the_rank_is_elsewhere(store):
    """A stranger listens at the port of an earlier pipeline's rank 0."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        store.set("key/0", encode(Endpoint((stranger.getsockname(),), "", b"x" * 16)))
        called: list[Any] = []
        found = together(
            [
                lambda: (called.append(stranger.accept()), meet_peers(store, "key", 0, 2, quietly))[1],
                lambda: meet_peers(store, "key", 1, 2, quietly),
            ]
        )
        close(found)
        called[0][0].close()


@pytest.mark.parametrize("rank", [0, 3, -1])
def test_a_rank_that_there_is_not_does_not_get_in(store, rank):
    answers: list[bytes] = []

    def call() -> bytes:
        to = endpoint_of(store, 0)
        with socket.create_connection(to.places[0]) as connection:
            connection.sendall(hello_of(rank, to.name))
            return connection.recv(1)  # nothing, because there is no answer

    found = together(
        [
            lambda: meet_peers(store, "key", 0, 3, quietly),
            lambda: (answers.append(call()), meet_peers(store, "key", 1, 3, quietly))[1],
            lambda: (answers.append(call()), meet_peers(store, "key", 2, 3, quietly))[1],
        ]
    )
    assert answers == [b"", b""]
    assert [[peer.rank for peer in one.connections] for one in found] == [[1, 2], [0, 2], [0, 1]]
    close(found)


def test_ranks_that_count_pipelines_differently_both_say_so(store):
    found = together([lambda rank=rank: meet_peers(store, "key", rank, 2, quietly, pipeline=rank + 4) for rank in range(2)])
    assert [type(error) for error in found] == [OtherPipelineError] * 2
    assert [error.theirs for error in found] == [5, 4]
    assert all("rank 0 has 4, rank 1 has 5" in str(error) for error in found)


@pytest.mark.parametrize("address, port", [("a\0b", 1), ("\u20ac" * 80, 1), ("localhost", 1), ("127.0.0.1", 0), ("::1", 2**40)])
def test_a_malformed_place_in_the_store_is_no_place(store, address, port):
    store.set("key/0", encode(Endpoint(((address, port),), "host", bytes(16))))
    with pytest.raises(GivenUpError, match=r"ranks \[0\] have not reached"):
        meet_peers(store, "key", 1, 2, after(3))


def after(number: int):
    """Return a check that gives up at the given call."""
    calls = iter(range(1, number))

    def check(what: str) -> None:
        if next(calls, None) is None:
            raise GivenUpError(what)

    return check


def test_a_lost_store_is_an_error_of_our_own(store):
    class Lost:
        """A store whose host has ended."""

        def compare_set(self, *words: str) -> bytes:
            raise dist.DistNetworkError("Broken pipe\x1b[31m")

        def set(self, key: str, value: bytes) -> None: ...

    with pytest.raises(CommError, match=r"the store of torch.distributed does not answer") as caught:
        meet_peers(Lost(), "key", 1, 2, quietly)
    assert isinstance(caught.value.__cause__, dist.DistNetworkError) and is_printable(str(caught.value))


def test_what_a_store_says_when_its_host_has_ended():
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=PATIENCE_S))
    del host
    with pytest.raises(CommError, match=r"the store of torch.distributed does not answer"):
        meet_peers(client, "key", 1, 2, after(500))
