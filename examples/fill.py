"""Embeddings by another model, computed in the time in which the ranks of a pipeline wait for each other.

    torchrun --nproc-per-node 4 examples/fill.py

Each rank embeds its own share of a dataset while it trains; the embeddings are those of the model alone.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe
from bpipe.fill import Inference

WIDTH, NUM_STEPS, NUM_BATCHES = 64, 30, 500


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8 * WIDTH), nn.GELU(), nn.Linear(8 * WIDTH, WIDTH))


def main() -> None:
    """Train, and embed meanwhile."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mine = [nn.Sequential(*(block() for _ in range(4))) for _ in range(num_ranks)][rank]
    embedder = [block().eval() for _ in range(3)]
    dataset = torch.randn(NUM_BATCHES, 16, WIDTH, generator=torch.Generator().manual_seed(rank))

    stage = bpipe.PipelineStage(mine, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)

    embeddings: list[Tensor] = []
    # What is kept of the results counts, too; the job may use 64 MiB more than the rank takes.
    kept = dataset.nbytes
    schedule.fill = Inference(embedder, dataset, embeddings.append, kept_bytes=kept, budget=kept + 64 * 2**20)

    offered = used = 0.0
    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws
    for step in range(1, NUM_STEPS + 1):
        x = torch.randn(64, 32, WIDTH, generator=data)
        optimizer.zero_grad()
        schedule.step(x, target=0.5 * x, return_outputs=False)
        optimizer.step()
        offered, used = offered + schedule.stats["fill_offered_s"], used + schedule.stats["fill_used_s"]
        if rank == num_ranks - 1 and step % 10 == 0:
            print(f"step {step}/{NUM_STEPS}", flush=True)

    with torch.no_grad():
        is_same = all(torch.equal(found, nn.Sequential(*embedder)(one)) for found, one in zip(embeddings, dataset))
    text = f"rank {rank}: {len(embeddings)} batches embedded in {used / max(offered, 1e-9):.0%} of the waits"
    print(f"{text}, {'as the model alone does' if is_same else 'DIFFERENT from the model alone'}", flush=True)
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
