"""Ranks find each other through a store, and nobody else gets in."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest
import torch.distributed as dist

from bpipe.comm.rendezvous.addresses import own_address
from bpipe.comm.rendezvous.peers import HELLO, meet_peers, process_name
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import CommError
from tests.comm.meetings import meet, quietly, store, together

__all__ = ["store"]


def test_each_rank_reaches_each_other(store):
    found = meet(store, 4)
    assert len({one.token for one in found}) == 1
    assert [[peer.rank for peer in one.connections] for one in found] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    for one in found:
        for peer in one.connections:
            peer.send(Frame(Kind.LEFT, 7))
    for one in found:
        for peer in one.connections:
            assert list(peer.reader.feed(peer.receive())) == [Frame(Kind.LEFT, 7)]
            peer.close()


def test_meetings_over_one_store_do_not_mix(store):
    first = meet(store, 3)
    second = meet(store, 3)  # the first one's places are still in the store
    assert first[0].token != second[0].token
    for one in first + second:
        for peer in one.connections:
            peer.close()


def test_strangers_do_not_get_in(store):
    """Garbage, silence, another meeting's hello: the rank that is expected is taken, and nobody else."""
    stop = threading.Event()

    def disturb() -> None:
        while not stop.wait(0.005):
            if store.check(["key/0"]):
                port = struct.unpack_from("<16sH", store.get("key/0"))[1]
                for data in (b"", b"GET / HTTP/1.1\r\n\r\n" * 8, HELLO.pack(b"bpmesh\0\2", 1, 0, *[os.urandom(16)] * 3)):
                    try:
                        with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                            stranger.sendall(data)
                    except OSError:
                        continue

    disturber = threading.Thread(target=disturb)
    disturber.start()
    time.sleep(0.05)
    try:
        found = together(
            [
                lambda: meet_peers(store, "key", 0, 2, quietly),
                lambda: (time.sleep(0.3), meet_peers(store, "key", 1, 2, quietly))[1],
            ]
        )
    finally:
        stop.set()
        disturber.join()
    assert [peer.process for one in found for peer in one.connections] == [process_name(os.getpid())] * 2
    for one in found:
        for peer in one.connections:
            peer.close()


def test_one_that_gives_up_is_missed_by_those_who_came(store):
    """Rank 1 gives up when rank 0 has come: rank 0 hears it, and waits no longer for rank 2."""
    began = time.monotonic()

    def give_up(note: str) -> None:
        if time.monotonic() - began > 0.5:
            raise TimeoutError(note)

    first, second = together(
        [lambda: meet_peers(store, "key", 0, 3, quietly), lambda: meet_peers(store, "key", 1, 3, give_up)],
    )
    assert isinstance(first, CommError) and "rank 1 gave up" in str(first)
    assert isinstance(second, TimeoutError) and "ranks [2] have not come" in str(second)
    assert time.monotonic() - began < 5


def test_a_rank_that_says_where_it_is_and_is_not_there_is_named(store):
    store.set("key/0", struct.pack("<16sH", b"x" * 16, 1) + b"127.0.0.1 elsewhere")
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if len(notes) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        meet_peers(store, "key", 1, 2, note)
    assert "rank 0 waits at 127.0.0.1, port 1, of elsewhere, and does not answer there" in notes[-1]


def test_the_address_is_that_of_the_interface_or_the_way_to_the_store(monkeypatch):
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address(dist.HashStore()).text == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch")
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", tcp))).text == "127.0.0.1"
