"""Connections between processes of one host, which pass open files on: of memory that both ends map."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import suppress

from bpipe.errors import TransferError
from bpipe.memory.shared_file import Lent, no_memory

__all__: list[str] = []

LENGTH = struct.Struct(">H")
DESCRIPTOR = struct.Struct("i")


class LocalLink:
    """A connection to another process of this host."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def export_memory(self, lent: Sequence[Lent]) -> None:
        """Give the other process what it needs to reach memory; it must take as many.

        Raises:
            TransferError: the other process is gone.
        """
        try:
            for one in lent:
                socket.send_fds(self.connection, [LENGTH.pack(len(one.data)) + one.data], [one.descriptor])
        except OSError as error:
            raise TransferError(f"memory cannot be shared with another process of this host: {error}") from error

    def import_memory(self, number: int) -> list[Lent]:
        """Return what the other process passes on. Blocks until it does, or until `end`.

        Raises:
            TransferError: the other process is gone, or has passed on something else.
            NoSharedMemoryError: this process can get no more open files.
        """
        taken: list[Lent] = []
        try:
            for _ in range(number):
                flags = socket.MSG_WAITALL | socket.MSG_CMSG_CLOEXEC  # `socket.recv_fds` passes no flags on
                head, beside, got, _ = self.connection.recvmsg(LENGTH.size, socket.CMSG_LEN(DESCRIPTOR.size), flags)
                if got & socket.MSG_CTRUNC:
                    raise no_memory(0, "this process has too many open files to get another one")
                descriptors = [DESCRIPTOR.unpack(data)[0] for _, kind, data in beside if kind == socket.SCM_RIGHTS]
                if len(head) < LENGTH.size or not descriptors:
                    break
                taken.append(Lent(descriptors[0], self._exactly(*LENGTH.unpack(head))))
        except OSError as error:
            raise TransferError(f"memory cannot be shared with another process of this host: {error}") from error
        if len(taken) != number:
            raise TransferError(f"another process of this host shares {len(taken)} pieces of memory where {number} were expected")
        return taken

    def send_text(self, text: str) -> None:
        """Tell the other process something; it must receive it.

        Raises:
            TransferError: the other process is gone.
        """
        data = text.encode()[: 2**16 - 1]
        try:
            self.connection.sendall(LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise TransferError(f"another process of this host is gone: {error}") from error

    def receive_text(self) -> str:
        """Return what the other process says. Blocks until it does, or until `end`.

        Raises:
            TransferError: the other process is gone.
        """
        try:
            return self._exactly(*LENGTH.unpack(self._exactly(LENGTH.size))).decode(errors="replace")
        except OSError as error:
            raise TransferError(f"another process of this host is gone: {error}") from error

    def _exactly(self, number: int) -> bytes:
        data = b""
        while len(data) < number:  # the connection may have a timeout, with which less than all may come at once
            more = self.connection.recv(number - len(data), socket.MSG_WAITALL)
            if not more:
                raise ConnectionError("it has closed the connection")
            data += more
        return data

    def end(self) -> None:
        """End all waits at both ends. Any thread may call it."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.connection.close()
