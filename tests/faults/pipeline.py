"""The small pipeline of the cases, on one rank: stages in which a fault can strike, and the single process it is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import nn

import bpipe
from tests.accelerator.build import LIBRARY, make
from tests.faults.case import Setup, Where
from tests.models import held_by, mse

WIDTH = 8
DEVICE = make() if LIBRARY in os.environ else "cpu"  # the simulated one, in processes that have it

Struck = Callable[[int, Where, int, Any], Any]  # the stage, where in it, which call of that, and the value that may be replaced


def untouched(stage: int, where: Where, call: int, value: Any) -> Any:
    return value


class Cell(nn.Module):
    """A stage that lets a fault strike where the user's code runs."""

    def __init__(self, stage: int, struck: Struck) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.stage, self.struck, self.calls, calls = stage, struck, count(), count()
        self.outer.weight.register_hook(lambda gradient: struck(stage, "weight", next(calls), gradient))

    def forward(self, x: torch.Tensor) -> Any:
        call, y = next(self.calls), torch.tanh(self.outer(torch.tanh(self.inner(x))))
        if y.requires_grad:
            y.register_hook(lambda gradient: self.struck(self.stage, "backward", call, gradient))
        return self.struck(self.stage, "forward", call, y)


def cells(num_stages: int, struck: Struck = untouched) -> list[Cell]:
    torch.manual_seed(0)
    return [Cell(stage, struck) for stage in range(num_stages)]


def batch(m: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(m)
    return torch.randn(rows * m, WIDTH, generator=generator), torch.randn(rows * m, WIDTH, generator=generator)


@cache
def expected(num_stages: int, m: int, rows: int, *, is_local: bool = False) -> list[list[torch.Tensor]]:
    """The gradients of one process on CPU, by stage; in local learning, of each stage's own loss."""
    modules = cells(num_stages)
    for x, y in zip(*(part.chunk(m) for part in batch(m, rows))):
        for module in modules:
            x = module(x.detach() if is_local else x)
            if is_local or module is modules[-1]:
                (mse(x, y) / m).backward()
    return gradients_of(modules)


def gradients_of(modules: list[Cell]) -> list[list[torch.Tensor]]:
    return [[p.grad.cpu() for p in module.parameters() if p.grad is not None] for module in modules]


class Pipeline:
    """One rank's part.

    Args:
        held: its stages; by default those that the schedule puts there.
        group: of its ranks; None: the default group.
    """

    def __init__(
        self, rank: int, num_ranks: int, setup: Setup, struck: Struck = untouched, held: list[int] | None = None, group: Any = None
    ) -> None:
        self.num_stages, self.m = setup.num_stages or num_ranks, setup.m
        self.batch = tuple(part.to(DEVICE) for part in batch(setup.m, setup.rows))
        self.held = held_by(setup.schedule, num_ranks, self.num_stages)[rank] if held is None else held
        self.modules = [cells(self.num_stages, struck)[stage].to(DEVICE) for stage in self.held]
        self._struck, self._calls = struck, count()
        self._is_local, last = setup.schedule is bpipe.LocalLearning, self.num_stages - 1
        run = [bpipe.LocalBlock(one, nn.Identity()) if self._is_local and one.stage < last else one for one in self.modules]
        placed = zip(self.held, run)
        stages = [bpipe.PipelineStage(module, stage, self.num_stages, DEVICE, group) for stage, module in placed]
        self.schedule = setup.schedule(stages, setup.m, loss_fn=self._loss, **setup.options)
        if setup.balanced is not None:
            self.schedule = bpipe.Balanced(self.schedule, **setup.balanced)

    def _loss(self, output: Any, target: torch.Tensor) -> Any:
        return self._struck(self.num_stages - 1, "loss", next(self._calls), mse(output, target))

    def step(self) -> None:
        x, y = self.batch
        self.schedule.step(x, target=y)

    def eval(self) -> None:
        self.schedule.eval(self.batch[0])

    def check_step(self) -> None:
        """Raise unless a step's gradients are those of one process, to the bit."""
        for module in self.modules:
            module.zero_grad()
        self.step()
        for stage, found in zip(self.held, gradients_of(self.modules), strict=True):
            right = expected(self.num_stages, self.m, len(self.batch[0]) // self.m, is_local=self._is_local)[stage]
            assert all(map(torch.equal, found, right)) and len(found) == len(right), f"inexact gradients of stage {stage}"
