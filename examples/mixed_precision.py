"""Mixed precision over stages: float16 under autocast, and a loss scale that all ranks agree on.

    torchrun --nproc-per-node 4 examples/mixed_precision.py

Autocast stands around the whole step: the float16 copies that it keeps of the weights serve all microbatches, and stay
where they are while activations move. An overflow on any stage skips the optimizer's step on all of them. bfloat16 has
the range of float32 and needs no scale: there, leave the scaler out.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_STEPS, WIDTH = 60, 64


def main() -> None:
    """Learn the length of a vector, with a scale that starts too high."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    module = build_stage(rank, num_ranks)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    scaler = bpipe.GradScaler("cpu", init_scale=2.0**18, growth_interval=20)

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        return scaler.scale(nn.functional.mse_loss(output.float(), target))

    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=loss_fn)
    for step in range(1, NUM_STEPS + 1):
        x = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(step))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            schedule.step(x, target=x.norm(dim=1, keepdim=True), losses=losses, return_outputs=False)
        loss = bpipe.share_loss(losses) / scaler.get_scale()

        # On every rank: divide by the scale, clip the gradients, and take the step, or all skip it.
        scaler.unscale_(optimizer)
        norm = bpipe.clip_grad_norm_(module.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        if rank == 0 and (step <= 5 or step % 10 == 0):
            print(f"step {step}/{NUM_STEPS}  loss {loss:.4f}  norm {norm:.2f}  next scale {scaler.get_scale():.0f}", flush=True)

    print(f"rank {rank}: at most {schedule.stats['peak_bytes'] / 1024:.0f} KiB of activations", flush=True)
    schedule.close()
    dist.destroy_process_group()


def build_stage(stage: int, num_stages: int) -> nn.Sequential:
    """Return one stage's layers, in float32."""
    torch.manual_seed(0)
    hidden = [layer for _ in range(7) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    layers = [*hidden, nn.Linear(WIDTH, 1)]
    return nn.Sequential(*layers[len(layers) * stage // num_stages : len(layers) * (stage + 1) // num_stages])


if __name__ == "__main__":
    main()
