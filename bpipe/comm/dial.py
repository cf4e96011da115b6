"""Open connections from sender to receiver, for as many channels as the ranks agree on."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from bpipe.comm.addresses import Address
from bpipe.comm.control import CallOf, Control
from bpipe.errors import TransferError

__all__: list[str] = []

TOKEN_BYTES = 16
HELLO = struct.Struct(f"<{TOKEN_BYTES}sI")  # the pipeline's token, and which of the connections this is
HELLO_S = 5.0


def open_connections(
    ends: Sequence[tuple[int, int]], rank: int, address: Address, token: bytes, control: Control
) -> dict[int, socket.socket]:
    """This rank's connections, by index. Collective; blocks until all are there.

    Args:
        ends: for each connection the ranks that send and receive on it, the same on all ranks.
        rank: this one.
        address: under which the others reach it.
        token: 16 bytes that only these ranks know.
        control: their line.

    Raises:
        TransferError: a rank cannot be reached, or has not come.
    """
    missing = {index for index, (_, receiver) in enumerate(ends) if receiver == rank}
    with ExitStack() as unless_done:
        listener = socket.create_server((address.text, 0), family=address.family, backlog=len(missing) + 16)
        unless_done.enter_context(listener)
        own = f"{listener.getsockname()[1]} {address.text}"
        places = [place.decode().split(" ", 1) for place in control.exchange(CallOf.CONNECT, own.encode())]
        opened = {}
        for index, (sender, receiver) in enumerate(ends):
            if sender == rank:
                opened[index] = unless_done.enter_context(_called(places[receiver], receiver, HELLO.pack(token, index)))
        control.exchange(CallOf.CONNECT, b"")  # now all have called, and nobody has to be waited for
        listener.settimeout(HELLO_S)
        while missing:
            index, connection = _accepted(listener, token, sorted(missing))
            opened[index] = unless_done.enter_context(connection)
            missing.remove(index)
        listener.close()
        unless_done.pop_all()
    for connection in opened.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
    return opened


def _called(place: Sequence[str], receiver: int, hello: bytes) -> socket.socket:
    port, host = place
    try:
        connection = socket.create_connection((host, int(port)), timeout=HELLO_S)
        connection.sendall(hello)
    except OSError as error:
        raise TransferError(f"rank {receiver} cannot be reached at {host}, port {port}: {error}") from error
    return connection


def _accepted(listener: socket.socket, token: bytes, missing: Sequence[int]) -> tuple[int, socket.socket]:
    """The next connection that one of these ranks has made, and its index. Strangers are sent away."""
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError as error:
            raise TransferError(f"connections {list(missing)} were made, and did not arrive in {HELLO_S:g} s") from error
        connection.settimeout(HELLO_S)
        with suppress(OSError, struct.error):
            theirs, index = HELLO.unpack(connection.recv(HELLO.size, socket.MSG_WAITALL))
            if theirs == token and index in missing:
                return index, connection
        connection.close()
