"""A rank that has run out of descriptors, memory, ports or threads says so with the way out, and all others name it at once."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe import logs
from bpipe.comm.rendezvous import farewell
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.farewell import Farewell, say_farewell
from bpipe.comm.rendezvous.incoming import IncomingConnections
from bpipe.comm.rendezvous.interruptible import Interruptible
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.outgoing import OutgoingConnections
from bpipe.comm.rendezvous.shortage import explained, named, way_out
from bpipe.comm.rendezvous.store import read, using_store
from bpipe.comm.transport.worker import Worker
from bpipe.comm.wire.codec import encode
from bpipe.errors import AgreementError, CommError
from tests.comm.meetings import quietly, store, together
from tests.patience import until
from tests.ranks import run_ranks

__all__ = ["store"]

SIZE, LACKING = 3, 1
FILES = "raise this process's limit of open files, which is "

# How many more descriptors than it has a rank may open. Before it has met the others it needs them for its selector, listeners and
# calls, then for its control plane, channels, doors and memory that it shares.
HEADROOM = [0, 1, 2, 3, 4, 6, 8, 10, 12]


def stepping(rank: int, headroom: list[int], memory: str) -> list[tuple[str, float]]:
    """What a step raises with each number of descriptors, and the seconds of this process's CPU; then a step with enough."""
    os.environ["BPIPE_SHARED_MEMORY"] = memory
    logs.LOG.disabled = True
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    seen = []
    for number in [*headroom, 1000]:
        stage = bpipe.PipelineStage(nn.Linear(4, 4), rank, SIZE, "cpu")
        schedule = bpipe.BalancedOneFOneB(stage, 4, loss_fn=nn.functional.mse_loss)
        dist.barrier()
        if rank == LACKING:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + number, hard))
        began = time.process_time()
        try:
            schedule.step(torch.ones(8, 4), target=torch.ones(8, 4))
            seen.append(("", time.process_time() - began))
        except CommError as error:
            seen.append((str(error), time.process_time() - began))
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        schedule.close()
        dist.barrier()
    return seen


@pytest.mark.parametrize("memory", ["1", "0"], ids=["shared", "sockets"])
def test_wherever_descriptors_run_out_all_ranks_say_whose(memory: str) -> None:
    """Before, the rank spun until timeout_s, and the others blamed each other and the network."""
    found = run_ranks(stepping, SIZE, HEADROOM, memory)
    for number, said in zip(HEADROOM, zip(*found, strict=True)):
        for rank, (text, cpu_s) in enumerate(said):
            assert "Too many open files" in text and FILES in text and "ulimit -n" in text, (number, rank, text)
            assert ("this rank cannot connect" if rank == LACKING else f"rank {LACKING} ") in text, (number, rank, text)
            assert cpu_s < 1.0
    assert [of_rank[-1][0] for of_rank in found] == [""] * SIZE


def out_of(code: int, *found: Any) -> Callable[..., Any]:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return fail


class Exhausted(socket.socket):
    """A socket of a process that has run out of something at a call."""

    at, code = "", errno.EMFILE

    def accept(self) -> Any:
        return super().accept() if self.at != "accept" else out_of(self.code)()

    def connect(self, address: Any) -> None:
        super().connect(address) if self.at != "connect" else out_of(self.code)()

    def sendall(self, *args: Any) -> None:
        super().sendall(*args) if self.at != "sendall" else out_of(self.code)()


CODES = {errno.EMFILE: FILES, errno.ENFILE: "fs.file-max", errno.ENOBUFS: "free memory", errno.ENOMEM: "free memory"}


@pytest.mark.parametrize("code", CODES, ids=errno.errorcode.get)
@pytest.mark.parametrize("at", ["create_server", "epoll", "register", "socket", "accept", "connect", "sendall"])
def test_what_a_rank_has_run_out_of_as_ranks_meet(store: Any, at: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank raises, the other one is told; both are threads here, so it is the one who comes to that call first."""
    if at == "create_server":
        monkeypatch.setattr(socket, "create_server", out_of(code))
    elif at in ("epoll", "register"):
        name = "DefaultSelector" if at == "epoll" else "register"
        monkeypatch.setattr(selectors if at == "epoll" else selectors.DefaultSelector, name, out_of(code))
    elif at == "socket":
        monkeypatch.setattr(socket, "if_nameindex", out_of(code))
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    else:
        monkeypatch.setattr(Exhausted, "at", at)
        monkeypatch.setattr(Exhausted, "code", code)
        monkeypatch.setattr(socket, "socket", Exhausted)
    monkeypatch.setattr(farewell, "TELL_S", 0.2)
    found = together([lambda rank=rank: meet_peers(store, "key", rank, 2, quietly) for rank in range(2)])
    assert all(isinstance(error, CommError) for error in found), found
    assert any(str(error).startswith(f"this rank cannot connect to the others: [Errno {code}]") for error in found), found
    assert all(CODES[code] in str(error) for error in found), found


def test_no_port_to_call_from_is_tried_again_and_said(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ports come back when connections end."""
    monkeypatch.setattr(Exhausted, "at", "connect")
    monkeypatch.setattr(Exhausted, "code", errno.EADDRNOTAVAIL)
    monkeypatch.setattr(socket, "socket", Exhausted)
    notes: list[str] = []

    def check(note: str) -> None:
        notes.append(note)
        if "net.ipv4.ip_local_port_range" in note:
            Exhausted.at = ""

    found = together([lambda: meet_peers(store, "key", 0, 2, quietly), lambda: meet_peers(store, "key", 1, 2, check)])
    for one in found:
        one.connections[0].close()
    assert "net.ipv4" not in explained(OSError(errno.ECONNREFUSED, "no")) and any("Errno 99" in note for note in notes)


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE])
def test_torch_s_own_words_of_it_do_not_blame_the_store(code: int) -> None:
    with pytest.raises(CommError, match=f"this rank cannot connect to the others: .*{CODES[code]}"), using_store():
        raise RuntimeError(f"[enforce fail at socket.cc:24] rv != -1. -1 vs -1. socket: {os.strerror(code)}")


FULL = os.strerror(errno.ENOSPC)
WITHOUT_SPACE: dict[str, tuple[BaseException, str]] = {
    "watches": (OSError(errno.ENOSPC, FULL), "fs.epoll.max_user_watches"),
    "watches of gloo's": (RuntimeError(f"[enforce fail at loop.cc:83] rv != -1. -1 vs -1. epoll_ctl: {FULL}"), "max_user_watches"),
    "memory that NCCL shares": (
        RuntimeError(
            f"ncclSystemError: Error while creating shared memory segment /dev/shm/nccl-OYz2 (size 9637888), error: {FULL}"
        ),
        "make /dev/shm larger",
    ),
    "a file": (OSError(errno.ENOSPC, FULL, "/tmp/store"), ""),
    "a file of torch's": (RuntimeError(f"write to a FileStore failed: {FULL}"), ""),
}


@pytest.mark.parametrize("name", WITHOUT_SPACE)
def test_what_has_no_space_left(name: str) -> None:
    """The system has one error for the watches of sockets, for memory that processes share, and for files."""
    error, advice = WITHOUT_SPACE[name]
    assert advice in way_out(error) and bool(advice) == bool(way_out(error)) == (named(error) is not None)


@pytest.mark.parametrize("start", [lambda: Interruptible(lambda: None).run(lambda: 1), lambda: Worker("job")], ids=["open", "send"])
def test_a_thread_that_cannot_start_is_named(start: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    with pytest.raises(CommError, match="can't start new thread: raise the limit of threads"):
        start()


def no_thread(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def starting(rank: int, numbers: list[int]) -> list[list[str]]:
    """What a step and a close raise where one rank can start as many threads; then without that limit."""
    logs.LOG.disabled = True
    start, seen = threading.Thread.start, []
    for number in [*numbers, 1000]:
        left = iter(range(number))

        def limited(self: threading.Thread, left: Iterator[int] = left) -> None:
            if next(left, None) is None and self.name.startswith("bpipe"):
                raise RuntimeError("can't start new thread")
            start(self)

        stage = bpipe.PipelineStage(nn.Linear(300, 300), rank, SIZE, "cpu")
        schedule = bpipe.BalancedOneFOneB(stage, 4, loss_fn=nn.functional.mse_loss)
        dist.barrier()
        if rank == LACKING:
            threading.Thread.start = limited  # type: ignore[method-assign, assignment]
        said = []
        try:
            schedule.step(torch.ones(4000, 300), target=torch.ones(4000, 300))
        except (CommError, RuntimeError) as error:
            said.append(str(error))
        dist.barrier()
        schedule.close()
        threading.Thread.start = start  # type: ignore[method-assign]
        seen.append(said)
        dist.barrier()
    return seen


def test_wherever_no_thread_can_start_all_ranks_say_whose_and_close() -> None:
    """The last pipeline needs more threads than any number of these, and works."""
    numbers = list(range(9))
    found = run_ranks(starting, SIZE, numbers, timeout_s=40.0)
    assert any(said for said in found[LACKING]), found
    for number, said in zip(numbers, zip(*found, strict=True)):
        for rank, texts in enumerate(said):
            assert bool(texts) == bool(said[LACKING]), (number, said)
            assert all("can't start new thread" in text and (rank == LACKING or f"rank {LACKING} " in text) for text in texts), said
    assert [of_rank[-1] for of_rank in found] == [[]] * SIZE


# Farewells


def endpoint(name: bytes) -> bytes:
    return encode(Endpoint((("127.0.0.1", 9),), name=name))


@pytest.mark.parametrize("late", range(2))
def test_a_rank_that_comes_late_is_told(store: Any, late: int) -> None:
    """One that comes while the other one still has its word for it, and whichever of the two calls the other."""
    began = threading.Event()

    def come() -> Any:
        began.wait()
        try:
            return meet_peers(store, "key", late, 2, quietly)
        finally:
            store.delete_key(f"key/{late}")

    def leave() -> None:
        began.set()
        say_farewell(store, "key", 1 - late, {late: False}, "boom")

    error, _ = together([come, leave])
    assert str(error) == f"rank {1 - late} gave up while the ranks met for their first step: boom"


@pytest.mark.parametrize("rank", range(2))
def test_a_word_of_an_earlier_meeting_says_nothing(store: Any, rank: int) -> None:
    """A store may outlive ranks that gave up: what they wrote was for those of that time."""
    store.set(f"key/{1 - rank}", encode(Farewell((b"n" * 16,), "boom")))
    looks: list[str] = []

    def other() -> Any:
        until(lambda: len(looks) > 30, "the rank goes on")
        return meet_peers(store, "key", 1 - rank, 2, quietly)

    found = together([lambda: meet_peers(store, "key", rank, 2, looks.append), other])
    for one in found:
        one.connections[0].close()


def test_a_word_is_for_all_that_come_and_waits_until_they_have_gone(store: Any) -> None:
    done: list[bool] = []

    def play() -> None:
        for other in (0, 2, 3):
            store.set(f"key/{other}", endpoint(b"%d" % other * 16))
        until(lambda: sorted(told()) == [b"%d" % other * 16 for other in (0, 2, 3)], "the word is for all three")
        for other in (0, 2):
            store.delete_key(f"key/{other}")
        assert not done
        store.set("key/3", encode(Farewell((b"1" * 16,), "it gives up, too")))

    def told() -> tuple[bytes, ...]:
        word = read(store, "key/1")
        found = None if word is None else farewell.read_farewell(word)
        return () if found is None else found.to

    errors = together([lambda: (say_farewell(store, "key", 1, dict.fromkeys((0, 2, 3), False), "boom"), done.append(True)), play])
    assert done and not isinstance(errors[1], BaseException), errors


def test_a_key_that_is_removed_while_it_is_read_is_not_waited_for() -> None:
    """`get` would wait for it, as long as the store's timeout."""
    for one in (dist.HashStore(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)):
        assert read(one, "key") is None and not one.check(["key"])
        one.set("key", b"\xff\0")
        assert read(one, "key") == b"\xff\0"


# Versions


@pytest.mark.parametrize("version", ["0.1.0", "99.0", "", "0.2.0rc1", "main"])
def test_ranks_with_other_versions_of_bpipe_say_so(store: Any, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farewell, "TELL_S", 0.0)
    for rank in range(2):
        there = Endpoint((("127.0.0.1", 9),), name=b"n" * 16, version=version)
        store.set(f"key/{1 - rank}", encode(there))
        with pytest.raises(
            AgreementError, match=f"rank {1 - rank} has bpipe '{version}', and rank {rank} has '{bpipe.__version__}'"
        ):
            meet_peers(store, "key", rank, 2, quietly)
        store.delete_key(f"key/{rank}")


@pytest.mark.parametrize("data", [b'["Endpoint",[["127.0.0.1",9]],"host","00","00"]', b"a pickle", b"", b'["Hello"]', b"\xff" * 99])
def test_what_is_no_endpoint_of_this_version_is_said_in_the_wait(store: Any, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be another version's, or have been there before: so the ranks go on waiting."""
    store.set("key/0", data)

    def check(note: str) -> None:
        if "is it the same on all ranks" in note:
            raise AgreementError(note)

    monkeypatch.setattr(farewell, "TELL_S", 0.0)
    with pytest.raises(AgreementError, match=r"ranks \[0\] do not write as bpipe"):
        meet_peers(store, "key", 1, 2, check)


def test_the_classes_of_connections_pass_a_shortage_on() -> None:
    """Level-triggered: who passes over it is woken again and again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        incoming = IncomingConnections([listener], selector, 1, lambda *_: None)
        outgoing = OutgoingConnections(selector, lambda _: None, lambda *_: None, lambda *_: None)  # type: ignore[arg-type, return-value]
        outgoing.endpoints[0] = Endpoint((("127.0.0.1", 9),))
        with pytest.raises(OSError, match="24"):
            outgoing.was_wrong(0, ("127.0.0.1", 9), OSError(errno.EMFILE, "no"))
        outgoing.was_wrong(0, ("127.0.0.1", 9), OSError(errno.ECONNREFUSED, "no"))
        incoming.close()
