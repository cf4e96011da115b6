"""Ranks find each other through a store, and nobody else gets in; and the line over their connections."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpipe.comm.health.control import Collective, Line
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.watchdog import Timeouts
from bpipe.comm.rendezvous.addresses import own_address
from bpipe.comm.rendezvous.peers import HELLO, Mesh, open_mesh, process_name
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError

TIMEOUTS = Timeouts(60.0, 30.0)


def quietly(_: str) -> None:
    """Wait on."""


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads of their own, side by side; errors are results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return dist.HashStore()


def meshes(store: Any, size: int, check: Callable[[str], None] = quietly) -> list[Mesh]:
    return together([lambda rank=rank: open_mesh(store, "key", rank, size, check) for rank in range(size)])


@contextmanager
def lines(store: Any, size: int) -> Iterator[list[Line]]:
    released: list[int] = []
    made = [Line(mesh, rank, lambda: released.append(1), TIMEOUTS) for rank, mesh in enumerate(meshes(store, size))]
    try:
        yield made
    finally:
        for line in made:
            line.close()


def test_each_rank_reaches_each_other(store):
    found = meshes(store, 4)
    assert len({mesh.token for mesh in found}) == 1
    assert [[peer.rank for peer in mesh.peers] for mesh in found] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]
    for mesh in found:
        for peer in mesh.peers:
            peer.send(Frame(Kind.LEFT, 7))
    for mesh in found:
        for peer in mesh.peers:
            assert list(peer.reader.feed(peer.receive())) == [Frame(Kind.LEFT, 7)]
            peer.close()


def test_meetings_over_one_store_do_not_mix(store):
    first = meshes(store, 3)
    second = meshes(store, 3)  # the first one's places are still in the store
    assert first[0].token != second[0].token
    for mesh in first + second:
        for peer in mesh.peers:
            peer.close()


def test_strangers_do_not_get_in(store):
    """Garbage, silence, another mesh's hello: the rank that is expected is taken, and nobody else."""
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
                lambda: open_mesh(store, "key", 0, 2, quietly),
                lambda: (time.sleep(0.3), open_mesh(store, "key", 1, 2, quietly))[1],
            ]
        )
    finally:
        stop.set()
        disturber.join()
    assert [peer.process for mesh in found for peer in mesh.peers] == [process_name(os.getpid())] * 2
    for mesh in found:
        for peer in mesh.peers:
            peer.close()


def test_one_that_gives_up_is_missed_by_those_who_came(store):
    """Rank 1 gives up when rank 0 has come: rank 0 hears it, and waits no longer for rank 2."""
    began = time.monotonic()

    def give_up(note: str) -> None:
        if time.monotonic() - began > 0.5:
            raise TimeoutError(note)

    first, second = together(
        [lambda: open_mesh(store, "key", 0, 3, quietly), lambda: open_mesh(store, "key", 1, 3, give_up)],
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
        open_mesh(store, "key", 1, 2, note)
    assert "rank 0 waits at 127.0.0.1, port 1, of elsewhere, and does not answer there" in notes[-1]


def test_the_address_is_that_of_the_interface_or_the_way_to_the_store(monkeypatch):
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address(dist.HashStore()).text == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch")
    assert own_address(dist.PrefixStore("a", dist.PrefixStore("b", tcp))).text == "127.0.0.1"


# The line


def test_calls_give_every_rank_s_bytes_to_all(store):
    with lines(store, 3) as made:
        for payload in (b"", b"x" * 3_000_000):
            told = together(
                [
                    lambda line=line, r=r, end=payload: line.exchange(Collective.STEP, bytes([r]) + end)
                    for r, line in enumerate(made)
                ]
            )
            assert told == [[bytes([r]) + payload for r in range(3)]] * 3


def test_different_calls_are_refused_and_break_nothing(store):
    with lines(store, 2) as made:
        told = together([lambda: made[0].exchange(Collective.STEP, b""), lambda: made[1].exchange(Collective.TRACE, b"")])
        assert [str(error) for error in told] == [
            "rank 1 starts a trace while this one runs a step: make the same calls on all ranks",
            "rank 0 runs a step while this one starts a trace: make the same calls on all ranks",
        ]
        made[1].refuse("no target")
        with pytest.raises(AgreementError, match="rank 1 cannot run this step: no target"):
            made[0].exchange(Collective.STEP, b"")
        assert together([lambda line=line: line.exchange(Collective.PLAN, b"a") for line in made]) == [[b"a", b"a"]] * 2


def test_a_refusal_does_not_wait_for_those_who_have_not_come(store):
    with lines(store, 3) as made:
        made[2].refuse("no")
        began = time.monotonic()
        with pytest.raises(AgreementError, match="rank 2 cannot"):
            made[0].exchange(Collective.STEP, b"")  # rank 1 makes no call
        assert time.monotonic() - began < 1
        with pytest.raises(AgreementError, match="rank 2 cannot"):
            made[1].exchange(Collective.STEP, b"")
        assert together([lambda line=line: line.exchange(Collective.STEP, b"a") for line in made]) == [[b"a"] * 3] * 3


def test_a_failure_reaches_all_and_the_first_one_stays(store):
    with lines(store, 3) as made:
        error = ValueError("boom")
        assert made[1].broke(error, "stage 1, microbatch 2, action 1F2") is error
        made[1].fail(Failure(Cause.RAISED, 1, 0, "", "another"))
        with pytest.raises(RankFailedError, match=r"rank 1 failed in step 0, stage 1, microbatch 2, action 1F2: ValueError: boom"):
            made[0].exchange(Collective.STEP, b"")
        with pytest.raises(ValueError, match="boom"):
            made[1].check()


def test_one_that_leaves_is_told_apart_from_one_that_is_lost(store):
    with lines(store, 3) as made:
        made[2].activity.step = 5
        made[2].close()
        with pytest.raises(AgreementError, match="rank 2 closed this pipeline after 5 steps"):
            made[0].exchange(Collective.STEP, b"")
        made[1].peers[0].connection.shutdown(socket.SHUT_RDWR)  # as the kernel does when the process ends
        while made[0].failure is None:
            time.sleep(0.01)
        with pytest.raises(RankLostError, match="rank 1 was lost"):
            made[0].exchange(Collective.STEP, b"")


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_on_a_connection_fails_with_the_sender_s_name(data):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with lines(dist.HashStore(), 2) as made:
        whole = data.ljust(64, b"\xff")
        made[1].peers[0].connection.sendall(whole)
        with pytest.raises(AgreementError, match="rank 1 sent rank 0 something that is no message of bpipe"):
            made[0].exchange(Collective.STEP, b"")


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.TELL])
def test_a_sound_frame_with_a_senseless_body_fails_likewise(store, kind):
    with lines(store, 2) as made:
        made[1].peers[0].send(Frame(kind, 1, b"\xff" * 40))
        with pytest.raises(AgreementError, match="rank 1 sent rank 0 something that is no message"):
            made[0].exchange(Collective.STEP, b"")


def test_closing_gives_the_thread_and_the_connections_back(store):
    before = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with lines(store, 3):
        assert threading.active_count() == before[0] + 3
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == before
