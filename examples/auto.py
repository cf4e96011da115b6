"""bpipe chooses: where to cut a model with a large head, the schedule, the microbatch size, and what leaves the memory.

    torchrun --nproc-per-node 4 examples/auto.py

Rank 0 measures the layers and chooses; the first steps show whether it was right, and the log says so.
"""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

WIDTH, VOCABULARY, LENGTH, ROWS = 64, 2000, 32, 32
NUM_STEPS = 20


def main() -> None:
    """Learn which token a token was made from."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))

    # The whole model and a batch of it, on every rank: bpipe makes this rank's stages.
    schedule = bpipe.auto(build_model(), tokens, loss_of, target=tokens)
    optimizer = torch.optim.AdamW([one for module in schedule.modules for one in module.parameters()], lr=1e-2)

    for step in range(1, NUM_STEPS + 1):
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(tokens, target=tokens, losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)

    if rank == 0:
        print(schedule.choice, flush=True)
    schedule.close()
    dist.destroy_process_group()


def loss_of(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross-entropy."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def build_model() -> nn.Sequential:
    """Return the whole model; each process builds the same."""
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True) for _ in range(9)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


if __name__ == "__main__":
    main()
