"""Cut your own model into stages by what its layers take: measure, choose, split, prove, train.

    torchrun --nproc-per-node 4 examples/split_model.py

The head of this one has a large vocabulary, so its stage gets fewer blocks. `objective="memory"`, or `memory_bytes=` for a limit
on each rank, choose by memory instead; on the meta device a model is measured that fits nowhere.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import bpipe
from bpipe.partition import StageChoice

NUM_STEPS, NUM_MICROBATCHES, BATCH = 20, 8, 32
WORDS, TOKENS, WIDTH = 4096, 32, 64


class Transformer(nn.Module):
    """An ordinary model, which knows nothing of pipelines: embedding, blocks, norm and head."""

    def __init__(self, num_blocks: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True) for _ in range(num_blocks)]
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def main() -> None:
    """Learn to double."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model on every rank
    torch.set_num_threads(1)
    model = Transformer()
    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws

    found: list[StageChoice | None] = [None]
    if rank == 0:  # two ranks would not measure the same, and all must cut alike
        x, y = batch(BATCH // NUM_MICROBATCHES, torch.Generator())
        layers = bpipe.measure_layers(model, x, loss_fn=loss_fn, target=y)
        found = [bpipe.choose_stages(layers, num_ranks, NUM_MICROBATCHES, schedule="balanced_1f1b")]
        print(found[0], flush=True)
    dist.broadcast_object_list(found, device=torch.device("cpu"))
    assert found[0] is not None
    parts = bpipe.split_model(model, found[0].stages)
    bpipe.check_split(model, parts, batch(2, data)[0])  # once for each kind of model: the stages compute what the model does
    mine = parts[rank]
    del model, parts  # what other ranks have is freed

    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(mine, rank, num_ranks), NUM_MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
    for step in range(1, NUM_STEPS + 1):
        x, y = batch(BATCH, data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, target=y, losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)
    names = list(mine.state_dict())
    print(f"rank {rank}: {names[0]} to {names[-1]}, {schedule.stats['peak_bytes'] / 2**20:.1f} MiB of activations", flush=True)
    schedule.close()
    dist.destroy_process_group()


def batch(num_rows: int, data: torch.Generator) -> tuple[Tensor, Tensor]:
    """Words (rows, tokens), and for each of them the word that is twice as large."""
    x = torch.randint(0, 64, (num_rows, TOKENS), generator=data)
    return x, 2 * x


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
