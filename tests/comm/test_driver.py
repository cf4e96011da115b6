"""The control plane over connections: calls, failures, ranks that leave or are lost, and bytes that are not a bpipe message."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, islice
from selectors import EVENT_WRITE
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bpipe.comm.health import driver
from bpipe.comm.health.activity import Activity
from bpipe.comm.health.collective import Collective, Objection
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.gather import Part, most_given, most_in_part
from bpipe.comm.health.membership import STATUS
from bpipe.comm.health.watchdog import ASKING, Timeouts
from bpipe.comm.rendezvous.peers import MOST_WAITING
from bpipe.comm.wire.frames import HEAD, MAGIC, VERSION, Frame, Kind
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError
from tests.comm.meetings import meet, store, together
from tests.patience import PATIENCE_S, ended, too_late, until
from tests.tiers import examples

__all__ = ["store"]

TIMEOUTS = Timeouts(60.0, 30.0)


@contextmanager
def planes(store: Any, size: int) -> Iterator[list[ConnectedControlPlane]]:
    met = meet(store, size, linked=True)
    made = [ConnectedControlPlane(one.connections, rank, size, lambda: None, TIMEOUTS) for rank, one in enumerate(met)]
    try:
        yield made
    finally:
        for plane in made:
            plane.close()


def begin_a_trace(made: Sequence[ConnectedControlPlane]) -> None:
    """So that there may be something to gather."""
    together([lambda plane=plane: plane.exchange(Collective.TRACE, b"") for plane in made])


def test_calls_give_every_rank_s_bytes_to_all(store):
    with planes(store, 3) as made:
        begin_a_trace(made)
        for payload in (b"", b"x" * 3_000_000):
            found = together(
                [
                    lambda plane=plane, r=r, end=payload: plane.exchange(Collective.GATHER, bytes([r]) + end)
                    for r, plane in enumerate(made)
                ]
            )
            assert found == [[bytes([r]) + payload for r in range(3)]] * 3


def test_different_calls_are_refused_and_break_nothing(store):
    with planes(store, 2) as made:
        found = together([lambda: made[0].exchange(Collective.STEP, b""), lambda: made[1].exchange(Collective.TRACE, b"")])
        assert [str(error) for error in found] == [
            "rank 1 starts a trace while this one runs a step: make the same calls on all ranks",
            "rank 0 runs a step while this one starts a trace: make the same calls on all ranks",
        ]
        made[1].refuse("no target")
        with pytest.raises(AgreementError, match="rank 1 cannot run this step: no target"):
            made[0].exchange(Collective.STEP, b"")
        assert together([lambda plane=plane: plane.exchange(Collective.PLAN, b"a") for plane in made]) == [[b"a", b"a"]] * 2


def test_a_refusal_does_not_wait_for_those_who_have_not_come(store):
    with planes(store, 3) as made:
        made[2].refuse("no")
        with pytest.raises(AgreementError, match="rank 2 cannot"):
            made[0].exchange(Collective.STEP, b"")  # rank 1 makes no call
        with pytest.raises(AgreementError, match="rank 2 cannot"):
            made[1].exchange(Collective.STEP, b"")
        assert together([lambda plane=plane: plane.exchange(Collective.STEP, b"a") for plane in made]) == [[b"a"] * 3] * 3


def test_a_failure_reaches_all_and_the_first_one_stays(store):
    with planes(store, 3) as made:
        error = ValueError("boom")
        assert made[1].broke(error, "stage 1, microbatch 2, action 1F2") is error
        made[1].fail(Failure(Cause.RAISED, 1, 0, "", "another"))
        with pytest.raises(RankFailedError, match=r"rank 1 failed in step 0, stage 1, microbatch 2, action 1F2: ValueError: boom"):
            made[0].exchange(Collective.STEP, b"")
        with pytest.raises(ValueError, match="boom"):
            made[1].check()


def test_one_that_leaves_is_told_apart_from_one_that_is_lost(store):
    with planes(store, 3) as made:
        made[2].activity.step = 5
        made[2].close()
        with pytest.raises(AgreementError, match="rank 2 closed this pipeline after 5 steps"):
            made[0].exchange(Collective.STEP, b"")
        made[1].peers[0].connection.shutdown(socket.SHUT_RDWR)  # as the kernel does when the process ends
        until(lambda: made[0].failure, "the loss of rank 1 is noticed")
        with pytest.raises(RankLostError, match="rank 1 was lost"):
            made[0].exchange(Collective.STEP, b"")


@given(st.binary(min_size=1, max_size=200))
@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_garbage_on_a_connection_fails_with_the_sender_s_name(data):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with planes(dist.HashStore(), 2) as made:
        whole = data.ljust(64, b"\xff")
        made[1].peers[0].connection.sendall(whole)
        with pytest.raises(AgreementError, match="rank 1 sent rank 0 bytes that are not a bpipe message"):
            made[0].exchange(Collective.STEP, b"")


@pytest.mark.parametrize("kind", [Kind.FAILED, Kind.STATUS])
def test_a_sound_frame_with_a_senseless_body_fails_likewise(store, kind):
    with planes(store, 2) as made:
        made[1].peers[0].send(Frame(kind, 1, b"\xff" * 40))
        with pytest.raises(AgreementError, match="rank 1 sent rank 0 bytes that are not a bpipe message"):
            made[0].exchange(Collective.STEP, b"")


def unknown_status() -> bytes:
    return STATUS.pack(0, 1) + Activity().status().pack().replace(b'["Status",', b'["Status",9', 1)


UNKNOWN = {
    "a call with what it gives": lambda: Frame(Kind.CALL, 1, Part(77, 0, {1: b"x"}).pack()),
    "a call with nothing": lambda: Frame(Kind.CALL, 1, Part(0, 0).pack()),
    "the next call but one": lambda: Frame(Kind.CALL, 3, Part(7, 0, {1: b""}).pack()),
    "a part of a call": lambda: Frame(Kind.CALL, 1, Part(254, 0, {1: b""}, is_last=False).pack()),
    "a long call": lambda: Frame(Kind.CALL, 1, Part(200, 0, {1: bytes(5000)}).pack()),
    "a refusal": lambda: Frame(Kind.REFUSAL, 1, Objection(1, 77).frame(1).body),
    "a failure": lambda: Frame(Kind.FAILED, 0, Failure(9, 2, 0, "", "boom").pack()),  # type: ignore[arg-type]
    "a status": lambda: Frame(Kind.STATUS, 1, unknown_status()),
}


@pytest.mark.parametrize("when", ["before the call", "in the call"])
@pytest.mark.parametrize("make", UNKNOWN.values(), ids=UNKNOWN)
def test_what_only_another_version_says_is_its_sender_s(store, make, when):
    """Before, a call of unknown kind ended in a ValueError, or in a blame of the rank that had handed it on."""
    with planes(store, 3) as made:
        if when == "before the call":
            made[1].peers[0].send(make())
            until(lambda: all(plane.failure for plane in made), "all ranks hear of it")
        calls = [lambda plane=plane: plane.exchange(Collective.STEP, b"") for plane in (made[0], made[2])]
        if when == "in the call":
            calls.append(lambda: (until(lambda: made[0].activity.call, "rank 0 calls"), made[1].peers[0].send(make()))[0])
        for error in together(calls)[:2]:
            assert isinstance(error, AgreementError)
            assert str(error).startswith("rank 1 sent rank 0 bytes that are not a bpipe message: ")
        until(lambda: all(plane.failure for plane in made), "all ranks hear of it")
        assert {plane.failure.rank for plane in made} == {1}


def test_an_unknown_call_tells_to_compare_versions(store):
    with planes(store, 2) as made:
        made[1].peers[0].send(Frame(Kind.CALL, 1, Part(77, 0, {1: b"x"}).pack()))
        with pytest.raises(AgreementError, match=r"a call of kind 77, which bpipe .* lacks: install the same version on"):
            made[0].exchange(Collective.STEP, b"")


def test_many_ranks_agree_and_fail_over_few_connections(store, monkeypatch):
    size, frames = 32, Counter()
    with planes(store, size) as made:
        assert max(len(plane.peers) for plane in made) == 2 * 5 - 1
        together([lambda plane=plane, r=r: plane.exchange(Collective.STEP, b"%d" % r * 20) for r, plane in enumerate(made)])
        for r, plane in enumerate(made):
            for peer in plane.peers.values():
                monkeypatch.setattr(
                    peer, "send_packed", lambda data, r=r, send=peer.send_packed: (frames.update({r: 1}), send(data))[1]
                )
        found = together([lambda plane=plane, r=r: plane.exchange(Collective.STEP, b"%d" % r * 20) for r, plane in enumerate(made)])
        assert found == [[b"%d" % r * 20 for r in range(size)]] * size
        assert frames == dict.fromkeys(range(size), 5)
        made[7].fail(Failure(Cause.RAISED, 7, 0, "", "ValueError: boom"))
        until(lambda: all(plane.failure for plane in made), "a failure reaches all ranks")
        assert {str(plane.failure) for plane in made} == {"rank 7 failed in step 0: ValueError: boom"}


def test_long_messages_are_handed_on_while_all_ranks_send_them(store):
    """More than a connection holds: threads that only read would wait for each other if they sent them."""
    with planes(store, 8) as made:
        begin_a_trace(made)
        found = together(
            [lambda plane=plane, r=r: plane.exchange(Collective.GATHER, bytes([r]) * 3_000_000) for r, plane in enumerate(made)]
        )
        assert found == [[bytes([r]) * 3_000_000 for r in range(8)]] * 8


def test_a_lost_rank_is_told_to_those_who_are_not_linked_with_it(store):
    with planes(store, 16) as made:
        others = [plane for rank, plane in enumerate(made) if rank != 3]
        with made[3]._changed:  # so that rank 3 says nothing more
            for peer in made[3].peers.values():
                peer.connection.shutdown(socket.SHUT_RDWR)  # as the kernel does when the process ends
            until(lambda: all(plane.failure for plane in others), "the loss of a rank reaches the others")
        far = [made[rank] for rank in range(16) if 3 not in made[rank].peers and rank != 3]
        assert len(far) == 8 and all(str(plane.failure).startswith("rank 3 was lost") for plane in far)


def test_closing_gives_the_thread_and_the_connections_back(store):
    threads, num_open = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))  # those of other tests may still end
    with planes(store, 3):
        assert len(set(threading.enumerate()) - threads) == 3
    assert set(threading.enumerate()) <= threads and len(os.listdir("/proc/self/fd")) <= num_open


def test_closing_waits_for_all_frozen_peers_together(store, monkeypatch):
    """Its patience runs out once, and not once for each of them."""
    monkeypatch.setattr("bpipe.comm.health.driver.PATIENCE_S", 0.4)
    in_vain: list[float | None] = []

    class Noting(selectors.DefaultSelector):
        def select(self, timeout: float | None = None) -> list[Any]:
            if not (ready := super().select(timeout)):
                in_vain.append(timeout)
            return ready

    monkeypatch.setattr("bpipe.comm.rendezvous.peers.selectors", SimpleNamespace(DefaultSelector=Noting, EVENT_WRITE=EVENT_WRITE))
    with planes(store, 5) as made, ExitStack() as stack:
        for plane in made[1:]:
            stack.enter_context(plane._changed)  # so that they read nothing
        made[0]._do(made[0]._members.begin_call(Collective.GATHER, os.urandom(20_000_000)))
        assert all(peer.num_waiting for peer in made[0].peers.values())
        made[0].close()
        assert in_vain == [0.4]


@pytest.mark.parametrize("traces", [False, True])
@pytest.mark.parametrize("call", Collective)
def test_a_call_longer_than_its_kind_can_be_is_refused_before_it_comes(store, call, traces):
    """A trace only once one was begun."""
    with planes(store, 2) as made:
        if traces:
            begin_a_trace(made)
        bound = Collective.TRACE if call is Collective.GATHER and not traces else call
        head = HEAD.pack(MAGIC, VERSION, Kind.CALL, most_in_part(bound, 2) + 1, 1 + traces)
        made[1].peers[0].connection.sendall(head + bytes([call]))
        with pytest.raises(AgreementError, match="rank 1 sent rank 0 bytes that are not a bpipe message"):
            made[0].exchange(Collective.STEP, b"")


@pytest.mark.parametrize("call", [one for one in Collective if one is not Collective.GATHER])
def test_a_call_that_is_too_long_is_an_error_where_it_is_made(store, call):
    with planes(store, 2) as made, pytest.raises(CommError, match=r"\d+ bytes are more than rank 0 of 2 can say when it "):
        made[0].exchange(call, bytes(most_given(call, 2) + 1))


def test_a_trace_that_is_too_long_says_what_to_do(store, monkeypatch):
    monkeypatch.setattr("bpipe.comm.health.gather.MOST_TOGETHER", 2000)
    with planes(store, 2) as made:
        begin_a_trace(made)
        with pytest.raises(CommError, match=r"1001 bytes are more than rank 0 of 2 can say .*, which is 1000: trace fewer steps"):
            made[0].exchange(Collective.GATHER, bytes(1001))


def test_a_peer_that_does_not_read_its_answers_is_named_and_holds_up_nobody(store):
    """Rank 1 asks and asks. Before, rank 0's control thread stood still for 30 s once the kernel had no more room."""
    with planes(store, 3) as made:
        peer = made[1].peers[0]
        made[0].peers[1].connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the kernel holds little, so that
        peer.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # few answers fill it on a busy machine, too
        with made[1]._changed:  # so that rank 1 reads nothing
            began = time.monotonic()
            peer.connection.setblocking(True)
            peer.connection.settimeout(PATIENCE_S)
            with suppress(OSError):
                numbers = count(1)
                while made[0].failure is None and time.monotonic() - began < PATIENCE_S:
                    asked = [Frame(Kind.ASK, number, ASKING.pack(1)).pack() for number in islice(numbers, 1000)]
                    peer.connection.sendall(b"".join(asked))
            assert "rank 1 does not read what rank 0 sends it" in str(made[0].failure)
            with pytest.raises(AgreementError, match="rank 1 does not read what rank 0 sends it"):
                made[2].exchange(Collective.STEP, b"")
            assert time.monotonic() - began < 0.9 * driver.PATIENCE_S, too_late("that", 0.9 * driver.PATIENCE_S)
            assert 0 < made[0].peers[1].num_waiting <= MOST_WAITING  # its thread may have read once, before it waits for the lock
            peer.connection.setblocking(False)


def test_a_long_message_leaves_while_its_sender_does_something_else(store):
    data = os.urandom(20_000_000)
    with planes(store, 2) as made:
        begin_a_trace(made)
        with made[1]._changed:  # rank 1 reads later
            effects = made[0]._members.begin_call(Collective.GATHER, data)
            made[0]._do(effects)
            assert made[0].peers[1].num_waiting == 1
        assert made[1].exchange(Collective.GATHER, b"")[0] == data


def test_what_waits_leaves_before_the_connection_is_closed(store):
    data = os.urandom(20_000_000)
    with planes(store, 2) as made:
        begin_a_trace(made)
        with made[1]._changed:
            made[0]._do(made[0]._members.begin_call(Collective.GATHER, data))
            closing = threading.Thread(target=made[0].close)
            closing.start()
            time.sleep(0.1)
        assert made[1].exchange(Collective.GATHER, b"")[0] == data
        ended(closing)
