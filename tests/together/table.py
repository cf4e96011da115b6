"""What each pair of shapes does in training: `python -m tests.together.table` prints the table of docs/limits.md.

Nothing here says it: the table is what happens to a plan of both.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Flow
from bpipe.flow.shape_arguments import directions_of
from bpipe.flow.shaping import shaped
from bpipe.passes.recompute import recompute
from bpipe.schedules import Plan, finish, overlap
from bpipe.schedules.any_flow import computations_for
from tests.occupied import Counting, Whose
from tests.together.models import Model, Trained, alone, assert_equal, gradients_of, model_of

PAGE = Path(__file__).parents[2] / "docs/limits.md"
P, M, SLICES, STEPS = 4, 4, 2, 2
SKIPS = {"near": (0, 2), "far": (0, 2, 3), "late": (1, 3)}
mse = nn.functional.mse_loss


def directions(flow: Flow) -> Flow:
    depth, ranks = len(flow.routes), flow.stage_ranks
    both = tuple(range(depth)), tuple(range(depth, 2 * depth))
    return shaped(flow, "alternatives", (*ranks, *(max(ranks) - rank for rank in ranks)), both, True)


def paths(flow: Flow) -> Flow:
    depth = len(flow.routes)
    dealt = tuple(range(depth)), tuple(range(depth, 2 * depth))
    return shaped(flow, "alternatives", (*flow.stage_ranks, *(depth + rank for rank in flow.stage_ranks)), dealt, False)


def slices(flow: Flow) -> Flow:
    return shaped(flow, "slices", SLICES)


def skips(flow: Flow) -> Flow:
    return shaped(flow, "skips", tuple(sorted(SKIPS.values())))


def local(flow: Flow) -> Flow:
    return shaped(flow, "local")


def pairs(plan: Plan) -> Plan:
    return overlap(plan)


def recomputation(plan: Plan) -> Plan:
    return recompute(finish(plan), slots=[max(1, peak - 1) for peak in finish(plan).peak_slots])


FLOWS: dict[str, Callable[[Flow], Flow]] = {one.__name__: one for one in (slices, directions, skips, local, paths)}
PASSES: dict[str, Callable[[Plan], Plan]] = {one.__name__: one for one in (pairs, recomputation)}
PAIRS = list(combinations([*FLOWS, *PASSES], 2))
OVER_PROCESSES = [  # those that tests/together/test_processes.py trains
    ("slices", "directions"),
    ("slices", "skips"),
    ("slices", "pairs"),
    ("slices", "recomputation"),
    ("directions", "skips"),
    ("directions", "recomputation"),
    ("skips", "pairs"),
    ("skips", "recomputation"),
    ("pairs", "recomputation"),
]


def plan_of(names: tuple[str, ...], num_ranks: int = P) -> Plan:
    """A plan of these shapes, one stage after the other on as many ranks."""
    flow = shaped(None, "chain", tuple(range(num_ranks)), M)
    for name in names:
        flow = FLOWS[name](flow) if name in FLOWS and name != "local" else flow
    plan = computations_for(flow)  # an order that has something to pair and to recompute, also where no gradient is waited for
    plan = replace(plan, flow=local(flow)) if "local" in names else plan
    for name in names:
        plan = PASSES[name](plan) if name in PASSES else plan
    return finish(plan)


def model_for(plan: Plan) -> Model:
    names = {shape.name for shape in plan.flow.shapes}
    found = SKIPS if "skips" in names else {}
    return model_of(plan.depth, plan.num_microbatches, skips=found, is_sliced=plan.slices > 1, is_local="local" in names)


def stages_on(plan: Plan, model: Model, rank: int, group: Any = None) -> list[bpipe.PipelineStage]:
    """The stages of a rank; a stage and its twin begin with the same weights."""
    return [
        bpipe.PipelineStage(
            deepcopy(model.stages[stage % plan.depth]),
            stage,
            plan.num_stages,
            "cpu",
            group=group,
            directions=directions_of(plan.flow),
            skips=model.skips,
        )
        for stage in plan.stages_of(rank)
    ]


def in_loopback(plan: Plan, **how: Any) -> tuple[list[bpipe.Schedule], list[Counting]]:
    """Train a plan in a loopback, balanced if it is said how, and compare it with one process; the last step is counted."""
    model, loopback, whose = model_for(plan), bpipe.Loopback(plan.num_ranks), Whose()
    stages = [stages_on(plan, model, rank, loopback.rank(rank)) for rank in range(plan.num_ranks)]
    schedules: list[bpipe.Schedule] = [bpipe.FromPlan(of_rank, plan, mse) for of_rank in stages]
    schedules = [bpipe.Balanced(one, **how) for one in schedules] if how else schedules
    counts, losses = [Counting(one, whose) for one in schedules] if how else [], list[torch.Tensor]()
    steps = STEPS + bool(how)  # the first one with a balanced plan makes the buffers for other ranks
    for step in range(steps):
        for count in counts:
            count.batch, count.looks = (model.x, model.target), step == steps - 1
        found: list[torch.Tensor] = []
        with whose:
            loopback.step(schedules, model.x, target=model.target, losses=found, return_outputs=False)
        losses += [loss.clone() for loss in found]  # which no rank holds
    expected = alone(model, steps)
    gradients = {one.stage_index: gradients_of(one.submod) for of_rank in stages for one in of_rank}
    for begin in range(0, plan.num_stages, plan.depth):
        assert_equal(Trained(losses, [gradients[stage] for stage in range(begin, begin + plan.depth)]), expected)
    return schedules, counts


def outcome(names: tuple[str, ...]) -> str:
    """Train a plan of some shapes; return what that did."""
    try:
        in_loopback(plan_of(names))
    except (ConfigurationError, ValueError) as error:
        return f"refused: {str(error).removeprefix('any_flow: ').replace('any_flow', 'the plan')}"
    return "trained over processes" if names in OVER_PROCESSES else "trained in the loopback"


def written() -> dict[tuple[str, ...], str]:
    """Return what the documentation says of each pair."""
    rows = [line.strip("| ").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| [a-z ]+, [a-z ]+ \|", line)]
    return {tuple(names.split(", ")): what for names, what in rows}


if __name__ == "__main__":
    print("| shapes | in training |", "|---|---|", sep="\n")
    for pair in PAIRS:
        print(f"| {', '.join(pair)} | {outcome(pair)} |")
