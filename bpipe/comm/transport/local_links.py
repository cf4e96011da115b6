"""Connections between processes of one host, which pass open files on: of memory that both ends map."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.incoming import MOST_SILENT
from bpipe.comm.rendezvous.secret import channel_proof
from bpipe.comm.transport.connect import arrived
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import TransferError
from bpipe.memory.shared_file import Lent, SharedFile

__all__: list[str] = []

NAME_BYTES = 16
LINK_S = 5.0  # a process of the same host answers within this time
LENGTH = struct.Struct(">H")


class _Opened(NamedTuple):
    """The links that a rank could open, by index."""

    indices: tuple[int, ...]


def open_local_links(
    ends: Sequence[tuple[int, int]], rank: int, token: bytes, control: ControlPlane, *, can_share: bool, secret: bytes = b""
) -> dict[int, tuple[LocalLink, SharedFile]]:
    """Open a link for each pair of ranks that share a host, and share a file over it. Collective.

    Returns:
        This rank's links by index, each with the file.

    Whether two ranks share a host is found out by trying: a name in the kernel's own table of sockets is known only there.

    Args:
        ends: for each link the ranks that open it and that accept it, the same on all ranks.
        rank: this rank.
        token: 16 bytes that only these ranks know.
        control: their control plane.
        can_share: whether this rank can share memory with other processes.
        secret: by which the ranks know each other; empty if there is none. Only the opener proves that it has it, because the
            kernel gives an acceptor's name to nobody else.
    """
    with ExitStack() as unless_done, ExitStack() as after:
        listener = after.enter_context(_listener(len(ends))) if can_share else None
        own = b"" if listener is None else os.fsencode(listener.getsockname())
        names = control.exchange(Collective.CONNECT, own)
        opened: dict[int, tuple[LocalLink, SharedFile]] = {}
        for index, (opener, acceptor) in enumerate(ends):
            if opener == rank and own and names[acceptor]:
                with suppress(OSError):  # it is on another host, or in another network namespace
                    proof = channel_proof(secret, "opener", token, index, ends[index], names)
                    connection = unless_done.enter_context(_connected(names[acceptor], Frame(Kind.HELLO, index, proof)))
                    opened[index] = LocalLink(connection), SharedFile()
                    opened[index][0].pass_on(
                        [Lent(opened[index][1].descriptor)]
                    )  # at once, so that no rank waits for it after the reports
        reports = control.exchange(Collective.CONNECT, encode(_Opened(tuple(opened))))
        coming = {index for opener, data in enumerate(reports) for index in _coming(data, ends, opener, rank)}
        if listener is not None:
            expected = {index: channel_proof(secret, "opener", token, index, ends[index], names) for index in coming}
            for index, connection in arrived([listener], expected, control).items():
                link = LocalLink(unless_done.enter_context(connection))
                (lent,) = link.take(1)
                opened[index] = link, SharedFile(lent.descriptor)
        unless_done.pop_all()
    return opened


def _coming(data: bytes, ends: Sequence[tuple[int, int]], opener: int, acceptor: int) -> list[int]:
    """Return the links that one rank has opened to another, by the report of the first."""
    indices = decode(_Opened, data, "list of links").indices
    return [index for index, end in enumerate(ends) if end == (opener, acceptor) and index in indices]


def _listener(most: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(b"\0bpipe-" + os.urandom(NAME_BYTES).hex().encode())
    listener.listen(most + MOST_SILENT)
    return listener


def _connected(name: bytes, hello: Frame) -> socket.socket:
    with ExitStack() as unless_done:
        connection = unless_done.enter_context(socket.socket(socket.AF_UNIX))
        connection.settimeout(LINK_S)
        connection.connect(name)
        connection.sendall(hello.pack())
        unless_done.pop_all()
    return connection


class LocalLink:
    """A connection to another process of this host."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        connection.settimeout(None)

    def pass_on(self, lent: Sequence[Lent]) -> None:
        """Give the other process what it needs to reach memory; it must take as many.

        Raises:
            TransferError: the other process is gone.
        """
        try:
            for one in lent:
                socket.send_fds(self.connection, [LENGTH.pack(len(one.data)) + one.data], [one.descriptor])
        except OSError as error:
            raise TransferError(f"memory cannot be shared with another process of this host: {error}") from error

    def take(self, number: int) -> list[Lent]:
        """Return what the other process passes on. Blocks until it does, or until `end`.

        Raises:
            TransferError: the other process is gone, or has passed on something else.
        """
        taken: list[Lent] = []
        try:
            for _ in range(number):
                head, descriptors, _, _ = socket.recv_fds(self.connection, LENGTH.size, 1, socket.MSG_WAITALL)
                if len(head) < LENGTH.size or not descriptors:
                    break
                taken.append(Lent(descriptors[0], self._exactly(*LENGTH.unpack(head))))
        except OSError as error:
            raise TransferError(f"memory cannot be shared with another process of this host: {error}") from error
        if len(taken) != number:
            raise TransferError(f"another process of this host shares {len(taken)} pieces of memory where {number} were expected")
        return taken

    def say(self, text: str) -> None:
        """Tell the other process something; it must `hear` it.

        Raises:
            TransferError: the other process is gone.
        """
        data = text.encode()[: 2**16 - 1]
        try:
            self.connection.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise TransferError(f"another process of this host is gone: {error}") from error

    def hear(self) -> str:
        """Return what the other process says. Blocks until it does, or until `end`.

        Raises:
            TransferError: the other process is gone.
        """
        try:
            return self._exactly(*LENGTH.unpack(self._exactly(LENGTH.size))).decode(errors="replace")
        except OSError as error:
            raise TransferError(f"another process of this host is gone: {error}") from error

    def _exactly(self, number: int) -> bytes:
        data = self.connection.recv(number, socket.MSG_WAITALL) if number else b""
        if len(data) < number:
            raise ConnectionError("it has closed the connection")
        return data

    def end(self) -> None:
        """End all waits at both ends. Any thread may call it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
