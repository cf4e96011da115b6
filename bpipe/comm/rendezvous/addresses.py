"""Find the address that the other ranks can use to reach this machine."""

from __future__ import annotations

import os
import socket
import struct
from ipaddress import ip_address
from typing import Any, NamedTuple

from bpipe.comm.wire.codec import decode
from bpipe.environment import gloo_interface
from bpipe.errors import CommError

__all__: list[str] = []

GET_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux


class Address(NamedTuple):
    """An address, and its family: IPv4 or IPv6."""

    text: str
    family: socket.AddressFamily


class Endpoint(NamedTuple):
    """The endpoint that a rank listens at.

    Args:
        address: numbers, of IPv4 or IPv6.
        host: the name of its machine, for messages.
        name: the rank's in a meeting, made of random bytes.
    """

    address: str
    port: int
    host: str = ""
    name: bytes = b""


def read_endpoint(data: bytes) -> Endpoint:
    """Read an endpoint that another rank has published.

    Raises:
        CommError: the bytes are not one, or name no address or port: nothing is looked up for a stranger.
    """
    endpoint = decode(Endpoint, data, "endpoint")
    try:
        ip_address(endpoint.address)
    except ValueError as error:
        raise CommError(f"not a valid endpoint: {error!s:.200}") from error
    if not 0 < endpoint.port < 2**16:
        raise CommError(f"not a valid endpoint: port {endpoint.port}")
    return endpoint


def own_address(store: Any) -> Address:
    """Return the address of the interface in GLOO_SOCKET_IFNAME, else of the one that this machine uses to reach the store's host.

    Args:
        store: a store of torch.distributed.
    """
    return _of_interface(gloo_interface()) or _towards(store) or _of_name()


def _of_interface(name: str) -> Address | None:
    """Return the IPv4 address of a network interface, if the platform has a call for it."""
    if not name:
        return None
    try:
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", os.fsencode(name)[:15]))
        return Address(socket.inet_ntoa(answer[20:24]), socket.AF_INET)
    except (ImportError, OSError):
        return None


def _towards(store: Any) -> Address | None:
    """Return this machine's address towards the store's host; a connected datagram socket knows it and sends nothing."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    host, port = getattr(store, "host", None), getattr(store, "port", None)
    if not host or not port:
        return None
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)
            return Address(probe.getsockname()[0], family)
    except OSError:
        return None


def _of_name() -> Address:
    """Return the address of this machine's hostname, for stores without a host, such as a file."""
    try:
        return Address(socket.gethostbyname(socket.gethostname()), socket.AF_INET)
    except OSError:
        return Address("127.0.0.1", socket.AF_INET)
