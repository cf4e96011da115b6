"""Your own model, cut into stages: here an `nn.Sequential`, in as many parts as there are processes.

    torchrun --nproc-per-node 2 examples/own_model.py

Balancing has an effect with four or more stages; with fewer, balanced and plain 1F1B are the same.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_STEPS = 100


def main() -> None:
    """Learn the length of a vector."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = build_model()
    mine = nn.Sequential(*model[len(model) * rank // num_ranks : len(model) * (rank + 1) // num_ranks])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)

    stage = bpipe.PipelineStage(mine, rank, num_ranks, torch.device("cpu"))
    # Only this line differs: bpipe.OneFOneB here is plain 1F1B, with bitwise identical losses and gradients.
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)

    for step in range(1, NUM_STEPS + 1):
        x = torch.randn(64, 8)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=x.norm(dim=1, keepdim=True), losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 20 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)

    peak_kib = schedule.stats["peak_bytes"] / 1024
    print(f"rank {rank}: {len(mine)} layers, at most {peak_kib:.0f} KiB of activations", flush=True)
    schedule.close()
    dist.destroy_process_group()


def build_model() -> list[nn.Module]:
    """Return the layers of the whole model; each process builds it and draws the same batches, as each has the same seed."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(256, 256), nn.GELU())]
    return [nn.Linear(8, 256), *hidden, nn.Linear(256, 1)]


if __name__ == "__main__":
    main()
