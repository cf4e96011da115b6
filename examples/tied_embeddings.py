"""One matrix for the embedding and the output, on the first and the last stage; one norm to clip by; weight decay groups.

    torchrun --nproc-per-node 4 examples/tied_embeddings.py

Each end has a copy of the matrix. The first step gives both the same values, and each step adds its gradients up on these two
ranks, so both copies take the same update and stay equal to the bit; the other ranks send nothing.
"""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_WORDS, LENGTH, WIDTH, NUM_STEPS = 32, 16, 64, 30


def main() -> None:
    """Learn which word follows each."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = Model(rank, num_ranks)
    optimizer = torch.optim.AdamW(groups_of(module), lr=1e-3)

    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=loss_fn)
    for step in range(1, NUM_STEPS + 1):
        words = torch.randint(NUM_WORDS, (32, LENGTH), generator=torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(words, target=(words + 1) % NUM_WORDS, losses=losses, return_outputs=False)
        norm = bpipe.clip_grad_norm_(module.parameters(), 1.0)  # over all stages, in which the matrix counts once
        optimizer.step()
        loss = bpipe.share_loss(losses)
        if rank == 0 and step % 5 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {loss:.4f}  norm {norm:.3f}", flush=True)

    if module.matrix is not None:
        print(f"rank {rank}: the matrix sums to {module.matrix.double().sum():.12f}", flush=True)
    schedule.close()
    dist.destroy_process_group()


class Model(nn.Module):
    """Stage `rank` of `num_ranks`: the embedding on the first, a block on each, the output on the last."""

    # bpipe: the second name is one weight with the first, as Transformers' models say it. split_model would know it by itself.
    _tied_weights_keys: ClassVar = {"head.weight": "embedding.weight"}

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH) if rank == 0 else nn.Identity()
        self.block = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.head = nn.Linear(WIDTH, NUM_WORDS, bias=False) if rank == num_ranks - 1 else nn.Identity()
        if rank == 0:
            nn.init.normal_(self.embedding.weight, std=0.1)
        if num_ranks == 1:
            self.head.weight = self.embedding.weight  # both ends on one rank: one parameter, and nothing to sum

    @property
    def matrix(self) -> nn.Parameter | None:
        """This stage's copy of the shared matrix."""
        return getattr(self.embedding, "weight", getattr(self.head, "weight", None))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        output: Tensor = self.head(x + self.block(x))
        return output


def groups_of(module: nn.Module) -> list[dict[str, object]]:
    """Return AdamW's groups: matrices decay, vectors do not. A stage's groups are the whole model's, cut."""
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() == 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy of the words, in nats."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
