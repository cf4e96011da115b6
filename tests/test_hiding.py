"""Evictions hide behind compute: an acceptor that computes for long does not hold them up.

Forwards and backwards sleep, so that 2 cores can stand for p devices; the transfers are real.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.ranks import run_ranks

pytestmark = pytest.mark.alone

FORWARD_S, BACKWARD_S, SAVED_BYTES = 0.1, 0.2, 32 * 1024**2
PAIRS_OF_STEPS = 3


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sleeps: bool) -> torch.Tensor:
        start, ctx.sleeps = time.perf_counter(), sleeps
        ctx.save_for_backward(x.new_full((SAVED_BYTES // 4,), 1.0))
        time.sleep(max(0.0, FORWARD_S * sleeps - (time.perf_counter() - start)))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors
        time.sleep(BACKWARD_S * ctx.sleeps)
        return gradient * saved[-1], None


class Sleeper(nn.Module):
    """A stage of a device that takes its time, with 32 MB of activations a microbatch; it need not in steps that nobody times."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.sleeps = nn.Parameter(torch.ones(1)), True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleep.apply(x * self.scale, self.sleeps)


def step_times(rank: int, p: int, m: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of plain and balanced steps in turns, and the bytes that a balanced one evicts."""
    module = Sleeper()
    stage = bpipe.PipelineStage(module, rank, p, "cpu")
    schedules = [schedule(stage, m, loss_fn=nn.functional.mse_loss) for schedule in (bpipe.OneFOneB, bpipe.BalancedOneFOneB)]
    x = torch.ones(m, 8)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(1 + PAIRS_OF_STEPS):  # in the first, messages are learned and rooms are made
        module.sleeps = turn > 0
        for schedule, taken in zip(schedules, seconds):
            schedule.step(x, target=x)
            if turn:
                taken.append(schedule.stats["step_s"])
    return *seconds, [schedules[1].stats["evicted_bytes"]]


def test_the_balanced_step_takes_as_long_as_the_plain_one():
    results = run_ranks(step_times, 4, 4, 7, timeout_s=200)
    plain, balanced, evicted = results[0]
    assert evicted[0] >= 2 * SAVED_BYTES
    assert statistics.median(balanced) <= 1.02 * statistics.median(plain), (plain, balanced)
