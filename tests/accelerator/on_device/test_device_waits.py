"""Over NCCL a device waits and its host does not: the seconds are the device's."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch import nn

import bpipe
from tests.accelerator.device import KIND, MODULE, simulator
from tests.accelerator.work import batch_of, modules_of
from tests.ranks import run_ranks

RANKS, MICROBATCHES, STEPS, LATE_S = 2, 4, 3, 0.3


def waited(rank: int) -> dict[str, float]:
    """One rank: the numbers of its last step; the first rank's device begins late in each."""
    from tests.accelerator import nccl as transports

    transports.install(nccl=True)
    simulator.configure(True, 0, 0.0, rank)
    stage = bpipe.PipelineStage(modules_of(RANKS)[rank].to(KIND), rank, RANKS, KIND)
    schedule = bpipe.OneFOneB(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss, options=bpipe.Options(timeout_s=20))
    for step in range(STEPS):
        x = batch_of(step, MICROBATCHES).to(KIND)
        dist.barrier()  # so that the second rank waits, however late it comes
        if rank == 0:
            simulator.enqueue(MODULE.current_stream().stream_id, "late", [], [], lambda _: time.sleep(LATE_S))
        schedule.step(x, target=x, return_outputs=False)
        MODULE.synchronize()
    schedule.close()
    return schedule.stats


def test_what_a_device_waits() -> None:
    first, second = run_ranks(waited, RANKS)
    assert first["wait_step"] in (STEPS - 2, STEPS - 1) and second["wait_step"] in (STEPS - 2, STEPS - 1)
    assert first["wait_forward_s"] == 0 and second["wait_forward_s"] > LATE_S / 10
    assert first["wait_backward_s"] > 0 and second["wait_backward_s"] == 0
