"""Skips that are added to the output of the stage before: their gradient is the output's, one tensor, to which others are added."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import build

pytestmark = pytest.mark.usefixtures("one_thread")

M, WIDTH = 4, 8
Skips = Mapping[str, Sequence[int]]


class Stage(nn.Module):
    """It adds what it gets before anything else."""

    def __init__(self, made: Sequence[str]) -> None:
        super().__init__()
        self.linear, self.made = nn.Linear(WIDTH, WIDTH), made

    def forward(self, x: torch.Tensor, **skips: torch.Tensor) -> Any:
        y = self.linear(torch.tanh(sum((skips[name] for name in sorted(skips)), x)))
        return (y, {name: y.sin() * number for number, name in enumerate(self.made, 1)}) if self.made else y


def _as_one(modules: Sequence[nn.Module], skips: Skips, x: torch.Tensor) -> list[torch.Tensor | None]:
    for part in x.chunk(M):
        values: dict[str, torch.Tensor] = {}
        y = part
        for index, module in enumerate(modules):
            y = module(y, **{name: values[name] for name, (_, *users) in skips.items() if index in users})
            if isinstance(y, tuple):
                y, made = y
                values |= made
        (nn.functional.mse_loss(y, part) / M).backward()
    return [p.grad for module in modules for p in module.parameters()]


@pytest.mark.parametrize(
    ("name", "num_ranks", "skips"),
    [
        ("interleaved_1f1b", 2, {"kept": (0, 1, 3)}),  # of the stage before, and of a later one on the same rank
        ("interleaved_1f1b", 2, {"kept": (0, 1, 3), "other": (1, 2)}),
        ("interleaved_1f1b", 1, {"kept": (0, 1, 2, 3)}),
        ("zbv", 2, {"kept": (0, 1, 3)}),
        ("zbv", 2, {"kept": (1, 2, 3)}),
        ("1f1b", 4, {"kept": (0, 1, 2, 3), "other": (0, 1)}),
    ],
)
def test_gradients_are_those_of_one_process(name: str, num_ranks: int, skips: Skips) -> None:
    torch.manual_seed(0)
    modules = [Stage([name for name, (source, *_) in skips.items() if source == index]).double() for index in range(4)]
    plan, loopback = build(name, 4, M, num_ranks=num_ranks, skips=skips.values()), bpipe.Loopback(num_ranks)
    schedules = []
    for rank in range(num_ranks):
        stages = [bpipe.PipelineStage(modules[i], i, 4, "cpu", loopback.rank(rank), skips=skips) for i in plan.stages_of(rank)]
        schedules.append(bpipe.FromPlan(stages, plan, nn.functional.mse_loss))
    x = torch.randn(4 * M, WIDTH, dtype=torch.float64)
    loopback.step(schedules, x, target=x)
    found = [p.grad for module in modules for p in module.parameters()]
    for module in modules:
        module.zero_grad()
    torch.testing.assert_close(found, _as_one(modules, skips, x), rtol=1e-14, atol=1e-14)
