"""Streams on the device: the bits of the CPU, with no race between messages that are in flight from tick to tick."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import bpipe
from tests.accelerator.device import KIND, reports, simulator
from tests.ranks import run_ranks
from tests.relaxed.test_stream import parts, program

pytestmark = pytest.mark.usefixtures("one_thread")


def learned(rank: int, device: str, nccl: bool) -> tuple[list[torch.Tensor], list[str]]:
    """One rank: its outputs and weights, and what the checker reports."""
    if device != "cpu":
        from tests.accelerator import nccl as transports

        transports.install(nccl=nccl)
        simulator.configure(True, 500, 0.2, rank)
    stages, _ = parts()
    module = stages[rank].to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    stream = bpipe.Stream(bpipe.PipelineStage(module, rank, 3, device), F.mse_loss, optimizer, options=bpipe.Options(timeout_s=60))
    outputs, drained = [], True
    for tick in program(0):
        if tick.words is not None and tick.target is not None:
            output = stream.push(tick.words.to(device), target=tick.target.to(device), learn=tick.learn)
            outputs += [] if output is None else [output]
            drained = False
        elif not drained:
            outputs += stream.drain(learn=tick.learn)
            drained = True
    stream.push(torch.ones(4, dtype=torch.int64, device=device), target=torch.ones(4, 2, device=device))
    stream.close()  # with a sample inside
    return [one.detach().cpu() for one in (*outputs, *module.state_dict().values())], reports() if device != "cpu" else []


@pytest.mark.parametrize("nccl", [True, False])
def test_a_stream_is_the_same(nccl: bool) -> None:
    expected = run_ranks(learned, 3, "cpu", nccl)
    for (found, reported), (same, _) in zip(run_ranks(learned, 3, KIND, nccl), expected, strict=True):
        assert not reported and len(found) == len(same) > 0 and all(map(torch.equal, found, same))
