"""A mixture of experts: the auxiliary loss of every stage travels along to the last one, and tokens are weighed alike.

    torchrun --nproc-per-node 4 examples/mixture_of_experts.py

A stage returns its hidden state and the sum of the auxiliary losses so far; the last one hands both to `loss_fn`, and
their gradients go back the same way. Sequences have lengths of their own: the loss is divided by the tokens of the whole
step (`loss_kwargs`), not of each microbatch, and so not by the number of microbatches again (`scale_grads=False`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_WORDS, LENGTH, WIDTH, NUM_EXPERTS, NUM_STEPS = 32, 16, 32, 4, 60
PADDING = -100


def main() -> None:
    """Learn which word follows each."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = Experts(rank, num_ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)

    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=loss_fn, scale_grads=False)
    for step in range(1, NUM_STEPS + 1):
        words, target = batch_of(step)
        num_tokens = (target != PADDING).sum()
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(words, target=target, losses=losses, loss_kwargs={"num_tokens": num_tokens}, return_outputs=False)
        optimizer.step()
        loss = bpipe.share_loss(losses, reduction="sum")  # each is its share of the step's mean
        if rank == 0 and step % 10 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {loss:.4f}  of {num_tokens} tokens", flush=True)

    shares = ", ".join(f"{share:.2f}" for share in module.shares)
    print(f"rank {rank}: its experts get {shares} of the tokens", flush=True)
    schedule.close()
    dist.destroy_process_group()


class Experts(nn.Module):
    """A stage: some experts, and the router that sends each token to the best one."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.embedding = nn.Embedding(NUM_WORDS, WIDTH) if rank == 0 else nn.Identity()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_EXPERTS))
        self.head = nn.Linear(WIDTH, NUM_WORDS) if rank == num_ranks - 1 else nn.Identity()
        self.shares = torch.zeros(NUM_EXPERTS)

    def forward(self, x: Tensor, auxiliary: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
        x = self.embedding(x)
        chances = self.router(x).softmax(-1)
        taken = nn.functional.one_hot(chances.argmax(-1), NUM_EXPERTS).to(chances.dtype)
        chosen = chances * taken
        x = x + sum(chosen[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        self.shares = taken.mean((0, 1))
        # Least where all experts are used alike (Fedus et al., arXiv 2101.03961, section 2.2).
        return self.head(x), auxiliary + NUM_EXPERTS * (self.shares * chances.mean((0, 1))).sum()


def loss_fn(output: tuple[Tensor, Tensor], target: Tensor, *, num_tokens: Tensor) -> Tensor:
    """Return this microbatch's share of the step's loss: cross entropy, and a hundredth of the auxiliary loss."""
    logits, auxiliary = output
    entropy = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PADDING, reduction="sum")
    return (entropy + 0.01 * auxiliary * (target != PADDING).sum()) / num_tokens


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return words and the word after each; sequences end early, with padding after their end."""
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(NUM_WORDS, (32, LENGTH), generator=generator)
    lengths = torch.randint(LENGTH // 4, LENGTH + 1, (32, 1), generator=generator)
    return words, ((words + 1) % NUM_WORDS).where(torch.arange(LENGTH) < lengths, PADDING)


if __name__ == "__main__":
    main()
