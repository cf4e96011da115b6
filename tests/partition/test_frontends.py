"""What torch.distributed.pipelining cuts: `pipeline()` and `Pipe.build_stage` give stages that our schedules take."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe import SplitPoint
from bpipe import pipeline as cut
from tests.partition.models import assert_equal, cross_entropy, gradients_alone
from tests.ranks import run_ranks

M, ROWS = 4, 2


class Layers(nn.Module):
    """Small, because every rank exports it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layers = nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def whole() -> Layers:
    torch.manual_seed(0)
    return Layers()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(ROWS * M, 8, generator=generator), torch.randint(0, 8, (ROWS * M,), generator=generator)


def built_by_torch(rank: int) -> dict[str, torch.Tensor]:
    cuts = {f"layers.{index}": SplitPoint.BEGINNING for index in (1, 3)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.export
        pipe = cut(whole(), mb_args=(torch.zeros(ROWS, 8),), split_spec=cuts)
    stage = pipe.build_stage(rank, torch.device("cpu"), dist.group.WORLD)
    schedule = bpipe.BalancedOneFOneB(stage, M, loss_fn=cross_entropy)
    assert schedule._stage is stage and stage.has_backward
    x, y = batch()
    for _ in range(2):
        stage.submod.zero_grad()
        schedule.step(x, target=y, return_outputs=False)
    schedule.close()
    return {name: parameter.grad for name, parameter in stage.submod.named_parameters()}


def test_stages_that_torch_cut_give_the_same_gradients(one_thread: None) -> None:
    """Under the names of the whole model: export gives each parameter the name that it had."""
    found = run_ranks(built_by_torch, 3)
    assert all(found)
    assert_equal(gradients_alone(whole(), M, *batch()), {name: gradient for part in found for name, gradient in part.items()})
