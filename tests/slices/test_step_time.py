"""Slices save the bubble that their plan says: stages sleep, so that 2 cores can stand for p devices; all messages are real.

benchmarks/sliced_plain.py measures the same with more steps and in more cases.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import bpipe
from benchmarks.alternate import timed
from bpipe.schedules import Costs, build, simulate
from tests.ranks import run_ranks
from tests.sleepers import Sleeper, SlicedSleeper
from tests.tries import holds_in_one_try

FORWARD_S = 0.2  # of a whole microbatch: long beside the messages of slices, even where 4 processes share 2 slow cores
PAIRS_OF_STEPS = 2
MOST_OVER_IDEAL = 1.05


def step_times(rank: int, p: int, m: int, k: int) -> list[list[float]]:
    """Seconds of steps of whole sequences and of slices, in turns, from a common start."""
    sleepers = [Sleeper(FORWARD_S, 4096), Sleeper(FORWARD_S / k, 4096 // k)]
    stages = [bpipe.PipelineStage(module, rank, p, "cpu") for module in (sleepers[0], SlicedSleeper(sleepers[1]))]
    mse, x = nn.functional.mse_loss, torch.ones(m, 4 * k, 8)
    schedules = [bpipe.OneFOneB(stages[0], m, loss_fn=mse), bpipe.Seq1F1B(stages[1], m, loss_fn=mse, slices=k)]
    seconds: list[list[float]] = [[], []]
    for turn in range(1 + PAIRS_OF_STEPS):
        for sleeper, schedule, taken in zip(sleepers, schedules, seconds):
            sleeper.sleeps = turn > 0  # messages are learned in the first
            step_s, _ = timed(partial(schedule.step, x, target=x))
            if turn:
                taken.append(step_s)
    return seconds


def test_a_step_in_slices_is_as_short_as_its_plan() -> None:
    p = m = k = 4
    plan = build("seq_1f1b", p, m, slices=k)
    ideal = simulate(plan, Costs().of_slices(plan)).makespan_s / simulate(build("1f1b", p, m), Costs()).makespan_s
    assert ideal == pytest.approx(14.25 / 21)

    def measure() -> float:
        of_ranks = run_ranks(step_times, p, p, m, k)
        whole, sliced = (min(max(of_step) for of_step in zip(*taken)) for taken in zip(*of_ranks))
        return sliced / whole

    holds_in_one_try(measure, lambda ratio: ratio <= MOST_OVER_IDEAL * ideal)
