"""Connections last as long as the user's timeout while the other machine is silent, and no machine is given another time."""

from __future__ import annotations

import errno
import math
import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest
import torch

from bpipe.comm.health.collective import Collective
from bpipe.comm.health.driver import ConnectedControlPlane
from bpipe.comm.rendezvous import outgoing
from bpipe.comm.rendezvous.tcp import prepare
from bpipe.comm.transport import connect
from bpipe.comm.transport.c10d import MARGIN_S, C10dTransport
from bpipe.schedules import Channel, Purpose
from tests.comm.test_connect import Together
from tests.ranks import run_ranks

OPTIONS = ("TCP_USER_TIMEOUT", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT")


def options_of(connection: socket.socket) -> tuple[int, ...]:
    return tuple(connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, option)) for option in OPTIONS)


@pytest.mark.parametrize(
    "lost_s, expected",
    [
        (0.5, (500, 5, 5, 1)),
        (15, (15_000, 5, 5, 2)),
        (600, (600_000, 5, 5, 119)),
        (1800.25, (1_800_250, 15, 15, 120)),
        (86400, (86_400_000, 681, 681, 126)),
        (math.inf, (2**20 * 1000, 8257, 8257, 126)),
    ],
)
def test_the_kernel_waits_as_long_as_it_is_told(lost_s: float, expected: tuple[int, ...]) -> None:
    with socket.socket() as connection:
        prepare(connection, lost_s)
        assert options_of(connection) == expected
        idle, every, number = expected[1:]
        assert lost_s in (0.5, math.inf) or lost_s <= idle + every * number < lost_s + every  # where that is all that there is
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) and connection.getsockopt(6, socket.TCP_NODELAY)


def test_a_connection_that_has_ended_and_one_that_is_none_of_tcp_stay_as_they_are() -> None:
    one, other = socket.socketpair()
    with one, other:
        prepare(one, 10.0)
        other.close()
        prepare(one, 10.0)
        assert one.recv(1) == b""


def waits_of(rank: int) -> list[int]:
    transport = C10dTransport(None, torch.device("cpu"), timeout_s=77.0)
    transport.exchange(Collective.STEP, b"")
    transport.connect([Channel(Purpose.FORWARD, 0, 1), Channel(Purpose.EVICT, 1, 2), Channel(Purpose.BACKWARD, 1, 0)], (0, 1, 2))
    control = transport.control
    assert isinstance(control, ConnectedControlPlane)
    connections = [*(peer.connection for peer in control.peers.values()), *control.channel_sockets]
    found = [options_of(one)[0] for one in connections if one.family != socket.AF_UNIX]
    transport.exchange(Collective.STEP, b"")
    transport.close()
    return found


def test_every_connection_of_a_pipeline_lasts_as_long_as_its_timeout() -> None:
    control, channel = 77_000, 1000 * (77 + int(MARGIN_S))
    assert run_ranks(waits_of, 3) == [[control] * 2 + [channel] * number for number in (2, 3, 1)]


PLAIN = socket.socket.connect
Fails = Callable[[socket.socket], None]


def unreachable(code: int) -> Fails:
    def refuse(caller: socket.socket) -> None:
        raise OSError(code, "gone")

    return refuse


def unheard(caller: socket.socket) -> None:
    """Call a machine whose kernel drops the call, because its queue is full."""
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    KEPT.extend([full, *(socket.socket() for _ in range(3))])
    for one in KEPT[-3:]:
        one.setblocking(False)
        with suppress(BlockingIOError):
            PLAIN(one, full.getsockname())
    PLAIN(caller, full.getsockname())


KEPT: list[socket.socket] = []


@pytest.mark.parametrize(
    "fails",
    [*map(unreachable, (errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT)), unheard],
    ids=["ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "silence"],
)
def test_an_outage_while_channels_open_is_waited_for(fails: Fails, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that says that nobody listens is believed after REACH_S; one that is not heard is not lost."""
    calls = count()

    class Cut(socket.socket):
        def connect(self, address: Any) -> None:
            if next(calls) < 5:
                fails(self)
            PLAIN(self, address)

    monkeypatch.setattr(connect, "REACH_S", 0.0)
    monkeypatch.setattr(connect, "LOOK_S", 0.002)
    monkeypatch.setattr(outgoing, "FIRST_S", 0.002)
    monkeypatch.setattr(outgoing.socket, "socket", Cut)
    (found,) = Together(1).opened([(0, 0)])
    for one in [found[0], *KEPT]:
        one.close()
    assert next(calls) > 5
