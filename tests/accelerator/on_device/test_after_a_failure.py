"""A step that fails frees what its streams still work on: what is allocated then, by whomever, waits for them."""

from __future__ import annotations

import pytest

from tests.accelerator.device import simulator, unordered
from tests.accelerator.work import failing_as_rank, failing_in_loopback, lends
from tests.ranks import run_ranks

RANKS = 4
NAMES = ("balanced_1f1b", "parts", "host")
PLACES = ("forward", "backward")


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_in_the_loopback(name: str, where: str, one_thread: None) -> None:
    simulator.configure(True, 0, 0.0, 0)
    simulator.clear_reports()
    failing_in_loopback(name, where, num_ranks=RANKS)
    assert not unordered()


def in_processes(rank: int, name: str, where: str, nccl: bool, copies: bool = False) -> list[str]:
    from tests.accelerator import nccl as transports

    transports.install(nccl=nccl, copies=copies, lends=copies or lends(name))
    simulator.configure(True, 0, 0.0, rank)
    failing_as_rank(rank, name, where, num_ranks=RANKS)
    return unordered()


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "gloo through pinned memory"])
@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("name", NAMES)
def test_in_processes(name: str, where: str, nccl: bool) -> None:
    assert run_ranks(in_processes, RANKS, name, where, nccl) == [[]] * RANKS


@pytest.mark.parametrize("where", PLACES)
def test_messages_that_devices_copy(where: str) -> None:
    assert run_ranks(in_processes, RANKS, "balanced_1f1b", where, True, True) == [[]] * RANKS
