"""Open connections from sender to receiver, for as many channels as the ranks agree on."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.rendezvous.addresses import Address, Endpoint, read_endpoint
from bpipe.comm.rendezvous.incoming import MOST_SILENT, IncomingConnections, read_frame, serve
from bpipe.comm.rendezvous.listening import Listeners
from bpipe.comm.rendezvous.secret import channel_proof, is_same, nonce
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.wire.codec import encode
from bpipe.comm.wire.frames import ONLY_PROOF, Frame, FrameReader, Kind
from bpipe.errors import CommError, TransferError

__all__: list[str] = []

TOKEN_BYTES = 16
HELLO_S = 5.0
NOWHERE: Mapping[int, str] = {}
LOOK_S = 0.25  # between two looks at whether something has failed


def open_connections(
    ends: Sequence[tuple[int, int]],
    rank: int,
    addresses: Sequence[Address],
    token: bytes,
    control: ControlPlane,
    reached: Mapping[int, str] = NOWHERE,
    secret: bytes = b"",
) -> dict[int, socket.socket]:
    """Open this rank's connections, and return them by index. Collective; blocks until all are there.

    Args:
        ends: for each connection the ranks that send and receive on it, the same on all ranks.
        rank: this rank.
        addresses: the addresses that the others connect to.
        token: 16 bytes that only these ranks know.
        control: their control plane.
        reached: the address of each rank that this one has a connection with, to be tried first.
        secret: by which the ranks know each other; empty if there is none.

    Raises:
        TransferError: a rank cannot be reached, or its connection has not arrived.
    """
    missing = {index for index, (_, receiver) in enumerate(ends) if receiver == rank}
    with ExitStack() as unless_done:
        listeners = unless_done.enter_context(Listeners(addresses, len(missing) + MOST_SILENT))
        own = Endpoint(listeners.places, name=nonce(secret))
        endpoints = [read_endpoint(data) for data in control.exchange(Collective.CONNECT, encode(own))]
        names = [endpoint.name for endpoint in endpoints]
        opened = {}
        for index, (sender, receiver) in enumerate(ends):
            if sender == rank:
                opened[index] = unless_done.enter_context(
                    _connected(
                        _sorted(endpoints[receiver], reached.get(receiver)),
                        receiver,
                        Frame(Kind.HELLO, index, channel_proof(secret, "sender", token, index, ends[index], names)),
                    )
                )
        control.exchange(Collective.CONNECT, b"")  # now all have connected, so no later wait is needed
        expected = {index: channel_proof(secret, "sender", token, index, ends[index], names) for index in missing}
        for index, connection in arrived(listeners.sockets, expected, control).items():
            opened[index] = unless_done.enter_context(connection)
        proofs = {index: channel_proof(secret, "receiver", token, index, ends[index], names) for index in opened} if secret else {}
        for index in proofs.keys() & missing:
            opened[index].sendall(Frame(Kind.PROOF, index, proofs[index]).pack())
        for index in proofs.keys() - missing:
            _check_proved(opened[index], ends[index][1], proofs[index])
        for connection in opened.values():
            prepare(connection)
            connection.settimeout(None)
        listeners.close()
        unless_done.pop_all()
    return opened


def _sorted(endpoint: Endpoint, first: str | None) -> Endpoint:
    return endpoint._replace(places=tuple(sorted(endpoint.places, key=lambda place: place[0] != first)))


def _connected(to: Endpoint, receiver: int, hello: Frame) -> socket.socket:
    refused = []
    for address, port in to.places:
        with ExitStack() as unless_done:
            try:
                connection = unless_done.enter_context(socket.create_connection((address, port), timeout=HELLO_S))
                connection.sendall(hello.pack())
            except (OSError, OverflowError, UnicodeError) as error:
                refused.append(f"at {address}, port {port}: {error}")
                continue
            unless_done.pop_all()
            return connection
    raise TransferError(f"rank {receiver} cannot be reached {'; '.join(refused)}")


def _check_proved(connection: socket.socket, receiver: int, proof: bytes) -> None:
    """Wait for the proof of a connection's receiver, behind its control plane's word that it has the connection."""
    connection.settimeout(HELLO_S)
    reader, answer = FrameReader(ONLY_PROOF), None
    with suppress(OSError, CommError):
        while answer is None:
            answer = read_frame(connection, reader)
    if answer is None or not is_same(answer.body, proof):
        raise TransferError(f"who answered at rank {receiver}'s address has not proved that it has the secret in BPIPE_SECRET")


def arrived(listeners: Iterable[socket.socket], expected: Mapping[int, bytes], control: ControlPlane) -> dict[int, socket.socket]:
    """Accept the connections of the other ranks, by index, each with the hello that is expected.

    Other clients are disconnected without waiting for their data.
    """
    found: dict[int, socket.socket] = {}

    def on_hello(connection: socket.socket, hello: Frame) -> None:
        if hello.number in expected and hello.number not in found and is_same(hello.body, expected[hello.number]):
            found[hello.number] = connection
        else:
            connection.close()

    with ExitStack() as unless_done, ExitStack() as after:
        selector = after.enter_context(selectors.DefaultSelector())
        after.enter_context(IncomingConnections(listeners, selector, len(expected), on_hello))
        unless_done.callback(_close, found)
        until = time.monotonic() + HELLO_S
        while len(found) < len(expected):
            control.check()
            if time.monotonic() > until:
                late = sorted(expected.keys() - found.keys())
                raise TransferError(f"connections {late} were opened by their senders, but did not arrive within {HELLO_S:g} s")
            serve(selector, LOOK_S)
        unless_done.pop_all()
    return found


def _close(connections: Mapping[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
