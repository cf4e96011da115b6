"""Find the addresses that the other ranks can use to reach this machine."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from bpipe._version import __version__
from bpipe.comm.rendezvous.shortage import passing_over
from bpipe.comm.wire.codec import decode
from bpipe.environment import gloo_interfaces, interface_pattern
from bpipe.errors import CommError

__all__: list[str] = []

GET_ADDRESS = 0x8915  # SIOCGIFADDR, of Linux
IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # likewise
LINK_LOCAL = 0x20  # the scope of addresses there that mean nothing on other machines
ELSEWHERE = ("192.0.2.1", "2001:db8::1")  # addresses for documentation, to which nothing is sent
MOST_ADDRESSES = 8


class Address(NamedTuple):
    """An address, and its family: IPv4 or IPv6."""

    text: str
    family: socket.AddressFamily

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine reaches it."""
        return ip_address(self.text).is_loopback


class Endpoint(NamedTuple):
    """The endpoint that a rank listens at.

    Args:
        places: addresses, as numbers of IPv4 or IPv6, each with its port, in the order in which to try them.
        host: the name of its machine, for messages.
        name: the rank's in a meeting, made of random bytes.
        fingerprint: shows whether the rank has the same secret as another one; empty if it has none.
        version: of its bpipe.
    """

    places: tuple[tuple[str, int], ...]
    host: str = ""
    name: bytes = b""
    fingerprint: bytes = b""
    version: str = __version__


def read_endpoint(data: bytes) -> Endpoint:
    """Read an endpoint that another rank has published.

    Raises:
        CommError: the bytes are not one, or name no address or port: nothing is looked up for a stranger.
    """
    endpoint = decode(Endpoint, data, "endpoint")
    for address, port in endpoint.places:
        try:
            ip_address(address)
        except ValueError as error:
            raise CommError(f"not a valid endpoint: {error!s:.200}") from error
        if not 0 < port < 2**16:
            raise CommError(f"not a valid endpoint: port {port}")
    return endpoint


def own_addresses(store: Any) -> list[Address]:
    """Return the addresses of the interfaces that the user chose for gloo or NCCL, else those towards the store's host.

    Where the name of that host leads to this machine's loopback interface, as /etc/hosts may have it, other machines need the
    addresses of this machine's other interfaces.

    Args:
        store: a store of torch.distributed.
    """
    found = [address for name in _chosen() for address in _of_interface(name)]
    if not found:
        host, port = _host_of(store)
        found = _towards(host, port)
        if all(address.is_loopback for address in found) and not _is_loopback(host):
            found = [*_outside(), *found]
    return list(dict.fromkeys(found))[:MOST_ADDRESSES] or [Address("127.0.0.1", socket.AF_INET)]


def _chosen() -> list[str]:
    """Return the interfaces that the user chose, in NCCL's way by the start of their names if not in gloo's."""
    pattern = interface_pattern()
    if (exact := gloo_interfaces()) or not pattern:
        return exact
    is_left_out, pattern = pattern.startswith("^"), pattern.removeprefix("^")
    is_exact, names = pattern.startswith("="), pattern.removeprefix("=").split(",")
    return [
        name
        for _, name in socket.if_nameindex()
        if is_left_out != any(name == one if is_exact else name.startswith(one) for one in names)
        and not (is_left_out and name == "lo")
    ]


def _of_interface(name: str) -> list[Address]:
    """Return the addresses of a network interface, as far as the platform has a call for it."""
    found = []
    with suppress(ImportError), passing_over():
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe.fileno(), GET_ADDRESS, struct.pack("256s", os.fsencode(name)[:15]))
        found.append(Address(socket.inet_ntoa(answer[20:24]), socket.AF_INET))
    with passing_over():
        for number, _, _, scope, _, interface in map(str.split, IPV6_ADDRESSES.read_text().splitlines()):
            if interface == name and int(scope, 16) != LINK_LOCAL:
                found.append(Address(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(number)), socket.AF_INET6))
    return found


def _host_of(store: Any) -> tuple[str, int]:
    """Return a store's host and port; this machine's name for a store without a host, such as a file."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return getattr(store, "host", None) or socket.gethostname(), getattr(store, "port", None) or 1


def _is_loopback(host: str) -> bool:
    """Return whether a host is called this machine by everybody, so that all ranks are on it."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _towards(host: str, port: int) -> list[Address]:
    """Return this machine's addresses on the ways to a host; a connected datagram socket knows one, and sends nothing."""
    found = []
    with suppress(UnicodeError), passing_over():
        for family, kind, protocol, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with passing_over(), socket.socket(family, kind, protocol) as probe:
                probe.connect(target)
                found.append(Address(probe.getsockname()[0], family))
    return found


def _outside() -> Iterable[Address]:
    """Return the addresses that other machines may reach: first those of the default route."""
    found = [address for elsewhere in ELSEWHERE for address in _towards(elsewhere, 1)]
    found += [address for _, name in socket.if_nameindex() for address in _of_interface(name)]
    return [address for address in found if not address.is_loopback]
