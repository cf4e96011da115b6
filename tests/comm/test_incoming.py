"""Incoming connections: who says hello is greeted, who says something else is disconnected, and nobody is waited for in turn."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from bpipe.comm.rendezvous import incoming
from bpipe.comm.rendezvous.incoming import IncomingConnections, serve
from bpipe.comm.wire.frames import Frame, Kind

HELLO = Frame(Kind.HELLO, 7, b"it is me")


class Desk:
    """A listener, whose connections are served when the test says so."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.greeted = stack, list[tuple[socket.socket, Frame]]()
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=50))
        self.selector = stack.enter_context(selectors.DefaultSelector())
        stack.enter_context(IncomingConnections([self.listener], self.selector, 2, self._greet))

    def _greet(self, connection: socket.socket, hello: Frame) -> None:
        self.greeted.append((self.stack.enter_context(connection), hello))

    def call(self, words: bytes = b"") -> socket.socket:
        connection = self.stack.enter_context(socket.create_connection(self.listener.getsockname()))
        connection.sendall(words)
        connection.settimeout(0.0)
        return connection

    def serve(self) -> None:
        for _ in range(5):
            serve(self.selector, 0.02)


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(incoming, "MOST_SILENT", 3)
    with ExitStack() as stack:
        yield Desk(stack)


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def test_a_hello_is_read_and_nothing_behind_it(desk: Desk) -> None:
    desk.call(HELLO.pack() + b"more")
    desk.serve()
    ((connection, hello),) = desk.greeted
    assert hello == HELLO and connection.recv(10) == b"more"


def test_a_hello_may_come_in_pieces_while_others_say_theirs(desk: Desk) -> None:
    slow = desk.call(HELLO.pack()[:5])
    desk.serve()
    desk.call(HELLO._replace(number=8).pack())
    desk.serve()
    assert [hello.number for _, hello in desk.greeted] == [8]
    slow.sendall(HELLO.pack()[5:])
    desk.serve()
    assert [hello.number for _, hello in desk.greeted] == [8, 7]


@pytest.mark.parametrize("make", [lambda: b"GET / HTTP/1.1\r\nHost: somebody\r\n\r\n", lambda: Frame(Kind.CALL).pack()])
def test_who_says_something_else_is_disconnected(desk: Desk, make: Callable[[], bytes]) -> None:
    stranger = desk.call(make())
    desk.serve()
    assert is_closed(stranger) and not desk.greeted


def test_too_many_who_say_nothing_push_out_the_first(desk: Desk) -> None:
    silent = []
    for _ in range(7):
        silent.append(desk.call())
        desk.serve()
    assert [is_closed(one) for one in silent] == [True] * 2 + [False] * 5
    silent[-1].sendall(HELLO.pack())
    desk.serve()
    assert [hello for _, hello in desk.greeted] == [HELLO]
