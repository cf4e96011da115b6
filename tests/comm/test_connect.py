"""Connections from senders to receivers: each rank gets its own ends, and strangers none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.control_plane import NullControlPlane
from bpipe.comm.rendezvous.addresses import Address, Endpoint
from bpipe.comm.transport import connect
from bpipe.comm.transport.connect import TOKEN_BYTES, _sorted, open_connections
from bpipe.comm.wire.codec import decode
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import TransferError
from tests.comm.meetings import quietly
from tests.patience import PATIENCE_S, outcomes

HERE = [Address("127.0.0.1", socket.AF_INET)]
TOKEN = b"t" * TOKEN_BYTES


class Together:
    """What a few threads tell each other, as ranks do."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.told: dict[int, bytes] = {}
        self.strangers: list[socket.socket] = []

    def opened(self, ends: Sequence[tuple[int, int]], says: Sequence[bytes] = ()) -> list[dict[int, socket.socket]]:
        """The connections of all ranks, after strangers have come and said something."""

        def on_rank(rank: int) -> dict[int, socket.socket]:
            return open_connections(ends, rank, HERE, TOKEN, Line(self, rank, says), quietly)

        found = outcomes([partial(on_rank, rank) for rank in range(self.size)])
        for error in found:
            if isinstance(error, BaseException):
                raise error
        return found


class Line(NullControlPlane):
    """A rank's line to the others."""

    def __init__(self, together: Together, rank: int, says: Sequence[bytes]) -> None:
        super().__init__()
        self._together, self._rank, self._says = together, rank, says

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        together = self._together
        together.told[self._rank] = data
        together.barrier.wait(PATIENCE_S)
        told = [together.told[rank] for rank in range(together.size)]
        if self._rank == 0 and data:
            together.strangers = [stranger(place, words) for place in told for words in self._says]
        together.barrier.wait(PATIENCE_S)
        return told


def stranger(place: bytes, words: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", decode(Endpoint, place, "endpoint").places[0][1]))
    connection.sendall(words)
    return connection


def hello(index: int, token: bytes) -> bytes:
    return Frame(Kind.HELLO, index, token).pack()


ENDS = [(0, 1), (1, 0), (0, 2), (0, 1)]
SAYS = [
    *[b""] * 100,  # more than may wait unheard
    b"half",
    b"GET / HTTP/1.1\r\nHost: somebody else\r\n\r\n",
    hello(0, b"x" * TOKEN_BYTES),
    hello(77, TOKEN),
    Frame(Kind.CALL, 0, TOKEN).pack(),
]


@pytest.mark.parametrize("says", [[], SAYS], ids=["alone", "strangers come first"])
def test_each_connection_has_its_two_ends(says: list[bytes]) -> None:
    """Nobody waits for who says nothing: of a hundred, each for the time of a hello, that would be too long for `opened`."""
    together = Together(3)
    found = together.opened(ENDS, says)
    with ExitStack() as stack:
        for connection in [*together.strangers, *(one for of_rank in found for one in of_rank.values())]:
            stack.enter_context(connection)
        assert [sorted(of_rank) for of_rank in found] == [[0, 1, 2, 3], [0, 1, 3], [2]]
        for index, (sender, receiver) in enumerate(ENDS):
            found[sender][index].sendall(b"%d" % index)
            assert found[receiver][index].recv(1) == b"%d" % index


def test_a_rank_that_cannot_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def connect(self, address: object) -> None:
            raise ConnectionRefusedError("no")

    monkeypatch.setattr(socket, "socket", Refusing)
    monkeypatch.setattr(connect, "REACH_S", 0.1)
    with pytest.raises(TransferError, match=r"^rank 0 cannot be reached at 127\.0\.0\.1, port \d+: no"):
        Together(1).opened([(0, 0)])


def test_the_places_of_a_rank_are_tried_in_turn() -> None:
    """The one that has been reached before comes first."""
    there = Endpoint((("192.0.2.1", 1), ("127.0.0.1", 2), ("127.0.0.7", 3)))
    assert _sorted(there, "127.0.0.7").places == (("127.0.0.7", 3), ("192.0.2.1", 1), ("127.0.0.1", 2))
    assert _sorted(there, None) == there


def test_a_connection_that_does_not_arrive_is_waited_for_as_long_as_the_caller_wants() -> None:
    waited: list[str] = []

    def check(note: str) -> None:
        waited.append(note)
        if len(waited) == 3:
            raise TransferError("enough")

    with pytest.raises(TransferError, match="enough"):
        open_connections([(1, 0)], 0, HERE, TOKEN, Line(Together(1), 0, []), check)
    assert set(waited) == {"connections with ranks [1] for its channels are being opened"}


def test_a_call_that_ends_unheard_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of each channel ends after its proof, before the caller is told that it is kept."""
    lost: list[int] = []
    on_proof = connect._Opening._on_proof

    def losing(self: Any, index: int, expected: bytes, connection: socket.socket, frame: Frame) -> None:
        if index in lost:
            on_proof(self, index, expected, connection, frame)
        else:
            lost.append(index)
            connection.close()

    monkeypatch.setattr(connect._Opening, "_on_proof", losing)
    found = Together(3).opened(ENDS)
    assert sorted(lost) == list(range(len(ENDS)))
    for index, (sender, receiver) in enumerate(ENDS):
        found[sender][index].sendall(b"%d" % index)
        assert found[receiver][index].recv(1) == b"%d" % index
    for connection in [one for of_rank in found for one in of_rank.values()]:
        connection.close()
