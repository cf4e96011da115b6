"""Where ranks listen: the addresses that others can reach, in both families, and the ports that the user allows."""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.rendezvous import addresses, outgoing
from bpipe.comm.rendezvous.addresses import Address, Endpoint, own_addresses
from bpipe.comm.rendezvous.listening import Listeners
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.wire.codec import decode, encode
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import CommError, ConfigurationError
from tests.comm.meetings import quietly, store, together
from tests.patience import PATIENCE_S

__all__ = ["store"]

LOOPBACK, OTHER = Address("127.0.0.1", socket.AF_INET), Address("127.0.0.7", socket.AF_INET)
HAS_IPV6 = addresses.IPV6_ADDRESSES.exists() and Address("::1", socket.AF_INET6) in addresses._of_interface("lo")


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "BPIPE_PORT_RANGE"):
        monkeypatch.delenv(name, raising=False)


def texts(store: Any) -> list[str]:
    return [address.text for address in own_addresses(store)]


class At:
    """A store at a host."""

    def __init__(self, host: str) -> None:
        self.host, self.port = host, 1


@pytest.mark.parametrize(
    "chosen",
    [
        {"GLOO_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "lo"},
        {"NCCL_SOCKET_IFNAME": "=lo"},
        {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "nonesuch"},
    ],
)
def test_the_interface_that_was_chosen(monkeypatch: pytest.MonkeyPatch, chosen: dict[str, str]) -> None:
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert texts(At("192.0.2.1")) == ["127.0.0.1", *["::1"] * HAS_IPV6]


def test_nccl_s_notation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "eth1", "ib0"])))
    for given, expected in {"eth": ["eth0", "eth1"], "=eth": [], "=eth1,ib0": ["eth1", "ib0"], "^eth": ["ib0"]}.items():
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
        assert addresses._chosen() == expected


def test_the_way_to_the_store_if_there_is_no_such_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch")
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert texts(dist.PrefixStore("a", dist.PrefixStore("b", tcp))) == ["127.0.0.1"]


def test_a_name_that_leads_to_the_loopback_interface_is_not_all_that_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, rank 0 published 127.0.1.1, and ranks of other machines waited there until the timeout."""
    there = [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", 1))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    monkeypatch.setattr(addresses, "_outside", lambda: [OTHER, OTHER])
    monkeypatch.setattr(socket, "gethostname", lambda: "node0")
    for one in (At("node0"), dist.HashStore()):
        assert texts(one)[0] == "127.0.0.7" and texts(one)[1].startswith("127.") and len(texts(one)) == 2
    for everybody_s in ("127.0.0.1", "localhost"):
        assert "127.0.0.7" not in texts(At(everybody_s))


def test_a_host_that_cannot_be_found_leaves_the_loopback_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_outside", lambda: [])
    assert texts(At("nonesuch.invalid")) == ["127.0.0.1"]


def test_a_rank_s_places_are_tried_until_one_answers(store: Any) -> None:
    """The first is refused, at the second a stranger listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as stranger, socket.create_server(("127.0.0.1", 0)) as closed:
        gone = closed.getsockname()
        closed.close()

        class Misleading:
            def set(self, key: str, value: bytes) -> None:
                endpoint = decode(Endpoint, value, "endpoint")
                store.set(key, encode(endpoint._replace(places=(gone, stranger.getsockname(), *endpoint.places))))

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        found = together([lambda rank=rank: meet_peers(Misleading(), "key", rank, 2, quietly) for rank in range(2)])
        for one in found:
            for peer in one.connections:
                peer.close()


def test_a_rank_that_answers_late_waits_for_the_next_call(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 has gone on to another place by then. Before, rank 0 took the first call as made, and left the meeting."""
    monkeypatch.setattr("bpipe.comm.rendezvous.meeting.own_addresses", lambda _: [LOOPBACK, OTHER])
    monkeypatch.setattr(outgoing, "LOOK_S", 0.02)

    def slowly(_: str) -> None:
        time.sleep(0.1)

    found = together(
        [lambda rank=rank, check=check: meet_peers(store, "key", rank, 2, check) for rank, check in enumerate([slowly, quietly])]
    )
    assert [[peer.rank for peer in one.connections] for one in found] == [[1], [0]]
    ((ours,), (theirs,)) = [one.connections for one in found]
    ours.send(Frame(Kind.ASK))
    theirs.connection.settimeout(PATIENCE_S)
    assert [frame.kind for frame in theirs.reader.feed(theirs.receive())] == [Kind.ASK]
    ours.close()
    theirs.close()


@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 on the loopback interface")
def test_ranks_meet_over_ipv6(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_of_interface", lambda _: [Address("::1", socket.AF_INET6)])
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = together([lambda rank=rank: meet_peers(store, "key", rank, 2, quietly) for rank in range(2)])
    for one in found:
        for peer in one.connections:
            assert peer.connection.family == socket.AF_INET6
            peer.close()


def free_range(num_ports: int) -> int:
    """The first of some ports that are free, most likely."""
    first = 20_000 + os.getpid() % 9000
    while True:
        try:
            for port in range(first, first + num_ports):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            first += num_ports
        else:
            return first


def test_ports_come_from_the_range_until_all_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_range(3)
    monkeypatch.setenv("BPIPE_PORT_RANGE", f"{first}-{first + 2}")
    taken = [Listeners([LOOPBACK]) for _ in range(3)]
    assert [one.places for one in taken] == [(("127.0.0.1", first + index),) for index in range(3)]
    with pytest.raises(
        CommError, match=rf"^all ports of BPIPE_PORT_RANGE={first}-{first + 2} are taken at 127.0.0.1: widen the range"
    ):
        Listeners([LOOPBACK])
    with Listeners([OTHER]) as other:
        assert other.places == (("127.0.0.7", first),)
    for one in taken:
        one.close()
    with Listeners([LOOPBACK]) as again:
        assert again.places[0][1] == first


@pytest.mark.parametrize("given", ["29600", "29700-29600", "0-5", "a-b", "1-70000", "-", "1-2-3"])
def test_what_is_no_range_of_ports_is_refused(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("BPIPE_PORT_RANGE", given)
    with pytest.raises(ConfigurationError, match="is not a range of ports: give two ports, such as 29600-29700"):
        Listeners([LOOPBACK])


def test_an_address_that_is_not_this_machine_s_is_left_out() -> None:
    elsewhere = Address("192.0.2.1", socket.AF_INET)
    with Listeners([elsewhere, LOOPBACK]) as listeners:
        assert [address for address, _ in listeners.places] == ["127.0.0.1"]
    with pytest.raises(CommError, match=r"cannot listen at any of its addresses \(192\.0\.2\.1: "):
        Listeners([elsewhere])
