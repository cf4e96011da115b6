"""Evaluation, traces, checkpointed regions and what a host waits for, on the simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.on_device.test_equality import assert_same
from tests.accelerator.work import RULES, Block, batch_of, modules_of, results_of
from tests.ranks import run_ranks
from tests.thinned import thinned

RANKS, MICROBATCHES = 4, 8
WAYS = [("nccl", True), ("gloo through pinned memory", False)]
by_way = pytest.mark.parametrize("nccl", [way for _, way in WAYS], ids=[name for name, _ in WAYS])


class Checkpointed(nn.Module):
    """Blocks whose activations are computed again, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def starts(rank: int, device: str, nccl: bool) -> None:
    if device == KIND:
        from tests.accelerator import nccl as transports

        transports.install(nccl=nccl)
        simulator.configure(True, 300, 0.2, rank)


def schedule_of(rank: int, name: str, module: nn.Module, device: str) -> Any:
    stage = bpipe.PipelineStage(module.to(device), rank, RANKS, device)
    return RULES[name](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, timeout_s=30)


def run(rank: int, device: str, nccl: bool, folder: Path) -> tuple[list[torch.Tensor], list[str]]:
    """Train, evaluate and trace checkpointed blocks: gradients, outputs, and what the checker reported."""
    starts(rank, device, nccl)
    torch.manual_seed(0)
    module = [Checkpointed() for _ in range(RANKS)][rank]
    schedule = schedule_of(rank, "balanced_1f1b", module, device)
    found = []
    with bpipe.trace(schedule, folder / "trace"):
        for step in range(2):
            x = batch_of(step, MICROBATCHES).to(device)
            schedule.step(x, target=x)
            output = schedule.eval(x)
            found += [output.cpu()] if rank == RANKS - 1 else []
    found += results_of([module])
    schedule.close()
    return found, reports() if device == KIND else []


@by_way
def test_evaluation_traces_and_checkpointed_regions(nccl: bool, tmp_path: Path) -> None:
    on_device, on_cpu = (run_ranks(run, RANKS, device, nccl, tmp_path) for device in (KIND, "cpu"))
    for (found, reported), (expected, _) in zip(on_device, on_cpu):
        assert_same(found, expected)
        assert not reported


def waits(rank: int, name: str) -> list[int]:
    """How often the host waits for its device in each of some steps over NCCL."""
    starts(rank, KIND, nccl=True)
    schedule, found = schedule_of(rank, name, modules_of(RANKS)[rank], KIND), []
    batches = [batch_of(step, MICROBATCHES).to(KIND) for step in range(4)]
    for x in batches:
        before = simulator.statistics(0)["host_waits"]
        schedule.step(x, target=x, return_outputs=False)
        found.append(simulator.statistics(0)["host_waits"] - before)
    schedule.close()
    return found


@pytest.mark.parametrize(
    "name", thinned(["1f1b", "balanced_1f1b", "bytes", "parts", "host"], lambda name: name in ("parts", "host"))
)
def test_no_host_waits_for_its_device_in_a_step_over_nccl(name: str) -> None:
    for found in run_ranks(waits, RANKS, name):
        assert found[2:] == [0, 0]
