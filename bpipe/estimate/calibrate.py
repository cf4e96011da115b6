"""Costs from a trace: what each computation and each transfer really took, and the bytes each microbatch really kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from operator import add
from statistics import median
from typing import Any

from bpipe.errors import ConfigurationError
from bpipe.estimate.contention import Times, Worked, beside_s, busy_times, lost_share
from bpipe.estimate.measured_links import Flight, Way, fitted, flights
from bpipe.flow.shaping import without
from bpipe.plan.action import HOST
from bpipe.plan.meter import occupancy
from bpipe.plan.sizes import IN, OUT, StageSizes
from bpipe.schedules import Costs, Link, Op, Plan, Sizes, Timeline
from bpipe.simulator.measured import Measured

__all__ = ["calibrated"]

SECONDS_OF = {Op.F: "forward_s", Op.B: "backward_s", Op.I: "input_s", Op.W: "weight_s"}  # as `Costs` names them
LINKS = ("link", "cross_link", "host_link")

Taken = dict[tuple[Op, int], dict[int, list[Worked]]]  # by operation and stage, then by microbatch


def calibrated(timelines: Sequence[Timeline], plan: Plan, *, nodes: Sequence[int] | None = None) -> Costs:
    """Compute the costs of a plan from measured steps of it, or of another plan over the same stages.

    Each computation takes the median of its steps; if the plan has a different number of microbatches, the median of its
    stage. A whole backward is estimated as the sum of its halves, if the trace has only these; halves are not estimated from a
    whole one. Whole microbatches tell what even slices of them take; slices tell of plans with as many.

    A transfer begins when the later one of its ends is posted, and its link is free. It is complete when a lane stops waiting for
    it: those that no lane waited for tell nothing. All transfers of one kind of link, within a node, between nodes, or to a host
    and from there, give its latency and its bandwidth; its bandwidth alone, if all have the same size. A link stays at its default,
    which is to be free within a node, where the trace cannot tell: no transfer showed, those of a size took less than the ranks'
    clocks may be wrong (`clock_error_s`), the sizes of microbatches are not known, or only the device waits for transfers, as on
    CUDA. Nothing shows in a `Loopback`, whose ranks take turns. `dataclasses.replace` sets a link.

    Computations that do the same, with transfers of their rank in flight and without, tell the slowdown; it is 1, if they do not
    clearly differ. Their seconds are then those without transfers.

    Bytes are those of the traced plan; if that counts slots, those that the step measured. A simulated step of a plan that counts
    slots tells what a rank's memory grows by for each slot that it occupies, and nothing of messages and links.

    Args:
        timelines: measured steps of all ranks; evaluations are left out if the plan trains, and training steps if it evaluates.
        plan: the plan that the costs are for.
        nodes: the node of each rank, as `bpipe.schedules.Costs` takes it; default: all on one.

    Raises:
        ConfigurationError: the trace has no such steps, has other stages, or lacks an operation that the plan needs; or `nodes` has
            not an entry for each rank.
    """
    alike = [timeline for timeline in timelines if timeline.plan.has_backward == plan.has_backward]
    if not alike:
        raise ConfigurationError(f"the trace has no {'training steps' if plan.has_backward else 'evaluations'}: trace some")
    traced = next((timeline for timeline in alike if _sizes(timeline) is not None), alike[0])
    if traced.plan.num_stages != plan.num_stages:
        raise ConfigurationError(
            f"the trace is of {traced.plan.num_stages} stages, and the plan has {plan.num_stages}: trace the stages you plan for"
        )
    if traced.plan.slices != plan.slices:
        if traced.plan.slices > 1:
            raise ConfigurationError(
                f"the trace is of {traced.plan.slices} slices per microbatch, and the plan has {plan.slices}: trace as many, or one"
            )
        return calibrated(alike, replace(plan, flow=without(plan.flow, "slices")), nodes=nodes).of_slices(plan)
    if nodes is not None and len(nodes) != traced.plan.num_ranks:
        raise ConfigurationError(f"nodes has {len(nodes)} entries: give one for each of the {traced.plan.num_ranks} traced ranks")
    steps = [timeline for timeline in alike if timeline.plan.slices == plan.slices]
    ways = [{} if (sizes := _sizes(timeline)) is None else flights(timeline, sizes) for timeline in steps]
    links = {kind: _link(kind, ways, nodes) for kind in LINKS}
    taken: Taken = defaultdict(lambda: defaultdict(list))
    for timeline, of_step in zip(steps, ways):
        busy = busy_times(of_step, {way: links[_kind(way, nodes)] for way in of_step})
        for (op, stage, microbatch), worked in _worked(timeline, busy).items():
            taken[op, stage][microbatch].append(worked)
    lost = lost_share(_same(taken, plan.slices))
    needed = dict.fromkeys(action.op for rank in range(plan.num_ranks) for action in plan.compute(rank) if action.op is not Op.R)
    times = {SECONDS_OF[op]: [_series(taken, op, stage, plan, lost) for stage in range(plan.num_stages)] for op in needed}
    known = {kind: link for kind, link in links.items() if link is not None}
    return Costs(**times, **_bytes(traced), **known, nodes=nodes, slowdown=1 / (1 - lost))  # type: ignore[arg-type]


def _kind(way: Way, nodes: Sequence[int] | None) -> str:
    """Return the kind of link that a transfer takes, as `Costs` names it."""
    if HOST in way:
        return "host_link"
    return "link" if nodes is None or nodes[way[0]] == nodes[way[1]] else "cross_link"


def _link(kind: str, steps: Sequence[Mapping[Way, Sequence[Flight]]], nodes: Sequence[int] | None) -> Link | None:
    return fitted([found for ways in steps for way, found in ways.items() if _kind(way, nodes) == kind])


def _sizes(timeline: Timeline) -> Sizes | None:
    """Return the sizes of a step's microbatches: the plan's, or the measured ones."""
    return timeline.sizes if isinstance(timeline, Measured) else timeline.plan.sizes


def _bytes(traced: Timeline) -> dict[str, list[Any]]:
    """Return what a timeline says about each stage's bytes."""
    plan, sizes = traced.plan, _sizes(traced)
    if sizes is None:
        saved = [_saved(traced, stage) for stage in range(plan.num_stages)]
        return {"saved_bytes": saved, "static_bytes": [_static(traced, rank, saved) for rank in plan.stage_ranks]}
    numbers: dict[str, Callable[[StageSizes], int]] = {
        "saved_bytes": lambda own: own.saved,
        "movable_bytes": lambda own: own.movable,
        "output_bytes": lambda own: own[OUT].num_bytes,
        "gradient_bytes": lambda own: own[IN].num_bytes,
    }
    found: dict[str, list[Any]] = {
        name: [_of_slices(sizes, stage, number) for stage in range(plan.num_stages)] for name, number in numbers.items()
    }
    found["gradient_bytes"] = [*found["gradient_bytes"][1:], 0]  # a stage gets as much as the next one sends back
    return found | {"static_bytes": [sizes.static[rank] // plan.stage_ranks.count(rank) for rank in plan.stage_ranks]}


def _of_slices(sizes: Sizes, stage: int, number: Callable[[StageSizes], int]) -> int | list[int]:
    """Return a number of a stage's sizes, or one for each slice of a microbatch if these differ."""
    numbers = [number(stages[stage]) for stages in sizes.by_unit]
    return numbers if sizes.later_slices else numbers[0]


def _worked(timeline: Timeline, busy: Mapping[int, Times]) -> dict[tuple[Op, int, int], Worked]:
    """Return each computation, but for two side by side, which share their time."""
    found: dict[tuple[Op, int, int], Worked] = defaultdict(lambda: Worked(0.0, 0.0))
    for rank in range(timeline.num_ranks):
        spans = list(timeline.computations(rank))
        pairs = ((one, two) for one, two in pairwise(spans) if timeline.plan.begins_pair(one.action) and two.begin_s < one.end_s)
        beside = {span.action for pair in pairs for span in pair}
        for action, begin, end in spans:
            if action not in beside:
                before = found[action.op_key]
                found[action.op_key] = Worked(
                    before.seconds + end - begin, before.beside_s + beside_s(begin, end, busy.get(rank, []))
                )
    return found


def _same(taken: Taken, slices: int) -> Iterator[list[Worked]]:
    """Yield computations that do the same: of one stage, and of the same slice of each microbatch."""
    for by_microbatch in taken.values():
        for slice_ in range(slices):
            yield [one for unit, some in by_microbatch.items() if unit % slices == slice_ for one in some]


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


def _series(taken: Taken, op: Op, stage: int, plan: Plan, lost: float) -> list[float]:
    """Return the seconds of an operation of a stage, by microbatch, or by slice of all microbatches."""
    by_microbatch = taken.get((op, stage))
    if not by_microbatch:
        if op is Op.B and (Op.I, stage) in taken and (Op.W, stage) in taken:
            return list(map(add, *(_series(taken, half, stage, plan, lost) for half in (Op.I, Op.W))))
        hint = "; bpipe.profile measures halves of backwards, too" if op in (Op.I, Op.W) else ""
        raise ConfigurationError(
            f"the trace has no {op.value} of stage {stage} alone: trace a schedule that runs it, on all ranks, without `overlap`"
            f"{hint}"
        )
    alone = {unit: [one.seconds - lost * one.beside_s for one in some] for unit, some in by_microbatch.items()}
    if alone.keys() == set(range(plan.num_units)):
        return [median(alone[unit]) for unit in range(plan.num_units)]
    by_slice: dict[int, list[float]] = defaultdict(list)
    for unit, seconds in alone.items():
        by_slice[unit % plan.slices] += seconds
    return [median(by_slice[slice_]) for slice_ in range(plan.slices)] * plan.num_microbatches
