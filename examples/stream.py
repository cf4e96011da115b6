"""Learning from a stream: each sample is seen once, and in every tick each stage runs forward, backward and learns.

    torchrun --nproc-per-node 4 examples/stream.py

Points move, and the stages learn where they are going to be. No stage waits for the gradient of its sample: it learns from what the
next stage made a tick ago, of a sample that was hardly different.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bpipe

WIDTH, BATCH, NUM_TICKS, AHEAD = 32, 8, 600, 100


class Block(nn.Module):
    """Two layers, and a way past them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def sample(tick: int, axes: Tensor, speeds: Tensor) -> tuple[Tensor, Tensor]:
    """Return where some points are that move in circles, and where they are going to be."""
    angles = [time * speeds[:, None] for time in (tick, tick + AHEAD)]
    now, then = (torch.cos(angle) * axes[0] + torch.sin(angle) * axes[1] for angle in angles)
    return now, then


def main() -> None:
    """Learn, and print the error now and then."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    module = [Block() for _ in range(num_ranks)][rank]
    axes, speeds = torch.randn(2, BATCH, WIDTH), (1 + torch.rand(BATCH)) / 100

    # Each stage has an optimizer of its own, which steps in each tick.
    stage = bpipe.PipelineStage(module, rank, num_ranks, torch.device("cpu"))
    stream = bpipe.Stream(stage, nn.functional.mse_loss, torch.optim.SGD(module.parameters(), lr=0.1))

    errors: list[float] = []
    for tick in range(NUM_TICKS):
        x, target = sample(tick, axes, speeds)
        stream.push(x, target=target)  # the target that belongs to x: the last rank keeps it until x has come there
        if stream.loss is not None:
            errors.append(stream.loss.item())
        if errors and tick % 100 == 99:
            print(f"tick {tick + 1}: error {sum(errors[-100:]) / 100:.4f}", flush=True)
    stream.drain()

    # Inference without bubbles, with the weights that were learned: outputs come out in the order of their samples.
    samples = [sample(tick, axes, speeds) for tick in range(NUM_TICKS, NUM_TICKS + 50)]
    outputs = [stream.push(x, learn=False) for x, _ in samples]
    outputs = [one for one in outputs if one is not None] + stream.drain(learn=False)
    if outputs:
        error = sum(nn.functional.mse_loss(one, target).item() for one, (_, target) in zip(outputs, samples, strict=True)) / 50
        print(f"{len(outputs)} later outputs without learning: error {error:.4f}")
    stream.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
