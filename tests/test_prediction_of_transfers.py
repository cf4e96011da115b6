"""A step whose transfers show takes what the simulator predicts from a trace of another schedule, within ten percent."""

from __future__ import annotations

from dataclasses import replace
from statistics import median
from typing import NamedTuple

import torch
from torch import nn

import bpipe
from bpipe.estimate.calibrate import calibrated
from bpipe.schedules import Costs, Link, Plan, simulate
from tests.ranks import run_ranks
from tests.tries import holds_in_one_try
from tests.wide import Wide, slow_links

P, M = 4, 6
FORWARD_S, WIDTH, BYTES_PER_S = 0.03, 2**20, 0.25e9  # messages of 4 MiB: the copies of 4 ranks take 2 cores little time
TOLERANCE = 0.10


class Steps(NamedTuple):
    """Steps of a plan: what they took, and the costs that their trace tells for each plan, by name."""

    plan: Plan
    step_s: float
    costs: dict[str, Costs]


def traced(rank: int) -> dict[str, Steps]:
    slow_links(BYTES_PER_S)
    module = Wide(FORWARD_S, WIDTH if rank < P - 1 else 8, WIDTH)
    stage = bpipe.PipelineStage(module, rank, P, "cpu")
    schedules = [rule(stage, M, loss_fn=nn.functional.mse_loss) for rule in (bpipe.GPipe, bpipe.BalancedOneFOneB)]
    x, found = torch.ones(M, 8), {}
    for schedule in schedules:
        for _ in range(2):  # messages are learned, and buffers are made
            schedule.step(x, target=x, return_outputs=False)
        with bpipe.trace(schedule) as trace:
            for _ in range(3):
                schedule.step(x, target=x, return_outputs=False)
        steps = trace.gather()
        costs = {one.plan.name: calibrated(steps, one.plan) for one in schedules}
        found[schedule.plan.name] = Steps(schedule.plan, median(step.makespan_s for step in steps), costs)
    for schedule in schedules:
        schedule.close()
    return found


def ratios() -> dict[tuple[str, str], tuple[float, float]]:
    """The predicted step over the measured one, for each traced plan and each plan; and likewise with links that are free."""
    found = run_ranks(traced, P)[0]
    predicted = {}
    for name, steps in found.items():
        for other, costs in steps.costs.items():
            of = found[other]
            both = (simulate(of.plan, one).makespan_s / of.step_s for one in (costs, replace(costs, link=Link(), slowdown=1.0)))
            predicted[name, other] = (next(both), next(both))
    return predicted


def test_the_predicted_step_is_the_measured_one() -> None:
    """From each schedule for each schedule. Transfers show: without them, each step would seem more than a tenth shorter."""

    def holds(found: dict[tuple[str, str], tuple[float, float]]) -> bool:
        return all(abs(ratio - 1) <= TOLERANCE and free < 1 - TOLERANCE for ratio, free in found.values())

    holds_in_one_try(ratios, holds)
