"""Open connections from sender to receiver, for as many channels as the ranks agree on."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.addresses import Address
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.errors import TransferError

__all__: list[str] = []

TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # the pipeline's token, and which of the connections this is
HELLO_S = 5.0
LOOK_S = 0.25  # between two looks at whether something has failed


def open_connections(
    ends: Sequence[tuple[int, int]], rank: int, address: Address, token: bytes, control: ControlPlane
) -> dict[int, socket.socket]:
    """Open this rank's connections, and return them by index. Collective; blocks until all are there.

    Args:
        ends: for each connection the ranks that send and receive on it, the same on all ranks.
        rank: this rank.
        address: the address at which the others reach it.
        token: 16 bytes that only these ranks know.
        control: their control plane.

    Raises:
        TransferError: a rank cannot be reached, or its connection has not arrived.
    """
    missing = {index for index, (_, receiver) in enumerate(ends) if receiver == rank}
    with ExitStack() as unless_done:
        listener = socket.create_server((address.text, 0), family=address.family, backlog=len(missing) + 16)
        unless_done.enter_context(listener)
        own = f"{listener.getsockname()[1]} {address.text}"
        places = [place.decode().split(" ", 1) for place in control.exchange(Collective.CONNECT, own.encode())]
        opened = {}
        for index, (sender, receiver) in enumerate(ends):
            if sender == rank:
                opened[index] = unless_done.enter_context(_called(places[receiver], receiver, HELLO.pack(token, index)))
        control.exchange(Collective.CONNECT, b"")  # now all have connected, and nobody has to be waited for
        for index, connection in _arrived(listener, token, missing, control).items():
            opened[index] = unless_done.enter_context(connection)
        for connection in opened.values():
            prepare(connection)
            connection.settimeout(None)
        listener.close()
        unless_done.pop_all()
    return opened


def _called(place: Sequence[str], receiver: int, hello: bytes) -> socket.socket:
    port, host = place
    with ExitStack() as unless_done:
        try:
            connection = unless_done.enter_context(socket.create_connection((host, int(port)), timeout=HELLO_S))
            connection.sendall(hello)
        except OSError as error:
            raise TransferError(f"rank {receiver} cannot be reached at {host}, port {port}: {error}") from error
        unless_done.pop_all()
    return connection


def _arrived(listener: socket.socket, token: bytes, missing: Collection[int], control: ControlPlane) -> dict[int, socket.socket]:
    """Accept the connections that others have made, by index. Strangers are disconnected, and nobody waits for what they send."""
    found: dict[int, socket.socket] = {}
    with ExitStack() as strangers, selectors.DefaultSelector() as selector:
        listener.setblocking(False)
        selector.register(listener, selectors.EVENT_READ)
        until = time.monotonic() + HELLO_S
        while len(found) < len(missing):
            control.check()
            if time.monotonic() > until:
                late = sorted({*missing} - found.keys())
                raise TransferError(f"connections {late} were made, and did not arrive in {HELLO_S:g} s")
            for key, _ in selector.select(LOOK_S):
                if key.fileobj is listener:
                    try:
                        connection, _ = listener.accept()
                    except OSError:  # the caller has gone already
                        continue
                    connection.setblocking(False)
                    selector.register(strangers.enter_context(connection), selectors.EVENT_READ, _Caller(connection))
                elif key.data.has_spoken():
                    selector.unregister(key.fileobj)
                    theirs, index = HELLO.unpack(key.data.heard)
                    if theirs == token and index in missing:
                        found[index] = key.data.connection
        return {index: socket.socket(fileno=connection.detach()) for index, connection in found.items()}


class _Caller:
    """An accepted connection, and the bytes of its hello so far."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.heard = connection, b""

    def has_spoken(self) -> bool:
        """Read more of the hello, and return whether it is complete. Bytes that will not come any more are zeros."""
        try:
            self.heard += self.connection.recv(HELLO.size - len(self.heard)) or bytes(HELLO.size)
        except BlockingIOError:
            return False
        except OSError:
            self.heard = bytes(HELLO.size)
        self.heard = self.heard[: HELLO.size]
        return len(self.heard) == HELLO.size
