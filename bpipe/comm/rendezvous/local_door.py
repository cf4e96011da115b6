"""Open links between processes of one host. Which ranks share one is found out by trying: each kernel has a table of names."""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.incoming import MOST_SILENT, IncomingConnections, read_frame, serve
from bpipe.comm.rendezvous.local_links import LocalLink
from bpipe.comm.rendezvous.secret import channel_proof, is_same
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import ONLY_PROOF, Frame, FrameReader, Kind
from bpipe.errors import CommError, TransferError
from bpipe.memory.shared_file import Lent, NoSharedMemoryError, SharedFile

__all__: list[str] = []

NAME_BYTES = 16
LINK_S = 10.0  # a process of the same host answers within this time
RETRY_S = 0.002  # while others fill the queue at a door
LOOK_S = 1.0
CREDENTIALS = struct.Struct("3i")  # of the process at the other end: its number, user and group

Shared = tuple[LocalLink, SharedFile]


class Proofs(NamedTuple):
    """What the two ends of a link say to each other."""

    opener: bytes
    acceptor: bytes


class _Opened(NamedTuple):
    """The links that a rank could open, by index."""

    indices: tuple[int, ...]


def open_local_links(
    ends: Sequence[tuple[int, int]],
    rank: int,
    token: bytes,
    control: ControlPlane,
    say_why: Callable[[str], None],
    *,
    can_share: bool,
    secret: bytes = b"",
) -> dict[int, Shared]:
    """Open a link for each pair of ranks that share a host, and share a file over it. Collective.

    Returns:
        This rank's links by index, each with the file.

    Args:
        ends: for each link the ranks that open it and that accept it, the same on all ranks.
        rank: this rank.
        token: 16 bytes that only these ranks know.
        control: their control plane.
        say_why: called with the reason if a link to a process of this host cannot be had, or no door to this one.
        can_share: whether this rank can share memory with other processes.
        secret: by which the ranks know each other; empty if there is none. Both ends of a link prove that they have it.
    """
    with ExitStack() as unless_done:
        door = _door(say_why) if can_share else None
        if door is not None:
            unless_done.callback(door.close, ())
        names = control.exchange(Collective.CONNECT, b"" if door is None else door.name)
        proofs = {
            index: Proofs(*(channel_proof(secret, role, token, index, end, names) for role in ("opener", "acceptor")))
            for index, end in enumerate(ends)
            if rank in end
        }
        if door is not None:
            door.open({index: proofs[index] for index, end in enumerate(ends) if end[1] == rank})
        own = {index: end[1] for index, end in enumerate(ends) if end[0] == rank and names[end[1]] and door is not None}
        opened = _open_all(own, names, proofs, say_why)
        unless_done.callback(_close, opened)
        reports = control.exchange(Collective.CONNECT, encode(_Opened(tuple(opened))))
        coming = {index for opener, data in enumerate(reports) for index in _coming(data, ends, opener, rank)}
        if door is not None:
            opened |= door.close(coming)
        unless_done.pop_all()
    return opened


def _coming(data: bytes, ends: Sequence[tuple[int, int]], opener: int, acceptor: int) -> list[int]:
    """Return the links that one rank has opened to another, by the report of the first."""
    indices = decode(_Opened, data, "list of links").indices
    return [index for index, end in enumerate(ends) if end == (opener, acceptor) and index in indices]


def _close(links: Mapping[int, Shared]) -> None:
    for link, file in links.values():
        link.close()
        file.close()


# The opener's end


def _open_all(
    own: Mapping[int, int], names: Sequence[bytes], proofs: Mapping[int, Proofs], say_why: Callable[[str], None]
) -> dict[int, Shared]:
    """Open links, each to a rank; return those that could be opened."""
    opened: dict[int, Shared] = {}
    unreached: set[int] = set()  # not tried again: it might take as long
    for index, acceptor in own.items():
        if acceptor in unreached:
            continue
        try:
            opened[index] = _open(names[acceptor], index, proofs[index])
        except ConnectionRefusedError:  # there is no such name: it is on another host, or in another network namespace
            unreached.add(acceptor)
        except (OSError, CommError) as error:
            unreached.add(acceptor)
            say_why(f"no link to rank {acceptor} ({getattr(error, 'why', '') or error})")
    return opened


def _open(name: bytes, index: int, proofs: Proofs) -> Shared:
    with ExitStack() as unless_done:
        connection = unless_done.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(LINK_S)
        _connect(connection, name)
        connection.sendall(Frame(Kind.HELLO, index, proofs.opener).pack())
        reader, answer = FrameReader(ONLY_PROOF), None
        while answer is None:
            answer = read_frame(connection, reader)
        if not is_same(answer.body, proofs.acceptor):
            raise TransferError("who answered has not proved that it belongs to this pipeline")
        link, file = LocalLink(connection), SharedFile()
        unless_done.callback(file.close)
        link.export_memory([Lent(file.descriptor)])
        if why := link.receive_text():
            raise TransferError(f"it says that {why}")
        connection.settimeout(None)
        unless_done.pop_all()
    return link, file


def _connect(connection: socket.socket, name: bytes) -> None:
    """Connect, as soon as there is room in the queue at the door, which strangers may have filled."""
    until = time.monotonic() + LINK_S
    while True:
        try:
            connection.connect(name)
            break
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(RETRY_S)
    if not _is_of_this_user(connection):
        raise PermissionError("it belongs to another user")


def _is_of_this_user(connection: socket.socket) -> bool:
    """Return whether the process at the other end runs as this one's user, as the kernel says."""
    _, user, _ = CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return int(user) == os.geteuid()


# The acceptor's end


def _door(say_why: Callable[[str], None]) -> Door | None:
    try:
        return Door(say_why)
    except (OSError, AttributeError) as error:
        say_why(f"other processes cannot connect ({error})")
        return None


class Door:
    """Where other processes of this host open links to this one. A thread answers them while this rank opens its own links.

    Others find its name in the kernel's table of sockets as well. Processes of other users are disconnected at once, and strangers
    of this user as soon as they say something, or there are too many.

    Args:
        say_why: called with the reason if nobody can come in any more.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, say_why: Callable[[str], None]) -> None:
        self._say_why = say_why
        with ExitStack() as unless_done:
            self._listener = unless_done.enter_context(socket.socket(socket.AF_UNIX))
            self._listener.bind(b"\0bpipe-" + os.urandom(NAME_BYTES).hex().encode())
            self._listener.listen(MOST_SILENT)
            self._selector = unless_done.enter_context(selectors.DefaultSelector())
            unless_done.pop_all()
        self.name = os.fsencode(self._listener.getsockname())
        self._thread = threading.Thread(target=self._serve, name="bpipe-door", daemon=True)
        self._expected: Mapping[int, Proofs] = {}
        self._found: dict[int, Shared] = {}
        self._is_over = False

    def open(self, expected: Mapping[int, Proofs]) -> None:
        """Answer from now on those who prove that they open one of these links."""
        self._expected = expected
        if expected:
            self._thread.start()

    def close(self, coming: Iterable[int]) -> dict[int, Shared]:
        """Close the door, and return the links that their openers count on; all others are closed."""
        self._is_over = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        if self._thread.ident is not None:
            self._thread.join()
        self._listener.close()
        self._selector.close()
        taken = {index: self._found.pop(index) for index in coming}
        _close(self._found)
        return taken

    def _serve(self) -> None:
        incoming = IncomingConnections([self._listener], self._selector, len(self._expected), self._on_hello, _is_of_this_user)
        try:
            with incoming:
                while not self._is_over:
                    serve(self._selector, LOOK_S)
        except OSError as error:  # this process has run out of descriptors: who calls is sent away, and need not wait
            self._listener.close()
            self._say_why(f"other processes cannot connect any more ({error})")

    def _on_hello(self, connection: socket.socket, hello: Frame) -> None:
        proofs = self._expected.get(hello.number)
        with ExitStack() as unless_done, suppress(OSError, CommError):
            unless_done.callback(connection.close)
            if proofs is None or hello.number in self._found or not is_same(hello.body, proofs.opener):
                return
            connection.settimeout(LINK_S)
            connection.sendall(Frame(Kind.PROOF, hello.number, proofs.acceptor).pack())
            self._admit(hello.number, LocalLink(connection))
            unless_done.pop_all()

    def _admit(self, index: int, link: LocalLink) -> None:
        """Take the file of a link, and say so; or say why not."""
        try:
            (lent,) = link.import_memory(1)
        except NoSharedMemoryError as error:
            link.send_text(error.why)
            raise
        self._found[index] = link, SharedFile(lent.descriptor)
        try:
            link.send_text("")  # from now on the opener counts on it
        except TransferError:
            _, file = self._found.pop(index)
            file.close()
            raise
        link.connection.settimeout(None)
