"""Costs from a trace: the time each computation really took, and the bytes each microbatch really kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from bpipe.errors import ConfigurationError
from bpipe.plan.meter import occupancy
from bpipe.schedules import Costs, Op, Plan, Timeline

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
    taken: Taken = defaultdict(lambda: defaultdict(list))
    for timeline in alike:
        for (op, stage, microbatch), seconds in _worked(timeline).items():
            taken[op, stage][microbatch].append(seconds)
    needed = dict.fromkeys(action.op for rank in range(plan.num_ranks) for action in plan.compute(rank))
    named = {Op.F: "forward_s", Op.B: "backward_s", Op.I: "input_s", Op.W: "weight_s"}
    times = {named[op]: [_series(taken, op, stage, plan) for stage in range(plan.num_stages)] for op in needed if op is not Op.R}
    return Costs(**times, **_bytes(traced))  # type: ignore[arg-type]


def _bytes(traced: Timeline) -> dict[str, list[int]]:
    """Return what a timeline says about each stage's bytes."""
    plan, sizes = traced.plan, traced.plan.sizes
    if sizes is None:
        saved = [_saved(traced, stage) for stage in range(plan.num_stages)]
        return {"saved_bytes": saved, "static_bytes": [_static(traced, rank, saved) for rank in plan.stage_ranks]}
    return {
        "saved_bytes": [stage.saved for stage in sizes.stages],
        "movable_bytes": [stage.movable for stage in sizes.stages],
        "output_bytes": [stage.sent for stage in sizes.stages],
        "gradient_bytes": [*(stage.received for stage in sizes.stages[1:]), 0],
        "static_bytes": [sizes.static[rank] // plan.stage_ranks.count(rank) for rank in plan.stage_ranks],
    }


def _worked(timeline: Timeline) -> dict[tuple[Op, int, int], float]:
    """Return the seconds of each computation, with the pieces of one added up."""
    seconds: dict[tuple[Op, int, int], float] = defaultdict(float)
    for rank in range(timeline.num_ranks):
        for action, begin, end in timeline.computations(rank):
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
    """Return the seconds of an operation of a stage, by microbatch."""
    by_microbatch = taken.get((op, stage))
    if not by_microbatch:
        raise ConfigurationError(f"the trace has no {op.value} of stage {stage}: trace a schedule that runs it, on all ranks")
    if by_microbatch.keys() == set(range(plan.num_microbatches)):
        return [median(by_microbatch[microbatch]) for microbatch in range(plan.num_microbatches)]
    return [median(seconds for series in by_microbatch.values() for seconds in series)] * plan.num_microbatches
