"""An order for any flow, where no rule knows one: each rank runs what frees memory first, within a limit of forwards in flight.

The limit is Little's law: the time from a forward to the end of its backward, of a microbatch that is alone, over the rank's time
for each forward. On a chain of stages that is 1F1B.
"""

from __future__ import annotations

from math import ceil, inf

from bpipe.flow.flow import Flow
from bpipe.plan.action import Action, Op
from bpipe.plan.order import UNITS, clock
from bpipe.plan.plan import Plan
from bpipe.schedules.list_scheduling import Timed, TimedRank, greedy_order

__all__: list[str] = []

SHARES = (1, 1.25, 1.5, 2, 3)  # of the limits that are tried
ABOUT_EQUAL = 1.02  # times the shortest span


def computations_for(flow: Flow, name: str = "any_flow") -> Plan:
    """Return the computations of a flow in an order that works: of about equally fast ones, that with the fewest in flight.

    Example:
        >>> from bpipe.flow.shaping import shaped
        >>> from bpipe.schedules import build
        >>> plan = computations_for(shaped(None, "chain", (0, 1, 2, 3), 8))
        >>> [plan.compute(rank) == build("1f1b", 4, 8).compute(rank) for rank in range(4)]
        [True, True, True, True]
    """
    num_ranks, limits = 1 + max(flow.stage_ranks), _in_flight(flow)
    tried = [_within(flow, [ceil(limit * share) for limit in limits]) for share in SHARES if flow.has_backward]
    tried = [lanes for lanes in tried if sum(map(len, lanes)) == flow.num_units * len(flow.nodes)]
    tried = tried or [_within(flow, [inf] * num_ranks)]
    spans = [max(start[-1] for start in clock(lanes, flow)[0] if start) for lanes in tried]
    lanes = next(one for one, span in zip(tried, spans) if span <= ABOUT_EQUAL * min(spans))
    return Plan(name=name, flow=flow, actions=tuple(map(tuple, lanes)), served=((),) * num_ranks, slots=(None,) * num_ranks)


def _within(flow: Flow, limits: list[float]) -> list[list[Action]]:
    """Return what ranks run with so many forwards open: backwards before forwards, earlier microbatches first."""
    timed: list[list[Timed]] = [[] for _ in limits]
    for stage, rank in enumerate(flow.stage_ranks):
        for op in (Op.B, Op.F) if flow.has_backward else (Op.F,):
            behind = flow.num_microbatches if op is Op.F else 0
            timed[rank] += [(behind + unit // flow.units, Action(op, stage, unit)) for unit in flow.units_of(op, stage)]
    return greedy_order(list(map(TimedRank, timed)), flow, limits)


def _in_flight(flow: Flow) -> list[float]:
    """Return how many forwards each rank needs open so that it never waits."""
    limits = [1.0] * (1 + max(flow.stage_ranks))
    if not flow.has_backward:
        return limits
    alone: list[list[Action]] = []  # a lane for each computation of a microbatch, so that none waits for a rank
    for turn in range(flow.period):
        units = flow.units.of(turn)
        for stage in (flow.stage_of(part, turn) for part in range(len(flow.routes))):
            alone += [[Action(Op.F, stage, unit) for unit in units], [Action(Op.B, stage, unit) for unit in reversed(units)]]
    _, begins = clock(alone, flow)
    for _, stage, unit, *_ in (action for lane in alone for action in lane):
        span = begins.of(Op.B, stage)[unit] + UNITS[Op.B] - begins.of(Op.F, stage)[unit]
        rank = flow.stage_ranks[stage]
        limits[rank] = max(limits[rank], span / (UNITS[Op.F] + UNITS[Op.B]))
    return limits
