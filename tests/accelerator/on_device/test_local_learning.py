"""Local learning on the device, where outputs are on their way while their microbatch's backward frees what it saved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.work import Block, batch_of, results_of
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STEPS = 3, 6, 3

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(rank: int, device: str, nccl: bool) -> tuple[list[torch.Tensor], list[str]]:
    """One rank: its gradients and buffers, and what the checker reports."""
    if device != "cpu":
        from tests.accelerator import nccl as transports

        transports.install(nccl=nccl)
        simulator.configure(True, 1000, 0.2, rank)
    torch.manual_seed(rank)
    module: nn.Module = bpipe.LocalBlock(Block(), Block()) if rank < RANKS - 1 else Block()
    stage = bpipe.PipelineStage(module.to(device), rank, RANKS, device)
    schedule = bpipe.LocalLearning(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=60))
    for step in range(STEPS):
        x = batch_of(step, MICROBATCHES).to(device) * 1
        schedule.step(x, target=x, return_outputs=False)
    found = results_of([module])
    schedule.close()
    return found, [] if device == "cpu" else reports()


@pytest.mark.parametrize("nccl", [True, False])
def test_bits_of_the_cpu_and_no_race(nccl: bool) -> None:
    on_device: list[Any] = run_ranks(trained, RANKS, KIND, nccl)
    for (found, reported), (expected, _) in zip(on_device, run_ranks(trained, RANKS, "cpu", nccl), strict=True):
        assert not reported
        assert found and all(map(torch.equal, found, expected))
