"""Your own model, cut into stages: here an `nn.Sequential`, in as many parts as there are processes.

    torchrun --nproc-per-node 4 examples/own_model.py
    bpipe trace runs/own_model --out own_model.html

The second line draws what the last steps did, as a page to zoom into. With --plain, memory is not balanced, and the trace is in
runs/own_model-plain. With fewer than 4 ranks of equal stages, no whole microbatch moves.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_STEPS, TRACED = 60, 5
NUM_BLOCKS, WIDTH = 12, 64


def main() -> None:
    """Learn the length of a vector."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    model = build_model()
    mine = nn.Sequential(*model[len(model) * rank // num_ranks : len(model) * (rank + 1) // num_ranks])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)

    stage = bpipe.PipelineStage(mine, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.OneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    folder = "runs/own_model-plain" if "--plain" in sys.argv else "runs/own_model"
    if "--plain" not in sys.argv:  # the losses and gradients of the two are bitwise identical
        schedule = bpipe.Balanced(schedule, budget="auto", optimizer=optimizer)

    data = torch.Generator().manual_seed(1)  # the same batches on every rank, whatever a stage draws

    def train(first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.randn(2048, WIDTH, generator=data)
            losses: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(x, target=x.norm(dim=1, keepdim=True), losses=losses, return_outputs=False)
            optimizer.step()
            if losses and step % 20 == 0:  # the last rank has them
                print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)

    train(1, NUM_STEPS - TRACED)
    with bpipe.trace(schedule, folder):
        train(NUM_STEPS - TRACED + 1, NUM_STEPS)

    names = ("device_peak_bytes", "predicted_device_peak_bytes", "evicted_bytes")
    peak, predicted, evicted = (schedule.stats[name] / 2**20 for name in names)
    says = f"memory {peak:.2f} MiB at most, {predicted:.2f} predicted; {evicted:.2f} MiB evicted per step"
    print(f"rank {rank}: {len(mine)} layers, {says}", flush=True)
    schedule.close()
    dist.destroy_process_group()


def build_model() -> list[nn.Module]:
    """Return the layers of the whole model, which each process builds from the same seed."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU()) for _ in range(NUM_BLOCKS)]
    return [*blocks, nn.Linear(WIDTH, 1)]


if __name__ == "__main__":
    main()
