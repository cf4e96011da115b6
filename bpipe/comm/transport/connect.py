"""Open connections from sender to receiver, for as many channels as the ranks agree on."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.addresses import Address, Endpoint
from bpipe.comm.rendezvous.incoming import MOST_SILENT, IncomingConnections, serve
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import TransferError

__all__: list[str] = []

TOKEN_BYTES = 16
HELLO_S = 5.0
LOOK_S = 0.25  # between two looks at whether something has failed


def open_connections(
    ends: Sequence[tuple[int, int]], rank: int, address: Address, token: bytes, control: ControlPlane
) -> dict[int, socket.socket]:
    """Open this rank's connections, and return them by index. Collective; blocks until all are there.

    Args:
        ends: for each connection the ranks that send and receive on it, the same on all ranks.
        rank: this rank.
        address: the address that the others connect to.
        token: 16 bytes that only these ranks know.
        control: their control plane.

    Raises:
        TransferError: a rank cannot be reached, or its connection has not arrived.
    """
    missing = {index for index, (_, receiver) in enumerate(ends) if receiver == rank}
    with ExitStack() as unless_done:
        listener = socket.create_server((address.text, 0), family=address.family, backlog=len(missing) + MOST_SILENT)
        unless_done.enter_context(listener)
        own = Endpoint(address.text, listener.getsockname()[1])
        endpoints = [decode(Endpoint, data, "endpoint") for data in control.exchange(Collective.CONNECT, encode(own))]
        opened = {}
        for index, (sender, receiver) in enumerate(ends):
            if sender == rank:
                opened[index] = unless_done.enter_context(
                    _connected(endpoints[receiver], receiver, Frame(Kind.HELLO, index, token))
                )
        control.exchange(Collective.CONNECT, b"")  # now all have connected, so no later wait is needed
        for index, connection in arrived(listener, token, missing, control).items():
            opened[index] = unless_done.enter_context(connection)
        for connection in opened.values():
            prepare(connection)
            connection.settimeout(None)
        listener.close()
        unless_done.pop_all()
    return opened


def _connected(to: Endpoint, receiver: int, hello: Frame) -> socket.socket:
    with ExitStack() as unless_done:
        try:
            connection = unless_done.enter_context(socket.create_connection((to.address, to.port), timeout=HELLO_S))
            connection.sendall(hello.pack())
        except (OSError, OverflowError, UnicodeError) as error:
            raise TransferError(f"rank {receiver} cannot be reached at {to.address}, port {to.port}: {error}") from error
        unless_done.pop_all()
    return connection


def arrived(listener: socket.socket, token: bytes, missing: Collection[int], control: ControlPlane) -> dict[int, socket.socket]:
    """Accept the connections of the other ranks, by index. Other clients are disconnected without waiting for their data."""
    found: dict[int, socket.socket] = {}

    def on_hello(connection: socket.socket, hello: Frame) -> None:
        if hello.body == token and hello.number in missing and hello.number not in found:
            found[hello.number] = connection
        else:
            connection.close()

    with ExitStack() as unless_done, ExitStack() as after:
        selector = after.enter_context(selectors.DefaultSelector())
        after.enter_context(IncomingConnections(listener, selector, len(missing), on_hello))
        unless_done.callback(_close, found)
        until = time.monotonic() + HELLO_S
        while len(found) < len(missing):
            control.check()
            if time.monotonic() > until:
                late = sorted({*missing} - found.keys())
                raise TransferError(f"connections {late} were opened by their senders, but did not arrive within {HELLO_S:g} s")
            serve(selector, LOOK_S)
        unless_done.pop_all()
    return found


def _close(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
