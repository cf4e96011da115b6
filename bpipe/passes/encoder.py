"""An encoder in front of a model: its forwards and backwards on one rank, in the time in which that rank waits.

Its pieces are stages of their own before the model's first one, so a plan proves, simulates, draws and runs them like any others.
What this pass decides is when they run: each forward before the model's first stage needs it, and earlier where the rank would
wait; each backward after the gradient has come, and later where the rank would not wait. In front of 1F1B with p = 2 and m = 3, an
encoder of one piece, which is stage 0:

rank 0 | 0F0 1F0 0F1 1F1 0F2 1B0 1b0 1F2 1B1 1b1 0B0 0b0 1B2 1b2 0B1 0b1 0B2 0b2
rank 1 | ..  ..  2F0 2B0 2b0 2F1 2B1 2b1 2F2 2B2 2b2 ..  ..  ..  ..  ..  ..  ..
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import chain
from math import inf

from bpipe.checks import is_count
from bpipe.errors import ConfigurationError
from bpipe.flow.shaping import with_other
from bpipe.passes.communicate import communicate, computations_only
from bpipe.plan.action import BACKWARD, Action, Op
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulate

__all__: list[str] = []

_Result = tuple[bool, int, int]  # whether of a forward, its stage and microbatch

ROUNDING = 1e-9  # share of a piece by which a gap may be too short for it


def with_encoder(plan: Plan, pieces: int, costs: Costs, *, rank: int = 0, most: int | None = None) -> Plan:
    """Return the computations of a plan in front of which an encoder runs, in the gaps of one rank; never slower than around it.

    Args:
        plan: of the model, of whole microbatches in one direction; its transfers and evictions are left out.
        pieces: e, the pieces of the encoder, one after the other: they become stages 0 to e-1, and the plan's stages follow.
        costs: of all e + p stages.
        rank: which runs the encoder.
        most: the most microbatches that the encoder holds at a time, from its forward to its backward; default: no limit. The
            model's first stage holds as many as its plan says, and the encoder no fewer.

    Raises:
        ConfigurationError: the plan has slices, two directions or skips, `pieces` or `rank` is not valid, the costs do not fit, or
            with `most` microbatches the model's first stage would wait for ever.

    Example:
        >>> from bpipe.schedules import build, finish
        >>> costs = Costs(forward_s=[0.1, 0.2, 1.0, 1.0, 1.0, 1.0])  # two pieces of the encoder, four stages
        >>> finish(with_encoder(build("1f1b", 4, 8), pieces=2, costs=costs)).stages_of(0)
        [0, 1, 2]
    """
    if len(plan.flow.shapes) > 1 or plan.overlapped or not plan.has_backward:
        raise ConfigurationError("an encoder takes a training plan of whole microbatches through a chain of stages, without pairs")
    if not is_count(pieces) or not 0 <= rank < plan.num_ranks:
        raise ConfigurationError(
            f"pieces={pieces!r}, rank={rank!r}: give at least one piece, and one of the plan's {plan.num_ranks} ranks"
        )
    base = computations_only(plan)
    lanes = [[action._replace(stage=action.stage + pieces) for action in lane] for lane in base.actions]
    whole = replace(
        base,
        name=f"{plan.name}/encoder",
        flow=with_other(plan.flow, stage_ranks=(rank,) * pieces + plan.stage_ranks),
        actions=((),) * plan.num_ranks,
        sizes=None,
        budgets=None,
    )
    costs.check(whole)
    found = [_Placing(lanes, pieces, costs, rank, most, overruns=overruns).lanes() for overruns in (False, True)]
    if rank == plan.stage_ranks[0]:
        found.append(_around(lanes, pieces, rank))
    plans = [replace(whole, actions=tuple(map(tuple, one))) for one in found]
    return min(plans, key=lambda one: simulate(communicate(one), costs).makespan_s)


def _around(lanes: Sequence[Sequence[Action]], pieces: int, rank: int) -> list[list[Action]]:
    """Return lanes in which the encoder runs right before and behind the model's first stage."""
    around: list[Action] = []
    for action in lanes[rank]:
        if action.op is Op.F and action.stage == pieces:
            around += [Action(Op.F, stage, action.microbatch) for stage in range(pieces)]
        around.append(action)
        if action.op in BACKWARD and action.stage == pieces:
            around += [Action(Op.B, stage, action.microbatch) for stage in range(pieces - 1, -1, -1)]
    return [around if index == rank else list(lane) for index, lane in enumerate(lanes)]


class _Placing:
    """All lanes side by side in time, as far as computations decide it: the encoder's take their places where a rank waits.

    Args:
        lanes: the model's computations.
        overruns: whether they take a place in which they do not fit.
    """

    def __init__(
        self, lanes: Sequence[Sequence[Action]], pieces: int, costs: Costs, rank: int, most: int | None, *, overruns: bool
    ) -> None:
        self._lanes, self._pieces, self._costs, self._rank, self._overruns = lanes, pieces, costs, rank, overruns
        self._most = inf if most is None else most
        self._m = 1 + max(action.microbatch for lane in lanes for action in lane)
        self._last = max(action.stage for lane in lanes for action in lane)
        self._ends: dict[_Result, float] = {}
        self._chosen: list[list[Action]] = [[] for _ in lanes]
        self._next = [0] * len(lanes)
        self._forwards, self._backwards = deque(self._of_encoder(Op.F)), deque(self._of_encoder(Op.B))

    def _of_encoder(self, op: Op) -> Iterator[Action]:
        stages = range(self._pieces) if op is Op.F else range(self._pieces - 1, -1, -1)
        return (Action(op, stage, microbatch) for microbatch in range(self._m) for stage in stages)

    def lanes(self) -> list[list[Action]]:
        """Let the rank that is free first choose, again and again."""
        free = [(0.0, rank) for rank in range(len(self._lanes))]
        waiting: dict[_Result | None, set[int]] = defaultdict(set)
        while free:
            now, rank = heappop(free)
            if (action := self._choose(rank, now)) is None:
                if (awaited := self._awaited(rank)) is None:
                    continue
                ready = self._ready_s(awaited)
                if ready is None:
                    waiting[self._needed(awaited)].add(rank)
                elif ready > now:
                    heappush(free, (ready, rank))
                continue
            self._chosen[rank].append(action)
            end = now + self._costs.seconds(*action.op_key)
            heappush(free, (end, rank))
            if action.op is not Op.W:
                result = action.op is Op.F, action.stage, action.microbatch
                self._ends[result] = end
                for other in waiting.pop(result, ()):
                    heappush(free, (end, other))
        if self._forwards or self._backwards or any(self._own(rank) is not None for rank in range(len(self._lanes))):
            raise ConfigurationError(
                f"most={self._most}: the encoder holds a microbatch as long as the model's first stage does, or longer: give more"
            )
        return self._chosen

    def _needed(self, action: Action) -> _Result | None:
        """Return the result that an action needs: of the forward of the stage before, or of the backward of the one behind."""
        if action.op is Op.F:
            return None if action.stage == 0 else (True, action.stage - 1, action.microbatch)
        if action.op in BACKWARD and action.stage < self._last:
            return False, action.stage + 1, action.microbatch
        return None  # only what stands before it in its lane

    def _own(self, rank: int) -> Action | None:
        """Return the next action of the model on a rank."""
        lane, position = self._lanes[rank], self._next[rank]
        return lane[position] if position < len(lane) else None

    def _ready_s(self, action: Action) -> float | None:
        """Return when an action can begin; None if what it needs has not begun."""
        needed = self._needed(action)
        return 0.0 if needed is None else self._ends.get(needed)

    def _awaited(self, rank: int) -> Action | None:
        """Return what a rank runs next if it runs nothing now."""
        own = self._own(rank)
        return own if own is not None or rank != self._rank else next(chain(self._forwards, self._backwards), None)

    def _choose(self, rank: int, now: float) -> Action | None:
        """Return what a rank runs now; None if it waits."""
        own = self._own(rank)
        ready = inf if own is None else self._ready_s(own)
        if own is not None and ready is not None and ready <= now:
            self._next[rank] += 1
            return own
        for queue in (self._forwards, self._backwards) if rank == self._rank else ():
            if queue and self._has_room(queue[0]) and (begin := self._ready_s(queue[0])) is not None and begin <= now:
                end = now + self._costs.seconds(*queue[0].op_key) * (1 - ROUNDING)
                if self._overruns or ready is None or end <= ready:
                    return queue.popleft()
        return None

    def _has_room(self, action: Action) -> bool:
        """Return whether the encoder may hold the microbatch of an action."""
        is_new = action.op is Op.F and action.stage == 0
        return not is_new or action.microbatch - self._backwards[0].microbatch < self._most
