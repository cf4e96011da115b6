"""Replicated DTensors between stages: bpipe reduces their gradients at the boundary, torch hands them on; the sums are the same."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn
from torch.distributed import pipelining

import bpipe
from tests.ranks import run_ranks

WIDTH = 8


def squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).pow(2).mean()


def trained(library: Any, mesh: Any) -> tuple[str, torch.Tensor, torch.Tensor]:
    """The placements of the gradient of the second weight of a rank's stage, and this and the first one's whole gradient."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    tp, index = mesh["tp"], mesh["pp"].get_local_rank()
    torch.manual_seed(index)
    block = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH, bias=False)).double()
    wide = ColwiseParallel(input_layouts=Replicate(), use_local_output=False)
    parallelize_module(block, tp, {"0": wide, "2": RowwiseParallel(output_layouts=Replicate(), use_local_output=False)})
    options: dict[str, Any] = {"group": mesh["pp"].get_group(), "get_mesh": lambda names, layout: tp}
    schedule = library.Schedule1F1B(library.PipelineStage(block, index, 2, torch.device("cpu"), **options), 2, loss_fn=squares)
    torch.manual_seed(2)
    x, target = (distribute_tensor(torch.randn(4, WIDTH, dtype=torch.float64), tp, [Replicate()]) for _ in range(2))
    schedule.step(x.requires_grad_()) if index == 0 else schedule.step(target=target)
    first, second = block[0].weight.grad, block[2].weight.grad
    return str(second.placements), first.full_tensor(), second.full_tensor()


def both(rank: int) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    torch_takes_them = "get_mesh" in inspect.signature(pipelining.PipelineStage).parameters  # from 2.13 on
    return [trained(library, mesh) for library in (bpipe, *([pipelining] if torch_takes_them else []))]


def test_gradients_are_reduced_at_the_boundary_as_the_page_says() -> None:
    for rank, ((placements, *own), *of_torch) in enumerate(run_ranks(both, 4)):
        assert placements == "(Shard(dim=1),)"
        for theirs, *gradients in of_torch:
            assert theirs == ("(Partial(sum),)" if rank < 2 else "(Shard(dim=1),)")
            torch.testing.assert_close(own, gradients, rtol=0, atol=1e-12)  # sums over shards have another order
