"""A pipeline over several nodes, with each pair of ranks on one: evictions stay inside the nodes.

On each of two nodes, with the first one's address:

    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint FIRST:29500 examples/two_nodes.py

On one machine, as two agents in the background: `--nproc-per-node 2 --rdzv-endpoint 127.0.0.1:29500 --local-addr 127.0.0.1` twice.
"""

from __future__ import annotations

import logging
import os

import torch
import torch.distributed as dist
from processes import start_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import bpipe

STEPS = 10


def main() -> None:
    """Train a stack of layers, the same number on each rank."""
    logging.basicConfig(level=logging.WARNING)  # where bpipe warns of pairs that do not share a node
    device = start_processes()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("pp",))
    place = bpipe.place(mesh)  # torchrun says how many ranks a node has
    node = os.environ["GROUP_RANK"]
    print(f"node {node}, rank {dist.get_rank()}: stage {place.index} of {place.num_stages}", flush=True)

    torch.manual_seed(place.index)
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(128, 128), nn.GELU()))).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    stage = bpipe.PipelineStage(module, place.index, place.num_stages, device, place.group)
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    data = torch.Generator(device).manual_seed(0)  # the same batches on every rank, whatever a stage draws
    for step in range(1, STEPS + 1):
        x = torch.randn(64, 128, device=device, generator=data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=x.roll(1, dims=1), losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 5 == 0:
            print(f"step {step}/{STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)
    if schedule.stats["evicted_bytes"]:
        to = sorted({action.peer for action in schedule.plan.actions[place.index] if action.op.name == "EVICT"})
        kib = schedule.stats["evicted_bytes"] / 1024
        print(f"node {node}, stage {place.index}: {kib:.0f} KiB evicted per step to stage {to[0]}", flush=True)
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
