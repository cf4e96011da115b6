"""Evictions hide behind compute: an acceptor that computes for long does not hold them up.

Forwards and backwards sleep, so that 2 cores can stand for p devices; the transfers are real.
benchmarks/same_cap.py has eight ranks.
"""

from __future__ import annotations

import statistics

import torch
from torch import nn

import bpipe
from tests.ranks import run_ranks
from tests.sleepers import Sleeper
from tests.tries import holds_in_one_try

FORWARD_S, SAVED_BYTES = 0.1, 32 * 1024**2
PAIRS_OF_STEPS = 3


def step_times(rank: int, p: int, m: int) -> tuple[list[float], list[float], list[float]]:
    """Seconds of plain and balanced steps in turns, and the bytes that a balanced one evicts."""
    module = Sleeper(FORWARD_S, SAVED_BYTES)
    stage = bpipe.PipelineStage(module, rank, p, "cpu")
    schedules = [schedule(stage, m, loss_fn=nn.functional.mse_loss) for schedule in (bpipe.OneFOneB, bpipe.BalancedOneFOneB)]
    x = torch.ones(m, 8)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(1 + PAIRS_OF_STEPS):  # in the first, messages are learned and buffers are made
        module.sleeps = turn > 0
        for schedule, taken in zip(schedules, seconds):
            schedule.step(x, target=x)
            if turn:
                taken.append(schedule.stats["step_s"])
    return *seconds, [schedules[1].stats["evicted_bytes"]]


def test_the_balanced_step_takes_as_long_as_the_plain_one():
    def measure() -> float:
        plain, balanced, evicted = run_ranks(step_times, 4, 4, 7, timeout_s=200)[0]
        assert evicted[0] >= 2 * SAVED_BYTES
        return statistics.median(balanced) / statistics.median(plain)

    holds_in_one_try(measure, lambda ratio: ratio <= 1.02)
