"""Strangers at the ports of ranks that meet, open channels and train: nobody gets in, and all goes on, whatever that takes."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import Peers
from tests.attacks import test_channels as channels
from tests.attacks import test_meetings as meetings
from tests.attacks import test_steps as steps
from tests.attacks.strangers import WORDS, places_in, strangers_at
from tests.comm.meetings import quietly, together
from tests.patience import until
from tests.ranks import run_ranks

SECRETS = b"", meetings.SECRET
CASES = [*product(WORDS, SECRETS)]


@pytest.fixture(autouse=True)
def on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("kind, secret", CASES)
def test_ranks_meet_among_strangers(kind: str, secret: bytes) -> None:
    """The last rank comes when some strangers have come to the first ones."""
    store = dist.HashStore()
    with strangers_at(partial(places_in, store, meetings.SIZE), lambda place: WORDS[kind]()) as accepted:

        def on_rank(rank: int) -> Any:
            if rank == meetings.SIZE - 1:
                until(lambda: len(accepted) >= 2, "strangers come")  # slow ones are two at a time
            return meet_peers(store, "key", rank, meetings.SIZE, quietly, secret=secret)

        found = together([partial(on_rank, rank) for rank in range(meetings.SIZE)])
    assert all(isinstance(one, Peers) for one in found), found
    meetings.check(found)


@pytest.mark.parametrize("kind, secret", CASES)
def test_channels_open_among_strangers(kind: str, secret: bytes) -> None:
    """Some have come before any rank does, and others come all the time."""
    places: list[tuple[str, int]] = []
    first = [b"".join(WORDS[kind]()) for _ in range(9)]
    with channels.without_limit(places, WORDS[kind]):
        channels.open_all(secret, places, first)


@pytest.mark.parametrize("kind", steps.KINDS)
def test_steps_are_exact_among_strangers(kind: str) -> None:
    how = steps.WAYS[steps.KINDS.index(kind)]
    for _, disturbed, num_ports in run_ranks(steps.steps_among_strangers, 2, kind, *how, 2):
        assert len(disturbed) == 2 * steps.BLOCK and num_ports == (0 if how[0] else 2)
