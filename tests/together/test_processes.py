"""Pairs of shapes over processes joined by gloo: the gradients and losses of one process, plain, with evictions, and recomputed."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

import bpipe
from tests.ranks import run_ranks
from tests.together.models import Trained, alone, assert_equal, gradients_of
from tests.together.table import OVER_PROCESSES, STEPS, model_for, mse, plan_of, stages_on

LOWEST = {"budget": "lowest"}
WAYS: dict[str, dict[str, Any]] = {"plain": {}, "evicted": LOWEST, "recomputed": {**LOWEST, "by": "recompute"}}
Found = dict[str, tuple[list[torch.Tensor], dict[int, list[torch.Tensor]], bool]]


def on_rank(rank: int, names: tuple[str, ...], num_ranks: int) -> Found:
    """In each way: the losses of a rank, the gradients of its stages, and whether its plan moves or recomputes anything."""
    found: Found = {}
    for name, how in WAYS.items():
        plan = plan_of(names, num_ranks)
        model, losses = model_for(plan), list[torch.Tensor]()
        stages = stages_on(plan, model, rank)
        schedule: bpipe.Schedule = bpipe.FromPlan(stages, plan, mse)
        schedule = bpipe.Balanced(schedule, **how) if how else schedule
        for _ in range(STEPS):
            of_step: list[torch.Tensor] = []
            schedule.step(model.x, target=model.target, losses=of_step, return_outputs=False)
            losses += of_step
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
        acts = any(schedule.plan.evicted(one) or schedule.plan.recomputed(one) for one in range(num_ranks))
        found[name] = losses, {one.stage_index: gradients_of(one.submod) for one in stages}, acts
        schedule.close()
    return found


def check(names: tuple[str, ...], num_ranks: int) -> None:
    plan = plan_of(names, num_ranks)
    ranks, expected = run_ranks(on_rank, num_ranks, names, num_ranks), alone(model_for(plan), STEPS)
    for name in WAYS:
        gradients = {stage: found for of_rank in ranks for stage, found in of_rank[name][1].items()}
        ends = [plan.stage_ranks[stage] for stage in range(plan.depth - 1, plan.num_stages, plan.depth)]  # of each direction
        losses = list(chain.from_iterable(zip(*(ranks[end][name][0] for end in ends))))
        for begin in range(0, plan.num_stages, plan.depth):
            own = [gradients[stage] for stage in range(begin, begin + plan.depth)]
            assert_equal(Trained(losses, own), expected)
        assert ranks[0][name][2] or name == "plain" or (name == "evicted" and "directions" in names)


@pytest.mark.parametrize("names", OVER_PROCESSES, ids="-".join)
def test_a_pair_trains_as_one_process(names: tuple[str, ...]) -> None:
    check(names, 4)


def test_two_processes() -> None:
    check(("slices", "directions"), 2)
