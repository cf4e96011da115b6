"""Measured timelines, with their place in a trace, how wrong the clocks can be, and the devices' times."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isnan

from bpipe.errors import ConfigurationError
from bpipe.plan.action import COMPUTE, MIRROR, Action
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes, StageSizes
from bpipe.simulator.timeline import Lane, Span, Timeline

__all__ = ["Measured", "typical"]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Measured(Timeline):
    """One step as it ran. The lanes of ranks that were not recorded here are empty.

    Args:
        began_s: when the step's first action began, in seconds since the trace did.
        device: on CUDA, when the device ran each computation of a rank, an entry for each of `computed(plan, rank)`; else empty.
        clock_error_s: how wrong the clock of each rank can be against rank 0 of the group.
        stage_sizes: what a microbatch took on each stage of the ranks here, one entry for each slice of it; empty for an
            evaluation.

    The lanes have the host's times: on CUDA they say when a computation was queued, and `device` says when it ran.
    """

    began_s: float
    device: tuple[Lane, ...]
    clock_error_s: tuple[float, ...]
    stage_sizes: Mapping[int, tuple[StageSizes, ...]] = field(default_factory=dict)

    @property
    def sizes(self) -> Sizes | None:
        """The plan's sizes or, if it counts slots, the measured ones; None if those of a stage are not known."""
        plan = self.plan
        if plan.sizes is not None or len(self.stage_sizes) < plan.num_stages:
            return plan.sizes
        sizes = Sizes.of_slices(zip(*(self.stage_sizes[stage] for stage in range(plan.num_stages))), static=(0,) * plan.num_ranks)
        return replace(sizes, static=tuple(self._static_bytes(rank, sizes) for rank in range(plan.num_ranks)))

    def _static_bytes(self, rank: int, sizes: Sizes) -> int:
        """Return a rank's bytes other than its own microbatches, messages and its buffers for remote activations."""
        lane, buffers = self.actions[rank], self.plan.remote_buffers(rank, sizes.moved)
        return max(0, lane.static_bytes + lane.remote_buffer_bytes - sum(map(sum, buffers.values())))

    def computations(self, rank: int) -> Iterator[Span]:
        """Return the forwards and backwards of a rank: when the device ran them if that was measured, else when the host did."""
        lane = self.device[rank]
        if not lane.begin_s:
            return Timeline.computations(self, rank)
        return map(Span, computed(self.plan, rank), lane.begin_s, lane.end_s)

    def span_s(self, rank: int) -> tuple[float, float]:
        """Return when a rank's first computation began and its last one ended, on the device if that was measured."""
        lane = self.device[rank]
        return (lane.begin_s[0], lane.end_s[-1]) if lane.begin_s else Timeline.span_s(self, rank)


def computed(plan: Plan, rank: int) -> list[Action]:
    """Return the computations of a rank in order."""
    return [action for action in plan.actions[rank] if action.op in COMPUTE]


def typical(timelines: Sequence[Timeline]) -> Timeline:
    """Return the training step of median length, or the evaluation of median length if there are no training steps.

    Raises:
        ConfigurationError: there is none.
    """
    steps = [timeline for timeline in timelines if timeline.plan.has_backward] or timelines
    if not steps:
        raise ConfigurationError("the trace has no steps: run some inside the `with` block")
    return sorted(steps, key=lambda timeline: timeline.makespan_s)[(len(steps) - 1) // 2]


def merged(parts: Sequence[Measured]) -> Measured:
    """Merge the parts of one step that several ranks recorded."""
    first = parts[0]
    owner: dict[int, Measured] = {}
    for part in parts:
        if (part.step, part.plan) != (first.step, first.plan):
            raise ConfigurationError(f"these are parts of different steps: {_told(first)} and {_told(part)}")
        for rank in part.ranks:
            if rank in owner:
                raise ConfigurationError(f"rank {rank} is there twice in step {first.step}")
            owner[rank] = part
    missing = [rank for rank in range(first.num_ranks) if rank not in owner]
    if missing:
        raise ConfigurationError(f"step {first.step} has no times of rank {', '.join(map(str, missing))} of {first.num_ranks}")
    began_s = min(part.began_s for part in parts)
    ranks = range(first.num_ranks)
    actions = tuple(_later(owner[rank].actions[rank], owner[rank].began_s - began_s) for rank in ranks)
    served = tuple(_later(owner[rank].served[rank], owner[rank].began_s - began_s) for rank in ranks)
    return Measured(
        plan=first.plan,
        actions=actions,
        served=_with_evictors(first.plan, actions, served),
        device=tuple(_later(owner[rank].device[rank], owner[rank].began_s - began_s) for rank in ranks),
        source="measured",
        step=first.step,
        began_s=began_s,
        clock_error_s=tuple(owner[rank].clock_error_s[rank] for rank in ranks),
        stage_sizes={stage: sizes for part in parts for stage, sizes in part.stage_sizes.items()},
    )


def _with_evictors(plan: Plan, actions: Sequence[Lane], served: Sequence[Lane]) -> tuple[Lane, ...]:
    """Fill served lanes in with the times of evictors that reach the memory by themselves: the two ends are one copy."""
    return tuple(
        lane if lane.begin_s and not any(map(isnan, lane.begin_s)) else _mirrored(plan, rank, actions, lane)
        for rank, lane in enumerate(served)
    )


def _mirrored(plan: Plan, rank: int, actions: Sequence[Lane], lane: Lane) -> Lane:
    begin_s, end_s = array("d", lane.begin_s), array("d", lane.end_s)
    evictors = {action.peer for action in plan.served[rank] if action.peer is not None}
    times = {
        (peer, MIRROR[action.op], *action.part_key): (begin, end)
        for peer in evictors
        for action, begin, end in zip(plan.actions[peer], actions[peer].begin_s, actions[peer].end_s)
        if action.peer == rank and action.op in MIRROR
    }
    for index, action in enumerate(plan.served[rank]):
        if isnan(begin_s[index]):
            begin_s[index], end_s[index] = times[(action.peer or 0, action.op, *action.part_key)]
    return replace(lane, begin_s=begin_s, end_s=end_s)


def _told(part: Measured) -> str:
    return f"step {part.step} of {part.plan.name} with {part.plan.num_ranks} ranks"


def _later(lane: Lane, seconds: float) -> Lane:
    return replace(
        lane,
        begin_s=array("d", [begin + seconds for begin in lane.begin_s]),
        end_s=array("d", [end + seconds for end in lane.end_s]),
        filled_s=array("d", [second + seconds for second in lane.filled_s]),
    )
