"""Stages whose weights FSDP2 shards over data-parallel pipelines, on one DeviceMesh.

    torchrun --nproc-per-node 4 examples/fsdp.py

Two pipelines of two stages train side by side, each on its half of the batch. Each block of a stage is sharded over the two
pipelines separately, and the stage's gradients are reduced once per step. With 8 processes the pipelines have four stages, and
the first of them evicts: activations move, gathered weights never do.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import bpipe

NUM_STEPS, WIDTH, PIPELINES, BLOCKS_PER_STAGE = 20, 128, 2, 2


def main() -> None:
    """Learn the sine of each number, in bfloat16 with gradients reduced in float32."""
    dist.init_process_group("gloo")
    num_stages = dist.get_world_size() // PIPELINES
    mesh = init_device_mesh("cpu", (PIPELINES, num_stages), mesh_dim_names=("data", "pipeline"))
    index = mesh.get_local_rank("pipeline")

    torch.manual_seed(index)  # the same weights in each pipeline
    module = nn.Sequential(*(Block() for _ in range(BLOCKS_PER_STAGE)))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    for block in (*module, module):
        # In a pipeline, weights that are freed after a forward are gathered again for each microbatch. Those that stay are
        # gathered once per step.
        fully_shard(block, mesh=mesh["data"], mp_policy=precision, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

    stage = bpipe.PipelineStage(module, index, num_stages, torch.device("cpu"), mesh.get_group("pipeline"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    data = torch.Generator().manual_seed(100 + mesh.get_local_rank("data"))  # other data in each pipeline
    for step in range(1, NUM_STEPS + 1):
        x = torch.randn(32, WIDTH, generator=data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=x.sin(), losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 5 == 0:
            loss = torch.stack(losses).mean()
            dist.all_reduce(loss, op=dist.ReduceOp.SUM, group=mesh.get_group("data"))
            if mesh.get_local_rank("data") == 0:
                print(f"step {step}/{NUM_STEPS}  loss {loss / PIPELINES:.4f}", flush=True)

    evicted_kib = schedule.stats["evicted_bytes"] / 1024
    shards = sum(parameter.to_local().numel() for parameter in module.parameters())
    where = f"pipeline {mesh.get_local_rank('data')}, stage {index}"
    print(f"{where}: {shards} of {2 * shards} weights here, {evicted_kib:.0f} KiB evicted per step", flush=True)
    schedule.close()
    dist.destroy_process_group()


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return x [batch, width] and what the block adds to it."""
        out: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


if __name__ == "__main__":
    main()
