"""One rank's list as the balance pass sees it: the memory at each step, and when each microbatch is saved and needed again.

There is an idle step between two consecutive backwards, because that is where a real pipeline waits and a transfer fits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from bpipe.plan.action import BACKWARD, COMPUTE, Action, Op
from bpipe.plan.meter import Meter, occupancy
from bpipe.plan.order import Moments
from bpipe.plan.plan import Plan

__all__: list[str] = []

Which = tuple[int, int]  # stage, microbatch
Part = tuple[int, int, int]  # stage, microbatch, and the part of it; 0 for all


class Stay(NamedTuple):
    """The steps between which a part of a microbatch may be away."""

    saved: int  # the step at which its forward ends
    # the first step before which its eviction (one step) may be complete: the output, in the last part, must have arrived
    leaves: int
    needed: int  # the step before which it must be back


class RankSteps:
    """The steps of one rank: its computations, of which a forward and a backward that run side by side are one step.

    Args:
        static: the amount that the rank always occupies.
        occupied: the amount that it occupies besides, during each of its computations and the transfers after it.
        arrives: the first computation of the rank, by its index, that comes after a microbatch's output has arrived.
    """

    def __init__(self, plan: Plan, rank: int, static: int, occupied: Iterable[int], arrives: Callable[[Which], int]) -> None:
        self.actions = plan.actions[rank]
        self.steps: list[tuple[Action, ...]] = []  # what each computes; nothing if it is idle
        self.occupied: list[int] = []  # what the rank occupies during each step
        self.boundaries: list[int] = []  # the step at which the boundary before each computation begins
        self._plan, self._arrives = plan, arrives
        self._recomputed = plan.recomputed(rank)
        follows_backward = is_beside = False
        for action, bytes_or_slots in zip((action for action in self.actions if action[0] in COMPUTE), occupied):
            self.boundaries.append(len(self.steps))
            is_backward = action[0] in BACKWARD
            if is_beside:  # with the forward, it is one step
                self.steps[-1] += (action,)
                self.occupied[-1] = max(self.occupied[-1], static + bytes_or_slots)
            else:
                if is_backward and follows_backward:
                    self.steps.append(())
                    self.occupied.append(static + bytes_or_slots)
                self.steps.append((action,))
                self.occupied.append(static + bytes_or_slots)
            is_beside, follows_backward = plan.begins_pair(action), is_backward
        self.boundaries.append(len(self.steps))
        self.peak = max(self.occupied, default=static)

    @cached_property
    def stays(self) -> dict[Part, Stay]:
        """The steps between which each part that can move by itself may be away."""
        saved = {part: step for step, parts in enumerate(self.saved) for part in parts}
        return {part: self._stay(part, saved[part], step) for step, parts in enumerate(self.needed) for part in parts}

    def _stay(self, which: Part, saved: int, needed: int) -> Stay:
        stage, microbatch, part = which
        has_output = part in (0, self._plan.num_parts(stage))
        arrived = self.boundaries[self._arrives((stage, microbatch))] if has_output else 0
        return Stay(saved, max(arrived, saved + 2), needed)

    def least_moved(self, limit: int) -> int:
        """Return how much has to move at least to keep the rank within a limit.

        At each step at least the excess is away. Two excesses add up if no part can be away at both steps, because it leaves once.
        """
        until = [0] * (len(self.steps) + 1)  # the last step at which something may be away that may have left by now
        for stay in self.stays.values():
            until[stay.leaves] = max(until[stay.leaves], stay.needed - 2)
        until = list(accumulate(until, max))
        least = [0] * (len(self.steps) + 1)
        for step in reversed(range(len(self.steps))):
            excess = max(0, self.occupied[step] - limit)
            least[step] = max(least[step + 1], excess + least[max(step, until[step]) + 1])
        return least[0]

    @cached_property
    def saved(self) -> list[list[Part]]:
        """The parts that each step saves."""
        return self._parts_of_steps({Op.F})

    @cached_property
    def needed(self) -> list[list[Part]]:
        """The parts that each step needs."""
        return self._parts_of_steps(BACKWARD)

    def _parts_of_steps(self, ops: Collection[Op]) -> list[list[Part]]:
        return [[part for action in actions if action[0] in ops for part in self._parts_of(action)] for actions in self.steps]

    def _parts_of(self, action: Action) -> list[Part]:
        """Return the parts that a forward saves, or that a backward needs.

        A recomputed microbatch has no parts that could move: its first forward keeps only the input.
        """
        _, stage, microbatch, *_ = action
        if (stage, microbatch) in self._recomputed:
            return []
        num_parts = self._plan.num_parts(stage)
        if num_parts <= 1:
            return [(stage, microbatch, 0)]
        return [(stage, microbatch, k) for k in range(1, num_parts + 1)]


def steps_of(plan: Plan, finished: Plan, times: tuple[Sequence[array[int]], Moments]) -> list[RankSteps]:
    """Return the steps of every rank of a plan of computations.

    Args:
        plan: without messages.
        finished: the plan with messages, which count in bytes.
        times: when the computations start, as `clock_of` returns them.
    """
    begins, moments = times
    static = (0,) * plan.num_ranks if plan.sizes is None else plan.sizes.static
    arrival = partial(_arrival, plan, moments)
    return [
        RankSteps(plan, rank, static[rank], _occupied_during(lane, plan.meter()), partial(arrival, begins[rank]))
        for rank, lane in enumerate(plan.actions if plan.sizes is None else finished.actions)
    ]


def _arrival(plan: Plan, moments: Moments, begins: array[int], which: Which) -> int:
    """Return the index of the rank's first computation after a microbatch's output is used, in the one order of all ranks."""
    stage, microbatch = which
    behind = plan.neighbour(stage, +1)
    if behind is None:
        return 0
    moment = moments.of(Op.F, behind)[microbatch]
    return bisect_right(begins, moment - (plan.stage_ranks[behind] < plan.stage_ranks[stage]))


def _occupied_during(lane: Sequence[Action], meter: Meter) -> Iterator[int]:
    """Yield the amount occupied from each computation to the next one; the first includes the actions before it."""
    occupied = list(occupancy(lane, meter))
    of_values = meter.held(lane)[0]
    starts = [index for index, action in enumerate(lane) if action[0] in COMPUTE]
    for first, end in pairwise([0, *starts[1:], len(lane)] if starts else ()):
        # Half a backward may leave more than it needed.
        left = occupied[end] - meter.change(lane[end])[0] - of_values.get(end, 0) if end < len(lane) else 0
        yield max(left, occupied[first] if first + 1 == end else max(occupied[first:end]))
