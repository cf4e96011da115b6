"""One rank's list as the balance pass sees it: the memory at each step, and when each microbatch is saved and needed again.

There is an idle step between two consecutive backwards, because that is where a real pipeline waits and a transfer fits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from bpipe.passes.communicate import communicate
from bpipe.plan.action import BACKWARD, COMPUTE, Action, Op
from bpipe.plan.meter import Meter, occupancy
from bpipe.plan.order import Moments, clock, num_microbatches_of
from bpipe.plan.plan import Plan

__all__: list[str] = []

Which = tuple[int, int]  # stage, microbatch
Part = tuple[int, int, int]  # stage, microbatch, and the part of it; 0 for all


class Stay(NamedTuple):
    """The steps between which a part of a microbatch may be away.

    Args:
        saved: the step at which its forward ends.
        leaves: the first step before which its eviction, which takes one step, may be complete. The output lies in the last part,
            and must have arrived where it is used.
        needed: the step before which it must be back.
    """

    saved: int
    leaves: int
    needed: int


class RankSteps:
    """The steps of one rank.

    Args:
        plan: a plan of computations.
        rank: the rank.
        static: the amount that the rank always occupies.
        occupied: the amount that it occupies besides, during each of its computations and the transfers after it.
        arrives: the first computation of the rank, by its index, that comes after a microbatch's output has arrived.
    """

    def __init__(self, plan: Plan, rank: int, static: int, occupied: Iterable[int], arrives: Callable[[Which], int]) -> None:
        self.actions = plan.actions[rank]
        self.steps: list[Action | None] = []  # the computations in order; None for an idle step
        self.occupied: list[int] = []  # the amount that the rank occupies during each step
        self._plan, self._static, self._arrives = plan, static, arrives
        self._recomputed = plan.recomputed(rank)
        self._boundaries: list[int] = []  # the step at which the boundary before each whole computation begins
        for action, bytes_or_slots in zip((action for action in self.actions if action.op in COMPUTE), occupied):
            if not (action.part and plan.goes_on(action)):
                self._boundaries.append(len(self.steps))
                previous = self.steps[-1] if self.steps else None
                if previous is not None and previous.op in BACKWARD and action.op in BACKWARD:
                    self._append(None, bytes_or_slots)
            self._append(action, bytes_or_slots)
        self._boundaries.append(len(self.steps))
        self.is_in_pieces = any(action.part for action in self.actions if action.op in COMPUTE)
        self.peak = max(self.occupied, default=static)

    def _append(self, step: Action | None, occupied: int) -> None:
        self.steps.append(step)
        self.occupied.append(self._static + occupied)

    @cached_property
    def stays(self) -> dict[Part, Stay]:
        """The steps between which each part that can move by itself may be away."""
        saved: dict[Which, int] = {}
        stays: dict[Part, Stay] = {}
        for step, action in enumerate(self.steps):
            if action is not None and action.op is Op.F:
                saved[action[1:3]] = step
            elif action is not None and action.op in BACKWARD:
                for part in self.parts_of(action):
                    stays[part] = self._stay(part, saved[action[1:3]], step)
        return stays

    def _stay(self, which: Part, saved: int, needed: int) -> Stay:
        stage, microbatch, part = which
        has_output = part in (0, self._plan.num_parts(stage))
        arrived = self._boundaries[self._arrives((stage, microbatch))] if has_output else 0
        return Stay(saved, max(arrived, saved + 2), needed)

    def parts_of(self, action: Action) -> list[Part]:
        """Return the parts that a forward saves (none before its last piece), or that a backward needs (a piece only its own).

        A recomputed microbatch has no parts that could move: its first forward keeps only the input.
        """
        _, stage, microbatch, part, _ = action
        if (stage, microbatch) in self._recomputed:
            return []
        if part and action.op is not Op.F:
            return [(stage, microbatch, part if self._plan.num_parts(stage) > 1 else 0)]
        if action.op is Op.F and not self._plan.ends(action):
            return []
        num_parts = self._plan.num_parts(stage)
        return [(stage, microbatch, k) for k in range(1, num_parts + 1)] if num_parts > 1 else [(stage, microbatch, 0)]


def steps_of(plan: Plan) -> list[RankSteps]:
    """Return the steps of every rank of a plan of computations.

    Raises:
        PlanError: the computations wait for each other in a cycle.
    """
    lanes = [plan.compute(rank) for rank in range(plan.num_ranks)]
    begins = clock(lanes, plan.num_stages)
    moments = Moments(plan.num_stages, num_microbatches_of(lanes, plan.num_stages))
    moments.record(lanes, begins)
    static = (0,) * plan.num_ranks if plan.sizes is None else plan.sizes.static
    with_messages = plan if plan.sizes is None else communicate(plan)
    return [
        RankSteps(plan, rank, static[rank], _occupied_during(lane, plan.meter()), _Arrivals(plan, rank, begins[rank], moments))
        for rank, lane in enumerate(with_messages.actions)
    ]


class _Arrivals:
    """The times at which a rank's outputs have arrived where they are used."""

    def __init__(self, plan: Plan, rank: int, begins: array[int], moments: Moments) -> None:
        self._ranks, self._rank, self._begins, self._moments = plan.stage_ranks, rank, begins, moments

    def __call__(self, which: Which) -> int:
        """Return the index of the rank's first computation that comes after the output's use in the one order of all ranks."""
        stage, microbatch = which
        if stage + 1 == len(self._ranks):
            return 0
        moment = self._moments.of(Op.F, stage + 1)[microbatch]
        return bisect_right(self._begins, moment - (self._ranks[stage + 1] < self._rank))


def _occupied_during(lane: Sequence[Action], meter: Meter) -> Iterator[int]:
    """Yield the amount occupied from each computation to the next one; the first includes the actions before it."""
    occupied = list(occupancy(lane, meter))
    starts = [index for index, action in enumerate(lane) if action.op in COMPUTE]
    for first, end in pairwise([0, *starts[1:], len(lane)] if starts else ()):
        left = occupied[end] - meter.taken(lane[end]) if end < len(lane) else 0  # I may leave more memory than it needed
        yield max(left, *occupied[first:end])
