"""An order for any flow, where no rule knows one: each rank runs what frees memory first, within a limit of forwards in flight.

The limit is Little's law: the time from a forward to the end of its backward, of a microbatch that is alone, over the rank's time
for each forward. On a chain of stages that is 1F1B.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from bpipe.flow.flow import Flow
from bpipe.plan.action import Action, Op, OpKey
from bpipe.plan.order import UNITS, clock, needs
from bpipe.plan.plan import Plan

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
    tried = [_Greedy(flow, [ceil(limit * share) for limit in limits]).lanes() for share in SHARES]
    spans = [max(start[-1] for start in clock(lanes, flow)[0] if start) for lanes in tried]
    lanes = next(one for one, span in zip(tried, spans) if span <= ABOUT_EQUAL * min(spans))
    return Plan(name=name, flow=flow, actions=tuple(map(tuple, lanes)), served=((),) * num_ranks, slots=(None,) * num_ranks)


class _Greedy:
    """Ranks that each take the first computation that can run: backwards before forwards, earlier microbatches first.

    Args:
        limits: how many forwards each rank may have open; more, where nobody could go on.
    """

    def __init__(self, flow: Flow, limits: list[int]) -> None:
        self.flow, self.limits, self.ended, self.now = flow, limits, dict[OpKey, int](), 0
        self.done: list[list[Action]] = [[] for _ in limits]
        self.free, self.held = [0] * len(limits), [0] * len(limits)
        self.queues: list[list[deque[Action]]] = [[] for _ in limits]  # a stage takes its units in order
        for op in (Op.B, Op.F) if flow.has_backward else (Op.F,):
            for stage, rank in enumerate(flow.stage_ranks):
                self.queues[rank].append(deque(Action(op, stage, unit) for unit in flow.units_of(op, stage)))

    def lanes(self) -> list[list[Action]]:
        ranks = range(len(self.limits))
        while any(queue for queues in self.queues for queue in queues):
            if sum(map(self._take, ranks)):
                continue
            if max(self.free) > self.now:
                self.now = min(end for end in self.free if end > self.now)
            else:
                self.limits[next(rank for rank in ranks if any(map(self._is_ready, self._heads(rank))))] += 1
        return self.done

    def _heads(self, rank: int) -> list[Action]:
        heads = [queue[0] for queue in self.queues[rank] if queue]
        return sorted(heads, key=lambda action: (action.op is Op.F, action.microbatch // self.flow.slices))

    def _is_ready(self, action: Action) -> bool:
        return all(self.ended.get(need, self.now + 1) <= self.now for need in needs(self.flow, action))

    def _take(self, rank: int) -> bool:
        if self.free[rank] > self.now:
            return False
        has_room = self.held[rank] < self.limits[rank] or not self.flow.has_backward
        taken = next((a for a in self._heads(rank) if (has_room or a.op is not Op.F) and self._is_ready(a)), None)
        if taken is None:
            return False
        next(queue for queue in self.queues[rank] if queue and queue[0] == taken).popleft()
        self.done[rank].append(taken)
        self.held[rank] += 1 if taken.op is Op.F else -1
        self.free[rank] = self.ended[taken.op_key] = self.now + UNITS[taken.op]
        return True


def _in_flight(flow: Flow) -> list[int]:
    """Return how many forwards each rank needs open so that it never waits."""
    limits = [1.0] * (1 + max(flow.stage_ranks))
    for turn in range(flow.period if flow.has_backward else 0):
        ends = _ends_alone(flow, turn)
        mine = [[key for key in ends if flow.stage_ranks[key[1]] == rank] for rank in range(len(limits))]
        for rank, keys in enumerate(mine):
            forwards = [key for key in keys if key[0] is Op.F]
            work = sum(UNITS[key[0]] for key in keys)
            spans = [ends[Op.B, stage, unit] - ends[Op.F, stage, unit] + UNITS[Op.F] for _, stage, unit in forwards]
            limits[rank] = max([limits[rank], *(span * len(forwards) / work for span in spans)])
    return list(map(ceil, limits))


def _ends_alone(flow: Flow, turn: int) -> dict[OpKey, int]:
    """Return when the computations of a microbatch end that is alone, and never waits for a rank."""
    ends: dict[OpKey, int] = {}
    units = range(turn * flow.slices, (turn + 1) * flow.slices)
    stages = [flow.stage_of(part, turn) for part in range(len(flow.routes))]
    left = [Action(op, stage, unit) for op in (Op.F, Op.B) for unit in units for stage in stages]
    while left:
        ready = [action for action in left if all(key in ends for key in _all_needs(flow, action))]
        for action in ready:
            ends[action.op_key] = UNITS[action.op] + max([0, *(ends[key] for key in _all_needs(flow, action))])
        left = [action for action in left if action.op_key not in ends]
    return ends


def _all_needs(flow: Flow, action: Action) -> Sequence[OpKey]:
    """Return what a computation comes behind, slices of its microbatch that it takes turns with among them."""
    before = flow.previous(action.op, action.stage)[action.microbatch]
    is_same = before >= 0 and before // flow.slices == action.microbatch // flow.slices
    return [*needs(flow, action), *([(action.op, action.stage, before)] if is_same else [])]
