"""A U-Net over four processes: each size's output goes to the stage of the same size on the way up, in a message of its own.

    torchrun --nproc-per-node 4 examples/unet.py

It learns to remove noise from waves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

NUM_STEPS, CHANNELS, POSITIONS = 60, 32, 64


class Down(nn.Module):
    """Halves the positions of [batch, channels, positions], and hands on what it had before."""

    def __init__(self, in_channels: int, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv1d(in_channels, CHANNELS, 5, padding=2), name

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        x = nn.functional.gelu(self.conv(x))
        return nn.functional.avg_pool1d(x, 2), {self.name: x}


class Up(nn.Module):
    """Doubles the positions, and joins what the stage of the same size has handed on."""

    def __init__(self, out_channels: int, name: str) -> None:
        super().__init__()
        self.conv, self.name = nn.Conv1d(2 * CHANNELS, out_channels, 5, padding=2), name

    def forward(self, x: Tensor, **skips: Tensor) -> Tensor:
        x = nn.functional.interpolate(x, scale_factor=2.0)
        x = torch.cat([x, skips[self.name]], dim=1)
        output: Tensor = self.conv(x)
        return output if output.shape[1] == 1 else nn.functional.gelu(output)


def main() -> None:
    """Train the four stages, and print which messages carry skips past stages in between."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    mine = [Down(1, "large"), Down(CHANNELS, "small"), Up(CHANNELS, "small"), Up(1, "large")][rank]
    optimizer = torch.optim.AdamW(mine.parameters(), lr=3e-3)

    # The same on all ranks: stage 0 makes "large" for stage 3, and stage 1 makes "small" for stage 2.
    skips = {"large": (0, 3), "small": (1, 2)}
    stage = bpipe.PipelineStage(mine, rank, num_ranks, torch.device("cpu"), skips=skips)
    schedule = bpipe.BalancedOneFOneB(stage, n_microbatches=8, loss_fn=nn.functional.mse_loss)

    data = torch.Generator().manual_seed(0)  # the same batches on every rank, whatever a stage draws
    for step in range(1, NUM_STEPS + 1):
        waves = torch.sin(torch.rand(64, 1, 1, generator=data) * torch.arange(POSITIONS) + 6 * torch.rand(64, 1, 1, generator=data))
        losses: list[Tensor] = []
        optimizer.zero_grad()
        schedule.step(waves + 0.3 * torch.randn_like(waves), target=waves, losses=losses, return_outputs=False)
        optimizer.step()
        if losses and step % 20 == 0:
            print(f"step {step}/{NUM_STEPS}  loss {torch.stack(losses).mean():.4f}", flush=True)

    sent = [str(action) for action in schedule.plan.actions[rank] if action.op == bpipe.schedules.Op.SEND_F and action.part]
    if sent:
        print(f"rank {rank} hands on by {', '.join(sent)}", flush=True)
    schedule.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
