"""Train a Hugging Face Transformers model in a pipeline: here a small random Llama, with as many stages as processes.

    torchrun --nproc-per-node 4 examples/huggingface.py

For a model with weights, build it under `torch.device("meta")` or load it on each rank, and keep this rank's part. Every name in a
part's state dict is the original's, so each part loads its share of a checkpoint.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import bpipe

NUM_STEPS, NUM_MICROBATCHES, BATCH = 20, 8, 32
WORDS, TOKENS = 256, 32


def main() -> None:
    """Learn to count, with sequences of different lengths in a batch."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same model on every rank
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2
    )
    model = LlamaForCausalLM(config)
    parts = bpipe.split_transformer(model, num_ranks)
    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws
    x, _, mask = batch(2, data)
    bpipe.check_split(model, parts, x, attention_mask=mask)  # once for each kind of model
    mine = parts[rank]
    del model, parts

    stage = bpipe.PipelineStage(mine, rank, num_ranks)
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)
    schedule = bpipe.Balanced(bpipe.OneFOneB(stage, NUM_MICROBATCHES, loss_fn=loss_fn), budget="auto", optimizer=optimizer)
    for step in range(1, NUM_STEPS + 1):
        x, y, mask = batch(BATCH, data)
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(x, attention_mask=mask, target=y, losses=losses, return_outputs=False)  # every rank gives the mask
        optimizer.step()
        if losses and step % 10 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)

    peak_kib = schedule.stats["device_peak_bytes"] / 1024
    print(f"rank {rank}: {len(mine.state_dict())} tensors, memory {peak_kib:.0f} KiB at most", flush=True)
    schedule.close()
    dist.destroy_process_group()


def batch(num_rows: int, data: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers that follow each other (rows, tokens), those that come next, and which of them are no padding."""
    x = (torch.randint(0, WORDS, (num_rows, 1), generator=data) + torch.arange(TOKENS)) % WORDS
    mask = (torch.arange(TOKENS) < torch.randint(TOKENS // 2, TOKENS + 1, (num_rows, 1), generator=data)).long()
    return x, ((x + 1) % WORDS).masked_fill(mask == 0, -100), mask


def loss_fn(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


if __name__ == "__main__":
    main()
