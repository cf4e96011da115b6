"""Compiled stages: `torch.compile` before the pipeline, as without one; nothing is compiled again because of it.

    torchrun --nproc-per-node 4 examples/compile.py

The first rank evicts the tensors that compiled regions have saved, and gets them back before their backward. On CPU this needs a
C++ compiler; `--backend aot_eager` traces too, and does not need one.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

import bpipe

NUM_STEPS, WIDTH = 20, 128


def main() -> None:
    """Learn the length of a vector, and show how long steps take and how many graphs were compiled."""
    backend = read_arguments().backend
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = [nn.Linear(8, WIDTH), *(Block() for _ in range(2 * num_ranks)), nn.Linear(WIDTH, 1)]
    mine = nn.Sequential(*model[len(model) * rank // num_ranks : len(model) * (rank + 1) // num_ranks])
    optimizer = torch.optim.AdamW(mine.parameters(), lr=1e-3)

    stage = bpipe.PipelineStage(torch.compile(mine, backend=backend), rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)

    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws
    for step in range(1, NUM_STEPS + 1):
        x = torch.randn(64, 8, generator=data)
        losses: list[Tensor] = []
        started = time.perf_counter()
        optimizer.zero_grad()
        schedule.step(x, target=x.norm(dim=1, keepdim=True), losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step in (1, 2, NUM_STEPS):
            took = time.perf_counter() - started
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}  {took:.2f} s", flush=True)

    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    evicted_kib = schedule.stats["evicted_bytes"] / 1024
    print(f"rank {rank}: {graphs} graph(s), {breaks} breaks, {evicted_kib:.0f} KiB evicted per step", flush=True)
    schedule.close()
    dist.destroy_process_group()


def read_arguments() -> argparse.Namespace:
    """Read the backend of torch.compile."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", default="inductor", help="of torch.compile; default inductor")
    return parser.parse_args()


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
