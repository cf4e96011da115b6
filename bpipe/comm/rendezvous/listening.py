"""Listen for connections: at several addresses, and at the ports that the user allows."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from contextlib import ExitStack

from bpipe.comm.rendezvous.addresses import Address
from bpipe.comm.rendezvous.shortage import way_out
from bpipe.environment import port_range
from bpipe.errors import CommError

__all__: list[str] = []

# How many connections may wait to be accepted. They are accepted at once, but a burst of strangers must not fill this up: a kernel
# whose call finds no place repeats it only after a second.
BACKLOG = 1024


class Listeners(ExitStack):
    """Sockets that listen at each of some addresses, closed with this context. An address that the system refuses is left out.

    Args:
        addresses: this machine's.

    Raises:
        CommError: there is no address that one can listen at, or all allowed ports are taken.
        OSError: this process has run out of descriptors, or the machine of memory.
    """

    def __init__(self, addresses: Sequence[Address]) -> None:
        super().__init__()
        self.sockets: list[socket.socket] = []
        refused = []
        with ExitStack() as unless_done:
            unless_done.push(self)
            for address in addresses:
                try:
                    self.sockets.append(self.enter_context(_listening(address)))
                except OSError as error:
                    if way_out(error):
                        raise
                    refused.append(f"{address.text}: {error}")
            if not self.sockets:
                raise CommError(f"this rank cannot listen at any of its addresses ({'; '.join(refused)})")
            unless_done.pop_all()

    @property
    def places(self) -> tuple[tuple[str, int], ...]:
        """Return the address and port of each."""
        return tuple(one.getsockname()[:2] for one in self.sockets)


def _listening(address: Address) -> socket.socket:
    ports = port_range()
    for port in [0] if ports is None else range(ports[0], ports[1] + 1):
        try:
            return socket.create_server((address.text, port), family=address.family, backlog=BACKLOG)
        except OSError as error:
            if ports is None or error.errno != errno.EADDRINUSE:
                raise
    assert ports is not None
    raise CommError(
        f"all ports of BPIPE_PORT_RANGE={ports[0]}-{ports[1]} are taken at {address.text}: widen the range, to at least two ports "
        "for each rank of a machine"
    )
