"""The options that all connections between ranks have in common."""

from __future__ import annotations

import socket

__all__: list[str] = []

# How the kernel notices a machine that has gone silent; each option is set where the platform has it.
KEEP_ALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}


def prepare(connection: socket.socket, **options: int) -> None:
    """Make a connection send small messages at once, and check now and then whether the other machine is still there.

    Args:
        connection: a TCP connection.
        options: further TCP options by name, set where the platform has them.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {**KEEP_ALIVE, **options}.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
