"""Every schedule on the simulated device: the bits of the CPU, and nothing that the checker reports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.work import RULES, as_rank, in_loopback
from tests.ranks import run_ranks

EVICTING = ("balanced_1f1b", "bytes", "parts", "host")
MOST_DELAY_US, DELAYED = 1000, 0.2


@pytest.fixture(autouse=True)
def fresh(one_thread: None) -> Iterator[None]:
    simulator.configure(True, MOST_DELAY_US, DELAYED, 0)
    simulator.synchronize_device(-1)
    simulator.clear_reports()
    yield
    simulator.clear_reports()


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize("name", RULES)
def test_loopback(name: str) -> None:
    on_device, on_cpu = in_loopback(name, KIND), in_loopback(name, "cpu")
    assert_same(on_device, on_cpu)
    assert not reports()


def on_device(rank: int, name: str, nccl: bool, num_ranks: int) -> Any:
    """One rank: what it computed, and what the checker reported."""
    from tests.accelerator import nccl as transports

    transports.install(nccl=nccl)
    simulator.configure(True, MOST_DELAY_US, DELAYED, rank)
    return as_rank(rank, name, KIND, num_ranks=num_ranks), reports()


def on_cpu(rank: int, name: str, num_ranks: int) -> Any:
    return as_rank(rank, name, "cpu", num_ranks=num_ranks)


@pytest.mark.parametrize("nccl", [True, False])
@pytest.mark.parametrize("name", [*EVICTING, "chimera", "bitpipe_zb"])
def test_four_processes(name: str, nccl: bool) -> None:
    expected = run_ranks(on_cpu, 4, name, 4)
    for (found, reported), same in zip(run_ranks(on_device, 4, name, nccl, 4), expected):
        assert_same(found, same)
        assert not reported
