"""Costs from a trace: what each computation really took, and what each microbatch really kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from bpipe.errors import ConfigurationError
from bpipe.schedules import Costs, Link, Op, Plan, Timeline
from bpipe.schedules.plan import occupancy

__all__ = ["calibrated"]

Taken = dict[tuple[Op, int], dict[int, list[float]]]  # seconds by operation and stage, then by microbatch


def calibrated(
    timelines: Sequence[Timeline],
    plan: Plan,
    *,
    link: Link | None = None,
    cross_link: Link | None = None,
    nodes: Sequence[int] | None = None,
    slowdown: float = 1.0,
) -> Costs:
    """The costs of a plan as measured on steps of it, or of another plan over the same stages.

    Each computation takes the median of its steps; where the plan has another number of microbatches, the median of its
    stage. A microbatch keeps what a rank's memory grows by for each slot that it occupies. Links are not in a trace: what a
    transfer takes there includes waiting for its other end.

    Args:
        timelines: measured steps, all ranks.
        plan: what the costs are for.
        link: between ranks of one node; default: instant.
        cross_link: between nodes.
        nodes: the node of each rank.
        slowdown: of computations while a transfer runs.

    Raises:
        ConfigurationError: the trace is of other stages, or lacks an operation that the plan needs.
    """
    if not timelines or timelines[0].plan.num_stages != plan.num_stages:
        seen = timelines[0].plan.num_stages if timelines else 0
        raise ConfigurationError(
            f"the trace is of {seen} stages, and the plan has {plan.num_stages}: trace the stages you plan for"
        )
    taken: Taken = defaultdict(lambda: defaultdict(list))
    for timeline in timelines:
        for rank in range(timeline.num_ranks):
            for action, begin, end in timeline.computations(rank):
                taken[action.op, action.stage][action.microbatch].append(end - begin)
    needed = dict.fromkeys(action.op for rank in range(plan.num_ranks) for action in plan.compute(rank))
    named = {Op.F: "forward_s", Op.B: "backward_s", Op.I: "input_s", Op.W: "weight_s"}
    times = {named[op]: [_series(taken, op, stage, plan) for stage in range(plan.num_stages)] for op in needed}
    traced = timelines[0]
    saved = [_saved(traced, rank) for rank in traced.plan.stage_ranks]
    return Costs(
        **times,  # type: ignore[arg-type]
        saved_bytes=saved,
        static_bytes=[_static(traced, rank, saved) for rank in traced.plan.stage_ranks],
        link=link or Link(),
        cross_link=cross_link,
        nodes=nodes,
        slowdown=slowdown,
    )


def _saved(timeline: Timeline, rank: int) -> int:
    """The bytes of a slot: what a rank holds beyond its idle bytes when it occupies the most."""
    lane = timeline.actions[rank]
    slots, live = max(zip(occupancy(timeline.plan.actions[rank]), lane.live_bytes), default=(0, 0))
    return (live - lane.idle_bytes) // slots if slots else 0


def _static(timeline: Timeline, rank: int, saved: Sequence[int]) -> int:
    """A stage's share of what a rank holds besides microbatches and the rooms for its guests."""
    chains = timeline.plan.chains(rank).values()
    rooms = sum(max(occupancy(chain, lambda action: saved[action.stage]), default=0) for chain in chains)
    return max(0, timeline.actions[rank].idle_bytes - rooms) // timeline.plan.stage_ranks.count(rank)


def _series(taken: Taken, op: Op, stage: int, plan: Plan) -> list[float]:
    """Seconds of an operation of a stage, by microbatch."""
    by_microbatch = taken.get((op, stage))
    if not by_microbatch:
        raise ConfigurationError(f"the trace has no {op.value} of stage {stage}: trace a schedule that runs it, on all ranks")
    if by_microbatch.keys() == set(range(plan.num_microbatches)):
        return [median(by_microbatch[microbatch]) for microbatch in range(plan.num_microbatches)]
    return [median(seconds for series in by_microbatch.values() for seconds in series)] * plan.num_microbatches
