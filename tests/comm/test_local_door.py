"""Links between processes of a host: both ends prove themselves, and why there is none is said."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from bpipe.comm.rendezvous import local_door
from bpipe.comm.rendezvous.local_door import Door, Proofs
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.rendezvous.secret import channel_proof
from bpipe.errors import TransferError
from bpipe.memory.shared_file import Lent, NoSharedMemoryError, SharedFile

NAMES = [b"a" * 16, b"b" * 16]


def proofs_with(secret: bytes) -> Proofs:
    return Proofs(*(channel_proof(secret, role, b"token" * 3, 0, (0, 1), NAMES) for role in ("opener", "acceptor")))


@contextmanager
def door_with(secret: bytes) -> Iterator[Door]:
    door = Door(print)
    door.open({0: proofs_with(secret)})
    yield door
    door.close(())


def opened(door: Door, proofs: Proofs) -> str:
    """Open a link; return why there is none."""
    said: list[str] = []
    found = local_door._open_all({0: 1}, [b"", door.name], {0: proofs}, said.append)
    assert bool(found) != bool(said) and len(said) < 2
    local_door._close(found)
    return "".join(said)


@pytest.mark.parametrize("secret", [b"", b"secret"])
def test_a_link_is_opened_between_ends_of_one_secret(secret: bytes) -> None:
    with door_with(secret) as door:
        link, file = local_door._open(door.name, 0, proofs_with(secret))
        file.grow(10)
        file.map()[:] = 3
        ((theirs, same),) = (both := door.close([0])).values()
        assert same.map().sum() == 30
        link.send_text("heard")
        assert theirs.receive_text() == "heard"
        assert fcntl.fcntl(same.descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        local_door._close({0: (link, file)} | {1: both[0]})


def test_an_opener_without_the_secret_is_disconnected() -> None:
    with door_with(b"secret") as door:
        proofs = proofs_with(b"secret")
        assert "no link to rank 1" in opened(door, proofs._replace(opener=proofs_with(b"another").opener))
        assert not opened(door, proofs_with(b"secret"))  # the door is as before


def test_an_acceptor_without_the_secret_gets_no_file() -> None:
    """Who has got an acceptor's name otherwise proves nothing by that, even if he lets everybody in."""
    proofs = proofs_with(b"secret")
    door = Door(print)
    door.open({0: proofs._replace(acceptor=proofs_with(b"another").acceptor)})
    assert "has not proved that it belongs to this pipeline" in opened(door, proofs)
    door.close(())


def test_a_proof_is_not_sent_back_to_where_it_came_from() -> None:
    proofs = proofs_with(b"secret")
    assert proofs.opener != proofs.acceptor
    door = Door(print)
    door.open({0: proofs._replace(acceptor=proofs.opener)})
    assert "has not proved" in opened(door, proofs)
    door.close(())


@pytest.mark.parametrize("who", ["opener", "acceptor"])
def test_other_users_are_strangers(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with door_with(b"") as door:
        local_door._connect(stranger := socket.socket(socket.AF_UNIX), door.name)
        stranger.sendall(b"nonsense" * 10)
        with suppress(ConnectionResetError):
            assert stranger.recv(1) == b""  # the door has opened
        stranger.close()
        with monkeypatch.context() as elsewhere:
            if who == "opener":  # the door has taken the honest look
                elsewhere.setattr(local_door, "_is_of_this_user", lambda _: True)
            elsewhere.setattr(os, "geteuid", lambda: 2**16)
            why = opened(door, proofs_with(b""))
            assert ("belongs to another user" in why) == (who == "acceptor") and "no link to rank 1" in why
        assert not opened(door, proofs_with(b""))


def test_a_full_queue_at_the_door_is_waited_for() -> None:
    """Strangers know a door's name, and may fill its queue before the door opens."""
    door, strangers = Door(print), []
    with suppress(BlockingIOError):
        while True:
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].setblocking(False)
            strangers[-1].connect(door.name)
    opening = threading.Timer(0.2, door.open, ({0: proofs_with(b"")},))
    opening.start()
    assert not opened(door, proofs_with(b""))
    opening.join()
    door.close(())
    for stranger in strangers:
        stranger.close()


def test_another_host_is_no_reason() -> None:
    """A name that nobody has here: most ranks of most jobs are on other hosts."""
    said: list[str] = []
    assert not local_door._open_all({0: 1}, [b"", b"\0bpipe-elsewhere"], {0: proofs_with(b"")}, said.append)
    assert not said


@contextmanager
def no_more_files() -> Iterator[None]:
    before, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    one = os.open("/dev/null", os.O_RDONLY)
    os.close(one)
    resource.setrlimit(resource.RLIMIT_NOFILE, (one, most))  # the next file would get this number
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, most))


def test_too_many_open_files_are_a_reason() -> None:
    with door_with(b"") as door:
        before, said = door.name, []
        with no_more_files():
            assert local_door._door(said.append) is None
            assert not local_door._open_all({0: 1}, [b"", before], {0: proofs_with(b"")}, said.append)
    assert len(said) == 2 and all("Too many open files" in why for why in said)


def test_a_file_that_cannot_be_had_is_a_reason() -> None:
    ours, theirs = map(LocalLink, socket.socketpair(socket.AF_UNIX))
    file = SharedFile()
    ours.export_memory([Lent(file.descriptor)])
    with no_more_files(), pytest.raises(NoSharedMemoryError, match="too many open files"):
        theirs.import_memory(1)
    ours.send_text("and on it goes")
    assert theirs.receive_text() == "and on it goes"
    ours.close()
    with pytest.raises(TransferError):
        theirs.receive_text()
    theirs.close()
