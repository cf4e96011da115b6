"""The options that all connections between ranks have in common."""

from __future__ import annotations

import math
import socket
from contextlib import suppress

__all__: list[str] = []

PROBE_S, MOST_PROBES = 5, 127  # between two probes of a silent machine, and as many as Linux counts
MOST_S = 2.0**20  # twelve days: the kernel counts milliseconds in 31 bits


def prepare(connection: socket.socket, lost_s: float) -> None:
    """Make a connection send small messages at once, and end only when the other machine's kernel has been silent for `lost_s`.

    A process that ends closes its connections by itself, so this is about machines and networks alone. What was lost on the way
    is sent again meanwhile, so that a shorter outage goes by. A connection that has ended already stays as it is.

    Args:
        connection: a TCP connection.
        lost_s: seconds; each option is set where the platform has it.
    """
    lost_s = min(lost_s, MOST_S)
    every_s = max(PROBE_S, math.ceil(lost_s / MOST_PROBES))
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": every_s,
        "TCP_KEEPINTVL": every_s,
        "TCP_KEEPCNT": max(1, math.ceil(lost_s / every_s) - 1),  # Linux counts to the next one instead
        "TCP_USER_TIMEOUT": math.ceil(1000 * lost_s),
    }
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in options.items():
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
