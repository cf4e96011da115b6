"""Activation checkpointing with a balanced schedule: less is saved, so less is evicted; some stages do not need checkpointing.

    torchrun --nproc-per-node 4 examples/activation_checkpointing.py

Runs the same steps three times: without checkpointing, with selective checkpointing on all stages (matrix products are kept, the
rest is computed again), and with full checkpointing on the first half of the stages, which have the most microbatches in flight.
Losses and gradients are the same; the bytes that a rank holds and moves are not.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import bpipe

NUM_STEPS, WIDTH, BLOCKS_PER_STAGE = 5, 128, 2
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]


def main() -> None:
    """Train with each way of checkpointing, and show losses and bytes."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    selectively = partial(create_selective_checkpoint_contexts, PRODUCTS)
    train("no checkpointing", None)
    train("selective", partial(checkpoint, use_reentrant=False, context_fn=selectively))
    train("first half", partial(checkpoint, use_reentrant=False) if rank < num_ranks // 2 else None)
    dist.destroy_process_group()


def train(title: str, recompute: partial[Tensor] | None) -> None:
    """Train this rank's stage for some steps.

    Args:
        title: what is printed.
        recompute: called with each block and its input instead of the block; None: blocks save all they need.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    module = nn.Sequential(*(Block(recompute) for _ in range(BLOCKS_PER_STAGE)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)
    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws
    for _ in range(NUM_STEPS):
        x = torch.randn(64, WIDTH, generator=data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=x.sin(), losses=losses, return_outputs=False)
        optimizer.step()
    peak, evicted = (schedule.stats[name] / 1024 for name in ("peak_bytes", "evicted_bytes"))
    loss = f", loss {torch.stack(losses).mean():.6f}" if losses else ""
    print(f"{title}, rank {rank}: at most {peak:.0f} KiB of activations, {evicted:.0f} KiB evicted per step{loss}", flush=True)
    schedule.close()


class Block(nn.Module):
    """A residual block, under activation checkpointing if that is asked for."""

    def __init__(self, recompute: partial[Tensor] | None) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return x [batch, width] and what the block adds to it."""
        out: Tensor = x + (self.layers(x) if self.recompute is None else self.recompute(self.layers, x))
        return out


if __name__ == "__main__":
    main()
