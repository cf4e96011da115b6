"""Bytes at the peak of each rank where the last stage has a head of 32,000 words: plain, balanced by count, and in bytes.

Eight ranks of a small language model in a loopback, on CPU; the last stage saves a softmax over all words. By count the paper's
rule hands it microbatches of the first stage as well. Prints a table and writes benchmarks/results/balanced_head.csv.

    .venv/bin/python -m benchmarks.balanced_head
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import bpipe
from benchmarks.study import write_csv

MIB = 2**20
WORDS, WIDTH, HIDDEN, BLOCKS, TOKENS = 32_000, 32, 1024, 6, 64
P = M = 8
NUMBERS = ("device_peak_bytes", "predicted_device_peak_bytes", "static_bytes", "evicted_bytes")

Wrap = Callable[[bpipe.Schedule], bpipe.Schedule]
WAYS: dict[str, Wrap] = {
    "plain 1F1B": lambda schedule: schedule,
    "balanced by count": lambda schedule: bpipe.Balanced(schedule, budget=None),
    "balanced in bytes": lambda schedule: bpipe.Balanced(schedule, budget="lowest"),
    "in bytes, 4 parts": lambda schedule: bpipe.Balanced(schedule, budget="lowest", options=bpipe.Options(parts=4)),
}


class Block(nn.Module):
    """A residual block that saves a lot for little work."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def stage_of(rank: int) -> nn.Module:
    """A stage of the model: words first, blocks everywhere, the head last."""
    torch.manual_seed(rank)
    first = [nn.Embedding(WORDS, WIDTH)] if rank == 0 else []
    last = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)] if rank == P - 1 else []
    return nn.Sequential(*first, *(Block() for _ in range(BLOCKS)), *last)


def trained(wrap: Wrap, steps: int = 3) -> tuple[list[Any], list[torch.Tensor]]:
    """The schedules after some steps, and the gradients of all ranks."""
    loopback, modules = bpipe.Loopback(P), [stage_of(rank) for rank in range(P)]
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [wrap(bpipe.OneFOneB(stage, M, loss_fn=nn.functional.cross_entropy)) for stage in stages]
    words = torch.randint(WORDS, (M * TOKENS + 1,), generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        loopback.step(schedules, words[:-1], target=words[1:], return_outputs=False)
    return schedules, [p.grad for module in modules for p in module.parameters() if p.grad is not None]


def main() -> None:
    """Train each way, and compare."""
    torch.set_num_threads(1)
    kept: list[list[Any]] = [["schedule", "number", *(f"rank {rank}" for rank in range(P))]]
    print(row("MiB at the peak", [*kept[0][2:], "highest"]))
    for name, wrap in WAYS.items():
        schedules, _ = trained(wrap)
        kept += [[name, number, *(int(one.stats[number]) for one in schedules)] for number in NUMBERS]
        peaks = [one.stats["device_peak_bytes"] / MIB for one in schedules]
        print(row(name, [f"{peak:.1f}" for peak in [*peaks, max(peaks)]]), flush=True)
    write_csv("balanced_head", kept)


def row(name: str, cells: list[str]) -> str:
    return f"{name:<18}" + "".join(f"{cell:>9}" for cell in cells)


if __name__ == "__main__":
    main()
