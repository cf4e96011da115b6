"""A pipeline on a device that is not the current one: nothing of it is on the first device, whichever thread does it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.on_device.test_equality import assert_same, on_cpu
from tests.accelerator.on_device.test_own_process import in_own_process
from tests.accelerator.work import as_rank, in_loopback
from tests.ranks import run_ranks

RANKS, THERE = 4, f"{KIND}:1"
UNUSED = {"peak": 0, "pinned": 0, "asked": 0}


def used_on_the_first() -> dict[str, int]:
    found = simulator.statistics(0)
    return {what: found[what] for what in UNUSED}


def there(rank: int, name: str, nccl: bool) -> Any:
    """One rank: what it computed, what is on the first device, and what the checker reported."""
    from tests.accelerator import nccl as transports

    transports.install(nccl=nccl)
    simulator.configure(True, 300, 0.2, rank)
    return as_rank(rank, name, THERE, num_ranks=RANKS), used_on_the_first(), reports()


@pytest.mark.parametrize("nccl", [True, False], ids=["nccl", "gloo through pinned memory"])
@pytest.mark.parametrize("name", ["balanced_1f1b", "host"])
def test_in_processes(name: str, nccl: bool) -> None:
    expected = run_ranks(on_cpu, RANKS, name, RANKS)
    for (found, used, reported), same in zip(run_ranks(there, RANKS, name, nccl), expected):
        assert_same(found, same)
        assert used == UNUSED
        assert not reported


def in_the_loopback() -> tuple[bool, dict[str, int], list[str]]:
    torch.set_num_threads(1)
    found, expected = (in_loopback("host", device) for device in (THERE, "cpu"))
    return all(map(torch.equal, found, expected)), used_on_the_first(), reports()


def test_in_the_loopback() -> None:
    assert in_own_process(in_the_loopback) == (True, UNUSED, [])
