"""Orders of events: the clock of the computations, and one global order of all actions of a plan."""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import HOST, MESSAGES, RECEIVER_OF, WAIT_OF, Action, MicrobatchKey, Op, OpKey
from bpipe.plan.plan_data import PlanData

__all__ = ["Moments", "Stuck", "clock", "linearise", "run_greedily"]


UNKNOWN, EXPECTED = -1, -2  # the moment of a result that does not exist yet, and of one for which a rank waits
MOST_TOLD = 8  # ranks, in an error
UNITS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1, Op.R: 1}


# The results that others wait for: I stands for the whole backward.
RESULT = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B, Op.W: Op.W, Op.R: Op.R}


def previous_unit(op: Op, unit: int, slices: int, directions: int = 1) -> int:
    """Return the unit that a stage takes before another one; negative before the first.

    A forward reads the state that the slice before left, such as keys and values. A backward uses the gradients that all later
    slices give to its own state, so the slices of a microbatch run backward in descending order, microbatches in ascending order.

    Example:
        >>> [previous_unit(Op.F, unit, slices=3) for unit in range(6)], [previous_unit(Op.B, unit, slices=3) for unit in range(6)]
        ([-1, 0, 1, 2, 3, 4], [1, 2, -3, 4, 5, 0])
    """
    if op is Op.F or slices == 1:
        return unit - 1 if unit % slices else unit - 1 - (directions - 1) * slices
    return unit + 1 if (unit + 1) % slices else unit + 1 - (directions + 1) * slices


def backward_units(num_microbatches: int, slices: int) -> list[int]:
    """Return the order in which units run backward: microbatches ascending, the slices of each descending.

    Example:
        >>> backward_units(num_microbatches=2, slices=3)
        [2, 1, 0, 5, 4, 3]
    """
    return [slices * i + s for i in range(num_microbatches) for s in reversed(range(slices))]


def state_needs(action: Action, slices: int) -> OpKey | None:
    """Return the computation of the same stage and microbatch whose state a slice's computation reads, or state's gradient."""
    op, stage, unit, *_ = action
    before = previous_unit(op, unit, slices)
    if before // slices != unit // slices or op not in (Op.F, Op.B, Op.I):
        return None
    return (RESULT[op], stage, before)


def needs(action: Action, depth: int, *, local: bool = False) -> OpKey | None:
    """Return the computation whose result a computation waits for, besides the earlier ones of its own rank.

    A slice also needs the state of its stage: see `state_needs`.

    Args:
        action: the computation.
        depth: the number of stages that a microbatch passes; a plan of two directions has as many again for the other one.
        local: whether gradients stay in their stage, so that each backward needs only its own forward.
    """
    op, stage, microbatch, *_ = action
    if op is Op.F:
        return (Op.F, stage - 1, microbatch) if stage % depth else None
    if op is Op.R:
        return (Op.F, stage, microbatch)
    if op is Op.W:
        return (Op.B, stage, microbatch)
    return (Op.B, stage + 1, microbatch) if (stage + 1) % depth and not local else (Op.F, stage, microbatch)


class Moments:
    """A moment for each result: 8 bytes each, so that the plans of thousands of ranks fit into memory.

    Args:
        depth: how many stages have moments of their own. The replicas of a stage share theirs, because each microbatch passes one.
    """

    def __init__(self, num_stages: int, num_microbatches: int, depth: int) -> None:
        self._unknown = array("q", [UNKNOWN]) * num_microbatches
        self._num_stages, self._depth = num_stages, depth
        self._tables: dict[Op, list[array[int]]] = {}

    def of(self, result: Op, stage: int) -> array[int]:
        """Return the moments of a stage's results, by microbatch; those that are not known are negative."""
        if result not in self._tables:
            self._tables[result] = [self._unknown[:] for _ in range(self._depth)] * (self._num_stages // self._depth)
        return self._tables[result][stage]

    def by_computation(self) -> dict[tuple[Op, int], array[int]]:
        """Return the moments of each kind of computation of each stage; those with one result share theirs."""
        return {(op, stage): self.of(result, stage) for op, result in RESULT.items() for stage in range(self._num_stages)}


def num_microbatches_of(lanes: Sequence[Sequence[Action]], num_stages: int, depth: int) -> int:
    """Return one more than the highest microbatch of some lanes of computations.

    Args:
        depth: the number of stages that have a computation of each microbatch, at least.

    Raises:
        PlanError: a stage does not exist, or a microbatch is so high that most of the others must be missing.
    """
    highest = 0
    for lane in filter(None, lanes):
        stages, microbatches = {action[1] for action in lane}, {action[2] for action in lane}
        if min(stages) < 0 or max(stages) >= num_stages or min(microbatches) < 0:
            wrong = next(a for a in lane if not 0 <= a.stage < num_stages or a.microbatch < 0)
            raise PlanError(f"{wrong} is outside a plan of stages 0 to {num_stages - 1} and microbatches from 0 on")
        highest = max(highest, *microbatches)
    count = sum(map(len, lanes))
    if 2 * count < depth * (highest + 1):
        raise PlanError(f"microbatch {highest} of {num_stages} stages in a plan of {count} computations: most are missing")
    return highest + 1


def clock_of(plan: PlanData, lanes: Sequence[Sequence[Action]]) -> tuple[list[array[int]], Moments]:
    """Return the `clock` of the computations of a plan, and the same for each result: when the computation starts that makes it."""
    replicas = plan.num_stages // plan.depth if plan.paths else 1
    return clock(lanes, plan.num_stages, plan.slices, plan.directions, plan.overlapped, plan.local, replicas)


def clock(
    lanes: Sequence[Sequence[Action]],
    num_stages: int,
    slices: int = 1,
    directions: int = 1,
    overlapped: Collection[MicrobatchKey] = (),
    local: bool = False,
    replicas: int = 1,
) -> tuple[list[array[int]], Moments]:
    """Compute when each computation starts, if F, I and W take one unit each, B takes two, and transfers take none.

    Args:
        lanes: the computations of each rank, whole ones.
        num_stages: of all ranks together.
        slices: k, the slices of a microbatch, which need the state of each other besides their inputs.
        directions: 2 if stages of the second half run other microbatches than those of the first half.
        overlapped: the forwards that begin when the backward behind them can run, too, right after it; what they make is there when
            that has ended.
        local: whether gradients stay in their stage.
        replicas: of a stage, of which each microbatch passes one; so these share their results, and those of the neighbour are
            there whichever of its replicas made them.

    Returns:
        One list of start times per rank, as long as its lane; and for each result when the computation starts that makes it.

    Raises:
        PlanError: the lanes wait for each other in a cycle, or lack microbatches.
    """
    num_own = num_stages // replicas
    num_microbatches = num_microbatches_of(lanes, num_stages, num_own)
    begins, ends = (Moments(num_stages, num_microbatches, num_own) for _ in range(2))
    at_once = array("q", [0]) * num_microbatches
    kinds = _kinds_of_computation(
        begins, ends, at_once, num_own, lambda first: needs(first, num_own // directions, local=local)
    )
    starts = [array("q") for _ in lanes]
    free = [0] * len(lanes)
    waiting: dict[tuple[tuple[Op, int] | None, int], list[int]] = defaultdict(list)
    runnable = deque(range(len(lanes)))
    while runnable:
        rank = runnable.popleft()
        now, lane, start = free[rank], lanes[rank], starts[rank].append
        for index in range(len(starts[rank]), len(lane)):
            op, stage, microbatch, _, _ = lane[index]
            need, needs_ended, result, begun, ended, units = kinds[op, stage]
            if slices > 1 and (state := state_needs(lane[index], slices)) is not None and ended[state[2]] < 0:
                break  # it comes later in this very lane
            ready = needs_ended[microbatch]
            if ready < 0:
                waiting[need, microbatch].append(rank)
                needs_ended[microbatch] = EXPECTED
                break
            end = 0
            if overlapped and op is Op.F and (stage, microbatch) in overlapped:
                beside = lane[index + 1] if index + 1 < len(lane) else lane[index]
                if beside[0] is not Op.B:
                    raise PlanError(f"{lane[index].text(slices)} runs side by side with the backward behind it, and there is none")
                need, needs_ended, *_, units_beside = kinds[beside[0], beside[1]]
                if needs_ended[beside[2]] < 0:
                    waiting[need, beside[2]].append(rank)
                    needs_ended[beside[2]] = EXPECTED
                    break
                ready = max(ready, needs_ended[beside[2]])
                end = max(ready, now) + units + units_beside
            if ready > now:
                now = ready
            start(now)
            begun[microbatch] = now
            now += units
            if ended[microbatch] == EXPECTED:
                runnable.extend(waiting.pop((result, microbatch)))
            ended[microbatch] = end or now
        free[rank] = now
    _check_all_ran(lanes, starts, slices)
    return starts, begins


class _Kind(NamedTuple):
    """What all computations of one operation and stage have in common; times are by microbatch."""

    need: tuple[Op, int] | None  # the result that one needs
    needs_ended: array[int]
    result: tuple[Op, int]
    begun: array[int]
    ended: array[int]
    units: int  # its duration


def _kinds_of_computation(
    begins: Moments, ends: Moments, at_once: array[int], num_own: int, needed_by: Callable[[Action], OpKey | None]
) -> dict[tuple[Op, int], _Kind]:
    kinds = {}
    for (op, stage), ended in ends.by_computation().items():
        own = stage % num_own
        needed, result = needed_by(Action(op, own, 0)), (RESULT[op], own)
        needs_ended = at_once if needed is None else ends.of(*needed[:2])
        kinds[op, stage] = _Kind(needed and needed[:2], needs_ended, result, begins.of(*result), ended, UNITS[op])
    return kinds


def _check_all_ran(lanes: Sequence[Sequence[Action]], starts: Sequence[array[int]], slices: int) -> None:
    stuck = [
        f"rank {rank} before {lane[len(done)].text(slices)}"
        for rank, (done, lane) in enumerate(zip(starts, lanes))
        if len(done) < len(lane)
    ]
    if stuck:
        more = f" and {len(stuck) - MOST_TOLD} more" * (len(stuck) > MOST_TOLD)
        raise PlanError(f"no order of the computations works: {', '.join(stuck[:MOST_TOLD])}{more} wait for each other")


def _enablers() -> dict[Op, tuple[Op, int]]:
    """Return the event at the other end that must happen before an action can go on, as (operation, offset of the stage).

    Every transfer is an unbuffered rendezvous: a receive completes once its send has started, a send once its receive has
    completed. An ACCEPT starts once its EVICT has, because the sizes arrive with it. An exchange of gradients completes once both
    twins have started it; how far the twin lies depends on the plan.
    """
    enabled_by: dict[Op, tuple[Op, int]] = {Op.ACCEPT: (Op.EVICT, 0), Op.WAIT_REDUCE_GRAD: (Op.REDUCE_GRAD, 0)}
    for send, (receive, offset) in RECEIVER_OF.items():
        enabled_by[WAIT_OF[receive]] = (send, -offset)
        enabled_by[WAIT_OF[send]] = (WAIT_OF[receive], offset)
    return enabled_by


ENABLED_BY = _enablers()
ENABLERS = frozenset(enabler for enabler, _ in ENABLED_BY.values())
LINKED = ENABLERS | ENABLED_BY.keys()
YES, AWAITED = 1, 2  # whether something has happened; 0: it has not, and no lane waits for it
States = list[bytearray] | list[defaultdict[int, int]]  # by stage; then by unit and part, or below 0 by unit and other stage
Happened = dict[Op, States]


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
    width = 1 + max(map(plan.num_parts, range(plan.num_stages)))
    num_stages, num_own = plan.num_stages, plan.depth if plan.paths else plan.num_stages
    kinds = _kinds(_nothing_happened(num_stages, num_own, plan.num_units * width), plan.depth)
    of_skips: Happened = {op: [defaultdict[int, int](int) for _ in plan.stage_ranks] if plan.skips else [] for op in ENABLERS}
    kinds_of_skips = _kinds(of_skips, 0)
    waiting: dict[tuple[Op, int, int], list[int]] = defaultdict(list)
    blocked: dict[int, Action] = {}
    runnable = deque(range(num_ranks))
    acceptors = deque(range(num_ranks, len(lanes)))
    while runnable or acceptors:
        index = acceptors.popleft() if acceptors else runnable.popleft()
        blocked.pop(index, None)
        rank, lane = lanes[index]
        for position in range(positions[index], len(lane)):
            op, stage, microbatch, part, peer = action = lane[position]
            which = microbatch * width + part
            enabling, offset, happening = kinds[op]
            other, there = stage + offset, which
            if part and op in MESSAGES:  # with a stage that is no neighbour
                enabling, _, happening = kinds_of_skips[op]
                other, which, there = part - 1, -(microbatch * num_stages + part), -(microbatch * num_stages + stage + 1)
            if enabling is not None and peer != HOST and enabling[other][there] != YES:
                enabling[other][there] = AWAITED
                enabler = ENABLED_BY[op][0]
                waiting[enabler, other % num_own, there].append(index)
                blocked[index] = action
                positions[index] = position
                break
            if order is not None:
                order.append((rank, action))
            if happening is None:
                continue
            if happening[stage][which] == AWAITED:
                for woken in waiting.pop((op, stage % num_own, which)):
                    (acceptors if woken >= num_ranks else runnable).append(woken)
            happening[stage][which] = YES
    return [Stuck(lanes[index][0], action, _missing(plan, action)) for index, action in blocked.items()]


def _nothing_happened(num_stages: int, num_own: int, num_events: int) -> Happened:
    """Return the states of a plan's events, of each operation and stage.

    A microbatch passes one replica of a stage: what has happened there has happened for all of them, wherever its neighbours are.
    """
    happened: Happened = {op: [bytearray(num_events) for _ in range(num_own)] * (num_stages // num_own) for op in ENABLERS}
    happened[Op.REDUCE_GRAD] *= 2  # a twin lies `depth` stages further on, or as many back
    return happened


def _kinds(happened: Happened, depth: int) -> dict[Op, tuple[States | None, int, States | None]]:
    """Return for each kind of action the event that must have happened first, how many stages further on, and what it causes."""
    kinds = {}
    for op in Op:
        enabler, offset = ENABLED_BY.get(op, (None, 0))
        offset = depth if op is Op.WAIT_REDUCE_GRAD else offset
        kinds[op] = (None if enabler is None else happened[enabler], offset, happened.get(op))
    return kinds


def _missing(plan: PlanData, action: Action) -> Action:
    """Return what must happen on the other end before an action can go on."""
    enabler, offset = ENABLED_BY[action.op]
    twin = plan.twin(action.stage) if action.op is Op.WAIT_REDUCE_GRAD else None
    if action.part and action.op in MESSAGES:
        return action._replace(op=enabler, stage=action.part - 1, part=action.stage + 1, peer=None)
    there = plan.neighbour(action.stage, offset, action.microbatch) if plan.paths and offset else twin
    return action._replace(op=enabler, stage=action.stage + offset if there is None else there, peer=None)
