"""Stages of local learning under DDP and FSDP2: the gradients are the mean of the replicas'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import bpipe
from tests.ranks import run_ranks
from tests.relaxed.models import batch_of, loss_of, modules_of

P, REPLICAS, M, KIND = 2, 2, 4, "checkpointed"


def train(rank: int, how: str) -> tuple[int, list[torch.Tensor]]:
    """Two steps, each replica with its part of the batch; the gradients of both."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (REPLICAS, P), mesh_dim_names=("replica", "rank"))
    replica, index = mesh.get_local_rank("replica"), mesh.get_local_rank("rank")
    module = modules_of(KIND, P)[index]
    wrapped: nn.Module = module
    if how == "ddp":
        wrapped = DistributedDataParallel(module, process_group=mesh.get_group("replica"))
    else:
        fully_shard(module, mesh=mesh["replica"])
    stage = bpipe.PipelineStage(wrapped, index, P, "cpu", mesh.get_group("rank"))
    schedule = bpipe.LocalLearning(stage, M, loss_fn=loss_of(index))
    for step in range(2):
        x, y = (part.chunk(REPLICAS)[replica] for part in batch_of(KIND, REPLICAS * 2 * M, step))
        schedule.step(*(x,) * (index == 0), target=y)
    assert schedule.stats["peak_slots"] == 1
    schedule.close()
    found: list[Any] = [p.grad for p in module.parameters()]
    return index, [one.full_tensor() if isinstance(one, DTensor) else one for one in found]


@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_replicas_average_their_gradients(how: str) -> None:
    first, second = modules_of(KIND, P)
    for step in range(2):
        x, y = batch_of(KIND, REPLICAS * 2 * M, step)
        output, prediction = first(x)
        loss_of(0)(prediction, y).backward()
        loss_of(1)(second(output.detach()), y).backward()
    expected = [[p.grad for p in module.parameters()] for module in (first, second)]
    for index, found in run_ranks(train, P * REPLICAS, how):
        for one, other in zip(found, expected[index], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
