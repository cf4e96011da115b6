"""Costs from a trace: the time each computation really took, and the bytes each microbatch really kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import median
from typing import Any

from bpipe.errors import ConfigurationError
from bpipe.plan.meter import occupancy
from bpipe.schedules import Costs, Op, Plan, Sizes, StageSizes, Timeline

__all__ = ["calibrated"]

Taken = dict[tuple[Op, int], dict[int, list[float]]]  # seconds by operation and stage, then by microbatch


def calibrated(timelines: Sequence[Timeline], plan: Plan) -> Costs:
    """Compute the costs of a plan from measured steps of it, or of another plan over the same stages.

    Each computation takes the median of its steps; if the plan has a different number of microbatches, the median of its
    stage. Bytes are those of the traced plan; if that counts slots, a microbatch keeps what a rank's memory grows by for each
    slot that it occupies, and messages are not counted. Links are not in a trace, because the time of a transfer there
    includes waiting for its other end: set them with `dataclasses.replace`.

    Args:
        timelines: measured steps of all ranks; evaluations are left out if the plan trains, and training steps if it evaluates.
        plan: the plan that the costs are for.

    Raises:
        ConfigurationError: the trace has no such steps, has other stages, or lacks an operation that the plan needs.
    """
    alike = [timeline for timeline in timelines if timeline.plan.has_backward == plan.has_backward]
    if not alike:
        raise ConfigurationError(f"the trace has no {'training steps' if plan.has_backward else 'evaluations'}: trace some")
    traced = next((timeline for timeline in alike if timeline.plan.sizes is not None), alike[0])
    if traced.plan.num_stages != plan.num_stages:
        raise ConfigurationError(
            f"the trace is of {traced.plan.num_stages} stages, and the plan has {plan.num_stages}: trace the stages you plan for"
        )
    if traced.plan.slices != plan.slices:
        if traced.plan.slices > 1:
            raise ConfigurationError(
                f"the trace is of {traced.plan.slices} slices per microbatch, and the plan has {plan.slices}: trace as many, or one"
            )
        return calibrated(alike, replace(plan, slices=1)).of_slices(plan)
    taken: Taken = defaultdict(lambda: defaultdict(list))
    for timeline in alike:
        if timeline.plan.slices != plan.slices:
            continue
        for (op, stage, microbatch), seconds in _worked(timeline).items():
            taken[op, stage][microbatch].append(seconds)
    needed = dict.fromkeys(action.op for rank in range(plan.num_ranks) for action in plan.compute(rank))
    named = {Op.F: "forward_s", Op.B: "backward_s", Op.I: "input_s", Op.W: "weight_s"}
    times = {named[op]: [_series(taken, op, stage, plan) for stage in range(plan.num_stages)] for op in needed if op is not Op.R}
    return Costs(**times, **_bytes(traced))  # type: ignore[arg-type]


def _bytes(traced: Timeline) -> dict[str, list[Any]]:
    """Return what a timeline says about each stage's bytes."""
    plan, sizes = traced.plan, traced.plan.sizes
    if sizes is None:
        saved = [_saved(traced, stage) for stage in range(plan.num_stages)]
        return {"saved_bytes": saved, "static_bytes": [_static(traced, rank, saved) for rank in plan.stage_ranks]}
    return {
        "saved_bytes": [_of_slices(sizes, stage, lambda one: one.saved) for stage in range(plan.num_stages)],
        "movable_bytes": [_of_slices(sizes, stage, lambda one: one.movable) for stage in range(plan.num_stages)],
        "output_bytes": [_of_slices(sizes, stage, lambda one: one.sent) for stage in range(plan.num_stages)],
        "gradient_bytes": [*(_of_slices(sizes, stage, lambda one: one.received) for stage in range(1, plan.num_stages)), 0],
        "static_bytes": [sizes.static[rank] // plan.stage_ranks.count(rank) for rank in plan.stage_ranks],
    }


def _of_slices(sizes: Sizes, stage: int, number: Callable[[StageSizes], int]) -> int | list[int]:
    """Return a number of a stage's sizes, or one for each slice of a microbatch if these differ."""
    numbers = [number(stages[stage]) for stages in sizes.by_slice]
    return numbers if sizes.later_slices else numbers[0]


def _worked(timeline: Timeline) -> dict[tuple[Op, int, int], float]:
    """Return the seconds of each computation, with the pieces of one added up; but for two side by side, which share their time."""
    seconds: dict[tuple[Op, int, int], float] = defaultdict(float)
    for rank in range(timeline.num_ranks):
        spans = list(timeline.computations(rank))
        pairs = ((one, two) for one, two in pairwise(spans) if timeline.plan.begins_pair(one.action) and two.begin_s < one.end_s)
        beside = {span.action for pair in pairs for span in pair}
        for action, begin, end in spans:
            if action not in beside:
                seconds[action.op_key] += end - begin
    return seconds


def _saved(timeline: Timeline, stage: int) -> int:
    """Return the bytes of a slot: what a rank's own microbatches save per slot when it occupies the most."""
    rank = timeline.plan.stage_ranks[stage]
    slots, saved = max(zip(occupancy(timeline.plan.actions[rank]), timeline.actions[rank].activation_bytes), default=(0, 0))
    return saved // slots if slots else 0


def _static(timeline: Timeline, rank: int, saved: Sequence[int]) -> int:
    """Return a stage's share of a rank's bytes other than its own microbatches, messages and its buffers for remote ones."""
    lane = timeline.actions[rank]
    remote_buffers = sum(map(sum, timeline.plan.remote_buffers(rank, lambda action: saved[action.stage]).values()))
    return max(0, lane.static_bytes + lane.remote_buffer_bytes - remote_buffers) // timeline.plan.stage_ranks.count(rank)


def _series(taken: Taken, op: Op, stage: int, plan: Plan) -> list[float]:
    """Return the seconds of an operation of a stage, by microbatch, or by slice of all microbatches."""
    by_microbatch = taken.get((op, stage))
    if not by_microbatch:
        raise ConfigurationError(
            f"the trace has no {op.value} of stage {stage} alone: trace a schedule that runs it, on all ranks, without `overlap`"
        )
    if by_microbatch.keys() == set(range(plan.num_units)):
        return [median(by_microbatch[unit]) for unit in range(plan.num_units)]
    by_slice: dict[int, list[float]] = defaultdict(list)
    for unit, seconds in by_microbatch.items():
        by_slice[unit % plan.slices] += seconds
    return [median(by_slice[slice_]) for slice_ in range(plan.slices)] * plan.num_microbatches
