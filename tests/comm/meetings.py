"""Ranks that meet in threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from bpipe.comm.health.links import links
from bpipe.comm.rendezvous.meeting import meet_peers
from bpipe.comm.rendezvous.peers import Peers


def quietly(_: str) -> None:
    """Wait on."""


def together(calls: list[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads of their own, side by side; errors are results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures: list[Future[Any]] = [pool.submit(call) for call in calls]
    return [future.exception() or future.result() for future in futures]


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return dist.HashStore()


def meet(store: Any, size: int, *, linked: bool = False) -> list[Peers]:
    """Let ranks meet: all of them, or only those that the control graph links."""
    to = [links(rank, size) if linked else None for rank in range(size)]
    return together([lambda rank=rank: meet_peers(store, "key", rank, size, quietly, links=to[rank]) for rank in range(size)])
