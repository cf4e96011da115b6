"""Data, pipeline and tensor parallelism on one DeviceMesh, with activations balanced between the pipeline's ranks.

    torchrun --nproc-per-node 8 examples/tensor_parallel.py

Two tensor ranks share each stage: its weights, and between its layers the sequence. A pipeline has four stages; with 16
processes there are two pipelines, and FSDP2 shards each stage's weights over them. A rank evicts its own shards, to the
same tensor rank of the paired stage.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from processes import start_processes
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

import bpipe

TENSOR_RANKS, STAGES, STEPS = 2, 4, 6
CONFIG = GPTConfig(sequence_length=64, num_blocks=4, width=64)


def main() -> None:
    """Learn to repeat a short random text."""
    device = start_processes()
    replicas = dist.get_world_size() // (STAGES * TENSOR_RANKS)
    mesh = init_device_mesh(device.type, (replicas, STAGES, TENSOR_RANKS), mesh_dim_names=("dp", "pp", "tp"))
    place = bpipe.place(mesh["pp"])  # the pipeline's group, and stages in an order that keeps pairs on one node
    torch.manual_seed(place.index)
    module = parallelize(GPT(CONFIG, place.index, place.num_stages).to(device), mesh)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    stage = bpipe.PipelineStage(module, place.index, place.num_stages, device, place.group)
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=loss_fn)
    data = torch.Generator(device).manual_seed(mesh.get_local_rank("dp"))
    text = torch.randint(256, (8, CONFIG.sequence_length + 1), device=device, generator=data)
    for step in range(1, STEPS + 1):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        with loss_parallel():
            schedule.step(text[:, :-1], target=text[:, 1:], losses=losses, return_outputs=False)
        optimizer.step()
        if losses and mesh.get_local_rank("tp") == 0 and step % 3 == 0:
            print(f"step {step}/{STEPS}  loss {torch.stack(losses).mean().item():.4f}", flush=True)
    peak, evicted = (schedule.stats[name] / 1024 for name in ("peak_bytes", "evicted_bytes"))
    where = f"stage {place.index}, tensor rank {mesh.get_local_rank('tp')}"
    print(f"{where}: at most {peak:.0f} KiB of activations, {evicted:.0f} KiB evicted per step", flush=True)
    schedule.close()
    dist.destroy_process_group()


def parallelize(module: GPT, mesh: DeviceMesh) -> GPT:
    """Shard a stage over the tensor ranks, the sequence between its layers too, and its weights over the pipelines."""
    along = Shard(1)
    wide, narrow = ColwiseParallel(input_layouts=along), RowwiseParallel(output_layouts=along)
    styles = {"norm_1": SequenceParallel(), "norm_2": SequenceParallel(), "attention.out": narrow, "up": wide, "down": narrow}
    styles |= {f"attention.{name}": wide for name in ("query", "key", "value")}
    plan = {f"blocks.*.{name}": style for name, style in styles.items()}
    if hasattr(module.embedding, "weight"):
        plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=along)
    if hasattr(module.head, "weight"):
        plan["norm"] = SequenceParallel()
        plan["head"] = ColwiseParallel(input_layouts=along, use_local_output=False)
    parallelize_module(module, mesh["tp"], plan)
    return fully_shard(module, mesh=mesh["dp"])


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy; each tensor rank has the logits of half of the vocabulary."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
