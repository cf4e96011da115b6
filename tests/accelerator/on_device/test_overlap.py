"""A forward and a backward side by side on the device, on a stream of the caller's: the bits of the CPU, and no race."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.overlap import TwoThreads, yield_here
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.work import batch_of, results_of
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STEPS = 2, 4, 2

pytestmark = pytest.mark.usefixtures("one_thread")


class Changing(nn.Module):
    """A layer that changes over twice, in its forward and in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + yield_here(self.second(yield_here(torch.relu(self.first(x)))))


class Summed(nn.Module):
    """A layer whose input gets an expanded gradient, which bpipe has to copy before it sends it: in the backward's thread."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1, keepdim=True) * self.scale


def trained(rank: int, device: str, nccl: bool) -> tuple[list[torch.Tensor], int, list[str]]:
    """One rank: its gradients, how many pairs ran side by side, and what the checker reports."""
    stream: Any = nullcontext()
    if device != "cpu":
        from tests.accelerator import nccl as transports

        transports.install(nccl=nccl)
        simulator.configure(True, 500, 0.2, rank)
        stream = torch.get_device_module(device).stream(torch.get_device_module(device).Stream())
    torch.manual_seed(rank)
    modules = [nn.Sequential(Summed(), Changing(), Changing()).to(device) for _ in range(2)]
    stages = [bpipe.PipelineStage(one, number, 2 * RANKS, device) for number, one in zip((rank, 2 * RANKS - 1 - rank), modules)]
    schedule = bpipe.DualPipeV(
        stages, MICROBATCHES, loss_fn=nn.functional.mse_loss, overlapped=True, options=bpipe.Options(timeout_s=60)
    )
    pairs, threads = [0], TwoThreads()

    def counted(forward: Any, backward: Any) -> None:
        pairs[0] += 1
        threads(forward, backward)

    if device != "cpu":
        schedule.overlap = counted
    with stream:
        for step in range(STEPS):
            x = batch_of(step, MICROBATCHES).to(device) * 1
            schedule.step(x, target=x, return_outputs=False)
        results = results_of(modules)
    schedule.close()
    return results, pairs[0], reports() if device != "cpu" else []


@pytest.mark.parametrize("nccl", [True, False])
def test_pairs_on_a_stream(nccl: bool) -> None:
    expected = run_ranks(trained, RANKS, "cpu", nccl)
    for (results, num_pairs, reported), (same, *_) in zip(run_ranks(trained, RANKS, KIND, nccl), expected):
        assert all(map(torch.equal, results, same)) and not reported
        assert num_pairs > 0
