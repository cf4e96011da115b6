"""A fill job on the device: the bits of the CPU, no race between its stream and the others, and pieces that have really run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.fill import Inference
from tests.accelerator.device import KIND, reports, simulator
from tests.accelerator.work import RULES, Block, batch_of, modules_of, results_of
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STEPS = 4, 8, 6

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(rank: int, name: str, device: str, nccl: bool) -> tuple[list[torch.Tensor], float, list[torch.Tensor], list[str]]:
    """One rank: its gradients, how many pieces ran, what they found, and what the checker reports."""
    if device != "cpu":
        from tests.accelerator import nccl as transports

        transports.install(nccl=nccl)
        simulator.configure(True, 500, 0.2, rank)
    module = modules_of(RANKS)[rank].to(device)
    stage = bpipe.PipelineStage(module, rank, RANKS, device)
    schedule: Any = RULES[name](stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=60))
    found: list[torch.Tensor] = []
    if device != "cpu":
        torch.manual_seed(1)
        layers = [Block().to(device).eval() for _ in range(2)]
        batches = (torch.ones(1, 8, 16, device=device) * i for i in range(10_000))
        schedule.fill = Inference(layers, batches, lambda output: found.append(output.cpu()), budget=2**40, kept_bytes=2**20)
    pieces = 0.0
    for step in range(STEPS):
        x = batch_of(step, MICROBATCHES).to(device) * 1
        schedule.step(x, target=x, return_outputs=False)
        pieces += schedule.stats.get("fill_pieces", 0.0)
    results = results_of([module])
    schedule.close()
    return results, pieces, found[:20], reports() if device != "cpu" else []


@pytest.mark.parametrize(("name", "nccl"), [("1f1b", True), ("bytes", True), ("1f1b", False)])
def test_a_filled_step_is_the_same(name: str, nccl: bool) -> None:
    expected = run_ranks(trained, RANKS, name, "cpu", nccl)
    torch.manual_seed(1)
    layers, num_pieces = nn.Sequential(*(Block() for _ in range(2))).eval(), 0.0
    for (results, pieces, found, reported), (same, *_) in zip(run_ranks(trained, RANKS, name, KIND, nccl), expected):
        assert all(map(torch.equal, results, same)) and not reported
        with torch.no_grad():
            assert all(torch.equal(one, layers(torch.ones(1, 8, 16) * i)) for i, one in enumerate(found))
        num_pieces += pieces
    assert num_pieces > 0
