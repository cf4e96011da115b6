"""Evaluation, traces, checkpointed regions and what a host waits for, on the simulated device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.on_device.test_equality import assert_same
from tests.accelerator.work import RULES, Block, batch_of, modules_of, results_of
from tests.ranks import run_ranks

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
    return RULES[name](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=30))


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
    batches = [batch_of(step, MICROBATCHES).to(KIND) for step in range(5)]
    for x in batches:
        before = simulator.statistics(0)["host_waits"]
        schedule.step(x, target=x, return_outputs=False)
        found.append(simulator.statistics(0)["host_waits"] - before)
    schedule.close()
    return found[:-1]  # in the last one, another rank may close already, and a thread of this one gives back its memory


@pytest.mark.parametrize("name", ["1f1b", "balanced_1f1b", "bytes", "parts", "host"])
def test_no_host_waits_for_its_device_in_a_step_over_nccl(name: str) -> None:
    for found in run_ranks(waits, RANKS, name):
        assert found[2:] == [0, 0]


class Part(nn.Module):
    """A stage with a name of its own in the whole model."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name = f"part_{rank}"
        setattr(self, self.name, modules_of(RANKS)[rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return getattr(self, self.name)(x)


class Training:
    """A rank's stage and optimizer."""

    def __init__(self, rank: int, device: str) -> None:
        self.module, self.device = Part(rank), device
        self.schedule = schedule_of(rank, "balanced_1f1b", self.module, device)
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=0.01)

    def train(self, steps: range) -> list[torch.Tensor]:
        for step in steps:
            x = batch_of(step, MICROBATCHES).to(self.device)
            self.schedule.step(x, target=x, return_outputs=False)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [value.cpu() for value in self.module.state_dict().values()]

    def state(self) -> dict[str, Any]:
        return bpipe.training_state([self.module], self.optimizer)


def saved_and_resumed(rank: int, device: str, folder: Path) -> tuple[list[torch.Tensor], list[torch.Tensor], list[str]]:
    """Train, save and train on: where that ends, and where training from what was saved ends; and what the checker reported."""
    starts(rank, device, nccl=True)
    one = Training(rank, device)
    one.train(range(2))
    dcp.save(one.state(), checkpoint_id=folder / device)
    went_on = one.train(range(2, 4))
    one.schedule.close()
    other = Training(rank, device)
    with torch.no_grad():
        for parameter in other.module.parameters():
            parameter.zero_()
    dcp.load(other.state(), checkpoint_id=folder / device)
    resumed = other.train(range(2, 4))
    other.schedule.close()
    return went_on, resumed, reports() if device == KIND else []


def test_a_saved_training_goes_on(tmp_path: Path, one_thread: None) -> None:
    on_device, on_cpu = (run_ranks(saved_and_resumed, RANKS, device, tmp_path) for device in (KIND, "cpu"))
    for (went_on, resumed, reported), (expected, *_) in zip(on_device, on_cpu):
        assert_same(went_on, expected)
        assert_same(resumed, expected)
        assert not reported
