"""Ranks that meet in threads of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.health.links import links
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import Peers
from tests.patience import outcomes as together

__all__ = ["meet", "quietly", "store", "together"]


def quietly(_: str) -> None:
    """Wait on."""


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return dist.HashStore()


def meet(store: Any, size: int, *, linked: bool = False) -> list[Peers]:
    """Let ranks meet: all of them, or only those that the control graph links."""
    to = [links(rank, size) if linked else None for rank in range(size)]
    return together([lambda rank=rank: meet_peers(store, "key", rank, size, quietly, links=to[rank]) for rank in range(size)])
