"""What ranks say while they meet and open channels is said again by another, at once and the next time: he does not get in."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.health.collective import Collective
from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import Peers
from bpipe.comm.transport.connect import open_connections
from bpipe.comm.wire.codec import decode, encode
from tests.attacks.relays import Relay
from tests.comm.meetings import quietly, together
from tests.comm.test_connect import HERE, TOKEN, Line, Together
from tests.patience import PATIENCE_S

SIZE = 3
SECRET = b"open sesame"
ENDS = [(one, other) for one in range(SIZE) for other in range(SIZE) if one != other]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


class Between:
    """Relays in front of all ranks."""

    def __init__(self, stack: ExitStack, before: list[bytes]) -> None:
        self._stack, self._before, self.relays = stack, before, list[Relay]()

    def moved(self, data: bytes) -> bytes:
        """Return an endpoint with a relay's port in place of the rank's."""
        endpoint = decode(Endpoint, data, "endpoint")
        self.relays.append(self._stack.enter_context(Relay(endpoint.places[0], self._before)))
        return encode(endpoint._replace(places=(self.relays[-1].place,)))

    def overheard(self) -> list[bytes]:
        assert sum(relay.num_replays for relay in self.relays) >= SIZE
        return [call for relay in self.relays for call in relay.overheard]


class Store:
    """A store that an attacker has written to."""

    def __init__(self, store: Any, between: Between) -> None:
        self._store, self._between = store, between

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, self._between.moved(value))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class Told(Line):
    """A line to the other ranks, on which addresses are changed."""

    def __init__(self, group: Together, rank: int, between: Between) -> None:
        super().__init__(group, rank, [])
        self._between = between

    def exchange(self, call: Collective, data: bytes) -> list[bytes]:
        return super().exchange(call, self._between.moved(data))


def talk(connections: Iterator[tuple[socket.socket, socket.socket]]) -> int:
    """Say something at one end of each connection, hear it at the other one, and close both; return how many there are."""
    number = 0
    for number, (one, other) in enumerate(connections, 1):
        with one, other:
            other.settimeout(PATIENCE_S)
            one.sendall(b"%d" % number)
            assert other.recv(10) == b"%d" % number
    return number


def meet(between: Between) -> None:
    store = Store(dist.HashStore(), between)
    met = together([partial(meet_peers, store, "key", rank, SIZE, quietly, secret=SECRET) for rank in range(SIZE)])
    assert all(isinstance(one, Peers) for one in met), met
    of_ranks = [{peer.rank: peer.connection for peer in one.connections} for one in met]
    assert talk((of_ranks[one][other], of_ranks[other][one]) for one, other in ENDS if one < other) == 3


def open_channels(between: Between, secret: bytes = SECRET) -> None:
    group = Together(SIZE)

    def on_rank(rank: int) -> dict[int, socket.socket]:
        return open_connections(ENDS, rank, HERE, TOKEN, Told(group, rank, between), quietly, secret=secret)

    found = together([partial(on_rank, rank) for rank in range(SIZE)])
    assert all(isinstance(one, dict) for one in found), found
    assert talk((found[one][index], found[other][index]) for index, (one, other) in enumerate(ENDS)) == len(ENDS)


CASES = {"meeting": meet, "channels": open_channels, "channels, no secret": partial(open_channels, secret=b"")}


@pytest.mark.parametrize("times", [3, 30])
@pytest.mark.parametrize("case", CASES)
def test_what_was_overheard_gets_nobody_in(case: str, times: int) -> None:
    before: list[bytes] = []
    for _ in range(times):
        with ExitStack() as stack:
            between = Between(stack, before)
            CASES[case](between)
        before = between.overheard()
        assert before
