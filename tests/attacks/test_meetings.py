"""Strangers at the ports of ranks that meet: nobody is held up by more than 0.1 s, and no meeting fails.

Meetings with strangers and without alternate, so that a busy machine slows both alike, and their medians are compared.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from statistics import median
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.rendezvous.addresses import Endpoint
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import Peers, process_name
from bpipe.comm.wire.codec import decode
from tests.attacks.strangers import WORDS, Place, hello_of, places_in, seconds, strangers_at
from tests.comm.meetings import quietly, together
from tests.tries import holds_in_one_try

SIZE = 3
TIMES = 5
MOST_SLOWER_S = 0.1
SECRET = b"open sesame"


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


def meet(store: Any, secret: bytes, first: int = 0) -> None:
    """Ranks start one after the other, as processes do, so that the first ones wait among the strangers."""

    def on_rank(rank: int) -> Peers:
        threading.Event().wait(0.03 * ((rank - first) % SIZE))
        return meet_peers(store, "key", rank, SIZE, quietly, secret=secret)

    found = together([partial(on_rank, rank) for rank in range(SIZE)])
    assert all(isinstance(one, Peers) for one in found), found
    check(found)


def check(found: list[Peers]) -> None:
    """Check that the ranks of this process have met each other and nobody else, and let them go."""
    assert {peer.process for one in found for peer in one.connections} == {process_name(os.getpid())}
    assert all(len(one.connections) == SIZE - 1 for one in found)
    for one in found:
        for peer in one.connections:
            peer.close()


def endpoints_in(store: Any) -> dict[int, Endpoint]:
    """The ports and random names of ranks, as one reads them who can read the store."""
    return {rank: decode(Endpoint, store.get(f"key/{rank}"), "endpoint") for rank in range(SIZE) if store.check([f"key/{rank}"])}


def compare(words: Any, secret: bytes) -> None:
    holds_in_one_try(partial(slower_s, words, secret), lambda slower: slower < MOST_SLOWER_S)


def slower_s(words: Any, secret: bytes) -> float:
    quiet, disturbed, num_strangers = [], [], 0
    for turn in range(TIMES):
        first = turn % SIZE
        quiet.append(seconds(partial(meet, dist.HashStore(), secret, first)))
        store = dist.HashStore()
        with strangers_at(partial(places_in, store, SIZE), partial(words, store)) as accepted:
            disturbed.append(seconds(partial(meet, store, secret, first)))
        num_strangers += len(accepted)
    print(f"{num_strangers} strangers; quiet {median(quiet):.3f} s, disturbed {median(disturbed):.3f} s")
    assert num_strangers >= TIMES
    return median(disturbed) - median(quiet)


@pytest.mark.parametrize("secret", [b"", SECRET])
@pytest.mark.parametrize("kind", WORDS)
def test_strangers_slow_no_meeting(kind: str, secret: bytes) -> None:
    compare(lambda store, place: WORDS[kind](), secret)


@pytest.mark.parametrize("has_nonce", [False, True])
def test_hijackers_without_the_secret_slow_no_meeting(has_nonce: bool) -> None:
    """They know the names from the store, and come to every port in the name of every rank."""
    said = set[tuple[int, int]]()

    def words(store: Any, place: Place) -> list[bytes]:
        found = [(owner, endpoint.name) for owner, endpoint in endpoints_in(store).items() if place in endpoint.places]
        if not found:
            return []
        (owner, name), turns[place] = found[0], (turns.get(place, -1) + 1) % SIZE
        said.add((owner, turns[place]))
        return [hello_of(turns[place], name, has_nonce=has_nonce)]

    turns: dict[Place, int] = {}
    compare(words, SECRET)
    assert {rank for _, rank in said} == {*range(SIZE)} and len({port for port, _ in said}) == SIZE
