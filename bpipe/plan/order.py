"""Orders of events: the clock of the computations, and one global order of all actions of a plan.

`clock` and `run_in_time` make and time orders. `run_greedily` proves them, and shares only the flow with these.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.flow.flow import Flow, Node
from bpipe.plan.action import HOST, Action, MicrobatchKey, Op, OpKey
from bpipe.plan.plan_data import PlanData
from bpipe.plan.roles import LINKED, Roles

__all__ = ["Moments", "Stuck", "clock", "linearise", "run_greedily"]


UNKNOWN, EXPECTED = -1, -2  # the moment of a result that does not exist yet, and of one for which a rank waits
MOST_TOLD = 8  # ranks, in an error
UNITS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1, Op.R: 1}


# The results that others wait for: I stands for the whole backward.
RESULT = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B, Op.W: Op.W, Op.R: Op.R}
OF_ITSELF = {Op.W: Op.B, Op.R: Op.F}  # what a computation needs that is the rest, or the repetition, of another one of its stage


def backward_units(num_microbatches: int, k: int) -> list[int]:
    """Return the order in which units run backward: microbatches ascending, the k units of each descending.

    Example:
        >>> backward_units(num_microbatches=2, k=3)
        [2, 1, 0, 5, 4, 3]
    """
    return [k * i + s for i in range(num_microbatches) for s in reversed(range(k))]


def needs(flow: Flow, action: Action) -> tuple[OpKey, ...]:
    """Return the computations whose results a computation waits for, besides those of other slices of its microbatch."""
    op, stage, unit, *_ = action
    if op in OF_ITSELF:
        return ((OF_ITSELF[op], stage, unit),)
    return tuple((Op(end.op), end.stage, unit) for end in flow.needs(RESULT[op], stage, flow.turn_of(unit)))


class Moments(dict[Node, "array[int]"]):
    """By node and unit, a moment for each result: 8 bytes each, so that the plans of thousands of ranks fit into memory.

    Those that are not known are negative. The stages that run one part share its moments: each microbatch passes one of them.
    """

    def __init__(self, flow: Flow, num_units: int) -> None:
        self._parts, self._num_units = flow.parts, num_units

    def __missing__(self, node: Node) -> array[int]:
        self[node] = array("q", [UNKNOWN]) * self._num_units
        return self[node]

    def of(self, result: str, stage: int) -> array[int]:
        """Return the moments of a stage's results, by unit."""
        return self[Node(result, self._parts[stage])]


def num_units_of(lanes: Sequence[Sequence[Action]], flow: Flow) -> int:
    """Return one more than the highest unit of some lanes of computations.

    Raises:
        PlanError: a stage does not exist, or a unit is so high that most of the others must be missing.
    """
    highest, num_stages = 0, len(flow.stage_ranks)
    for lane in filter(None, lanes):
        stages, microbatches = {action[1] for action in lane}, {action[2] for action in lane}
        if min(stages) < 0 or max(stages) >= num_stages or min(microbatches) < 0:
            wrong = next(a for a in lane if not 0 <= a.stage < num_stages or a.microbatch < 0)
            raise PlanError(f"{wrong} is outside a plan of stages 0 to {num_stages - 1} and microbatches from 0 on")
        highest = max(highest, *microbatches)
    count = sum(map(len, lanes))
    if 2 * count < len(flow.routes) * (highest + 1):
        raise PlanError(f"microbatch {highest} of {num_stages} stages in a plan of {count} computations: most are missing")
    return highest + 1


def clock_of(plan: PlanData, lanes: Sequence[Sequence[Action]]) -> tuple[list[array[int]], Moments]:
    """Return the `clock` of the computations of a plan, and the same for each result: when the computation starts that makes it."""
    return clock(lanes, plan.flow, plan.overlapped)


def clock(
    lanes: Sequence[Sequence[Action]], flow: Flow, overlapped: Collection[MicrobatchKey] = ()
) -> tuple[list[array[int]], Moments]:
    """Compute when each computation starts, if F, I and W take one unit each, B takes two, and transfers take none.

    Args:
        lanes: the computations of each rank, whole ones.
        flow: what each needs.
        overlapped: the forwards that begin when the backward behind them can run, too, right after it; what they make is there when
            that has ended.

    Returns:
        One list of start times per rank, as long as its lane; and for each result when the computation starts that makes it.

    Raises:
        PlanError: the lanes wait for each other in a cycle, or lack microbatches.
    """
    num_units, k = num_units_of(lanes, flow), flow.units
    begins, ends = (Moments(flow, num_units) for _ in range(2))
    kinds = {op: [_kind(op, part, flow, begins, ends) for part in flow.parts] for op in RESULT}
    starts, free = [array("q") for _ in lanes], [0] * len(lanes)
    waiting: dict[tuple[Node, int], list[int]] = defaultdict(list)
    runnable = deque(range(len(lanes)))
    while runnable:
        rank = runnable.popleft()
        now, lane, start = free[rank], lanes[rank], starts[rank].append
        for index in range(len(starts[rank]), len(lane)):
            op, stage, unit, _, _ = lane[index]
            needs, result, begun, ended, units, step = kinds[op][stage]
            if step and (unit - step) // k == unit // k and ended[unit - step] < 0:
                break  # it comes later in this very lane
            ready, together = now, 0
            if overlapped and op is Op.F and (stage, unit) in overlapped:
                other = _beside(lane, index, flow)
                beside = kinds[other[0]][other[1]]
                needs = [*needs, *((need, there, other[2] - unit) for need, there, _ in beside.needs)]
                together = units + beside.units
            for need, there, by in needs:
                if (arrived := there[unit + by]) < 0:
                    waiting[need, unit + by].append(rank)
                    there[unit + by] = ready = EXPECTED
                    break
                if arrived > ready:
                    ready = arrived
            if ready < 0:
                break
            start(ready)
            begun[unit] = ready
            now = ready + units
            if ended[unit] == EXPECTED:
                runnable.extend(waiting.pop((result, unit)))
            ended[unit] = ready + together if together else now
        free[rank] = now
    _check_all_ran(lanes, starts, flow)
    return starts, begins


class _Kind(NamedTuple):
    """What all computations of one operation and stage have in common; times are by unit."""

    needs: Sequence[tuple[Node, array[int], int]]  # the results that each waits for, when they have ended, and of which unit
    result: Node
    begun: array[int]
    ended: array[int]
    units: int  # its duration
    step: int  # from the slice before it, whose state it reads, to it; 0 if it reads none


def _kind(op: Op, part: int, flow: Flow, begins: Moments, ends: Moments) -> _Kind:
    node = Node(RESULT[op], part)
    needs = (Node(OF_ITSELF[op], part),) if op in OF_ITSELF else flow.latest_sources.get(node, ())
    step = 0 if op in OF_ITSELF or node not in flow.stateful else 1 if op is Op.F else -1
    return _Kind([(need, ends[need], 0) for need in needs], node, begins[node], ends[node], UNITS[op], step)


def _beside(lane: Sequence[Action], index: int, flow: Flow) -> Action:
    """Return the backward that runs side by side with a forward."""
    beside = lane[index + 1] if index + 1 < len(lane) else lane[index]
    if beside[0] is not Op.B:
        raise PlanError(f"{lane[index].text(flow.units)} runs side by side with the backward behind it, and there is none")
    return beside


def _check_all_ran(lanes: Sequence[Sequence[Action]], starts: Sequence[Sequence[int]], flow: Flow) -> None:
    """Raise if ranks wait for each other."""
    stuck = [
        f"rank {rank} before {lane[len(done)].text(flow.units)}"
        for rank, (done, lane) in enumerate(zip(starts, lanes))
        if len(done) < len(lane)
    ]
    if stuck:
        more = f" and {len(stuck) - MOST_TOLD} more" * (len(stuck) > MOST_TOLD)
        raise PlanError(f"no order of the computations works: {', '.join(stuck[:MOST_TOLD])}{more} wait for each other")


Agenda = list[tuple[float, int]]  # a heap: when lanes go on that are not blocked


def run_in_time(lanes: Sequence[Iterator[float | None]], agenda: Agenda) -> None:
    """Advance the lane that is furthest behind, again and again, so that what lanes do together happens in the order of time.

    Args:
        lanes: each yields when it goes on, or None if it is blocked: then what it waits for puts it on the agenda.
        agenda: when each lane begins, by its place.
    """
    while agenda:
        _, lane = heappop(agenda)
        for moment in lanes[lane]:
            if moment is None:
                break
            if agenda and agenda[0] < (moment, lane):
                heappush(agenda, (moment, lane))
                break


YES, AWAITED = 1, 2  # whether an event has happened; 0: it has not, and no lane waits for it


class Stuck(NamedTuple):
    """A lane that can never go on: its next action, and the action that it waits for."""

    rank: int
    action: Action
    missing: Action


def linearise(plan: PlanData) -> list[tuple[int, Action]]:
    """Return one global order of all actions of a verified plan, with their ranks."""
    order: list[tuple[int, Action]] = []
    stuck = run_greedily(plan, order)
    assert not stuck, stuck
    return order


def run_greedily(plan: PlanData, order: list[tuple[int, Action]] | None = None) -> list[Stuck]:
    """Run the plan with unbuffered transfers, every lane as far as it can go.

    No rank ever has a choice, so this one greedy run decides for all interleavings: if it ends, every execution ends. Acceptors
    run first.

    Args:
        plan: its actions must name its stages and microbatches, and no others.
        order: a list to fill with all actions that ran, and their ranks.

    Returns:
        The lanes that got stuck: none in a sound plan.
    """
    lanes, num_ranks = list(enumerate(plan.actions)), plan.num_ranks
    lanes += [(rank, chain) for rank in range(num_ranks) for chain in plan.chains(rank).values()]
    if order is None:  # what stands alone holds nothing up
        lanes = [(rank, tuple([a for a in lane if a[0] in LINKED])) for rank, lane in lanes]
    positions = [0] * len(lanes)
    roles = Roles(plan.flow)
    waiting: dict[tuple[object, int], list[int]] = defaultdict(list)
    blocked: dict[int, Action] = {}
    runnable = deque(range(num_ranks))
    acceptors = deque(range(num_ranks, len(lanes)))
    while runnable or acceptors:
        index = acceptors.popleft() if acceptors else runnable.popleft()
        blocked.pop(index, None)
        rank, lane = lanes[index]
        for position in range(positions[index], len(lane)):
            op, stage, unit, part, peer = action = lane[position]
            awaited, has_happened, event, happening = roles[op, stage, part]
            if has_happened is not None and has_happened[unit] != YES and peer != HOST:
                has_happened[unit] = AWAITED
                waiting[awaited, unit].append(index)
                blocked[index] = action
                positions[index] = position
                break
            if order is not None:
                order.append((rank, action))
            if happening is None:
                continue
            if happening[unit] == AWAITED:
                for woken in waiting.pop((event, unit)):
                    (acceptors if woken >= num_ranks else runnable).append(woken)
            happening[unit] = YES
    return [Stuck(lanes[index][0], action, roles.missing(action)) for index, action in blocked.items()]
