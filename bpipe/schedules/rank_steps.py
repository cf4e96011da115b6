"""One rank's list as the balance pass sees it: what it holds at each step, and when each microbatch comes and must be back.

Between two consecutive backwards stands an idle step, because that is where a real pipeline waits and a transfer fits.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from bpipe.schedules.action import BACKWARD, COMPUTE, Action, Op
from bpipe.schedules.communicate import communicate
from bpipe.schedules.meter import Meter, occupancy
from bpipe.schedules.order import Moments, clock, num_microbatches_of
from bpipe.schedules.plan import Plan

__all__: list[str] = []

Which = tuple[int, int]  # stage, microbatch
Part = tuple[int, int, int]  # and the part of it


@dataclass(slots=True)
class RankSteps:
    """The steps of one rank.

    Args:
        actions: its list, computations and whatever else stands between them.
        steps: the computations in order; None for an idle step.
        level: what the rank occupies during each step, messages under way included.
        forward: the step at which the forward of each part's microbatch ends; part 0 is all of it.
        backward: the step before which it must be back.
        leaves: the first step before which its eviction may be complete. The output lies in the last part, and must have
            arrived where it is used.
        times: when each step begins, in seconds from the step's start, where a cost model says it.
    """

    actions: Sequence[Action]
    steps: list[Action | None]
    level: list[int]
    forward: dict[Part, int]
    backward: dict[Part, int]
    leaves: dict[Part, int]
    times: list[float] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return max(self.level, default=0)


def steps_of(plan: Plan) -> list[RankSteps]:
    """The steps of every rank of a plan of computations.

    Raises:
        PlanError: the computations wait for each other in a circle.
    """
    lanes = [plan.compute(rank) for rank in range(plan.num_ranks)]
    begins = clock(lanes, plan.num_stages)
    moments = Moments(plan.num_stages, num_microbatches_of(lanes, plan.num_stages))
    for lane, starts in zip(lanes, begins):
        for action, start in zip(lane, starts):
            if action[0] is Op.F:
                moments[action[:3]] = start
    with_messages = plan if plan.sizes is None else communicate(plan)
    return [
        _rank_steps(plan, lane, levels(with_messages.actions[rank], plan.meter()), _Arrivals(plan, rank, begins[rank], moments))
        for rank, lane in enumerate(plan.actions)
    ]


@dataclass(slots=True)
class _Arrivals:
    """When what a rank makes has arrived where it is used."""

    plan: Plan
    rank: int
    begins: array[int]
    moments: Moments

    def boundary(self, which: Which) -> int:
        """The first computation of the rank, by its index, that comes after the output's use in the one order of all."""
        stage, microbatch = which
        if stage + 1 == self.plan.num_stages:
            return 0
        moment = (self.moments[Op.F, stage + 1, microbatch], self.plan.stage_ranks[stage + 1])
        return bisect_right(self.begins, moment[0] - (moment[1] < self.rank))


def _rank_steps(plan: Plan, actions: Sequence[Action], level: list[int], arrivals: _Arrivals) -> RankSteps:
    rank = RankSteps(actions, [], [], {}, {}, {})
    boundaries: list[int] = []  # the step at which the boundary before each computation begins
    for action, occupied in zip((action for action in actions if action.op in COMPUTE), level):
        if not plan.goes_on(action):
            boundaries.append(len(rank.steps))
            previous = rank.steps[-1] if rank.steps else None
            if previous is not None and previous.op in BACKWARD and action.op in BACKWARD:
                rank.steps.append(None)
                rank.level.append(occupied)
        places = rank.forward if action.op is Op.F else rank.backward if action.op in BACKWARD else {}
        for part in _parts(plan, action):
            places[*action[1:3], part] = len(rank.steps)
        rank.steps.append(action)
        rank.level.append(occupied)
    boundaries.append(len(rank.steps))
    for (stage, microbatch, part), step in rank.forward.items():
        has_output = part in (0, plan.num_parts(stage))
        arrived = boundaries[arrivals.boundary((stage, microbatch))] if has_output else 0
        rank.leaves[stage, microbatch, part] = max(arrived, step + 1)
    return rank


def _parts(plan: Plan, action: Action) -> Sequence[int]:
    """The parts that a computation saves or needs: a piece of a backward its own, a whole one, or a forward when it ends, all."""
    is_piece = action.part and action.op in BACKWARD
    return (action.part,) if is_piece else range(max(1, plan.num_parts(action.stage)) + 1)


def levels(lane: Sequence[Action], meter: Meter) -> list[int]:
    """What is occupied from each computation to the transfers before the next one."""
    result: list[int] = []
    before = 0
    for action, occupied in zip(lane, occupancy(lane, meter)):
        if action.op in COMPUTE:
            result.append(max(occupied, before) if not result else occupied)
        elif result:
            result[-1] = max(result[-1], occupied)
        else:
            before = max(before, occupied)
    return result
