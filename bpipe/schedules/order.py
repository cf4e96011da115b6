"""Orders of events: the clock of the computations, and one global order of everything a plan does."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.schedules.action import RECEIVER_OF, WAIT_OF, Action, Op
from bpipe.schedules.plan import Plan

__all__ = ["Stuck", "clock", "linearise"]

Key = tuple[Op, int, int]

UNITS = {Op.F: 1, Op.B: 2, Op.I: 1, Op.W: 1}


# What others wait for: the input half stands for the whole backward.
RESULT = {Op.F: Op.F, Op.B: Op.B, Op.I: Op.B, Op.W: Op.W}


def needs(action: Action, last_stage: int) -> Key | None:
    """The computation whose result a computation waits for, besides what its own rank did before."""
    op, stage, microbatch, _ = action
    if op is Op.F:
        return (Op.F, stage - 1, microbatch) if stage else None
    if op is Op.W:
        return (Op.B, stage, microbatch)
    return (Op.F, stage, microbatch) if stage == last_stage else (Op.B, stage + 1, microbatch)


def clock(lanes: Sequence[Sequence[Action]], num_stages: int) -> list[list[int]]:
    """When each computation starts if a forward takes one unit, a backward two, each of its halves one, and transfers none.

    Returns:
        One list of start times a rank, as long as its lane.

    Raises:
        PlanError: the lanes wait for each other in a circle.
    """
    end: dict[Key | None, int] = {None: 0}
    starts: list[list[int]] = [[] for _ in lanes]
    free = [0] * len(lanes)
    waiting: dict[Key | None, list[int]] = defaultdict(list)
    runnable = deque(range(len(lanes)))
    while runnable:
        rank = runnable.popleft()
        lane = lanes[rank]
        while len(starts[rank]) < len(lane):
            action = lane[len(starts[rank])]
            needed = needs(action, num_stages - 1)
            if needed not in end:
                waiting[needed].append(rank)
                break
            start = max(free[rank], end[needed])
            starts[rank].append(start)
            result = (RESULT[action.op], action.stage, action.microbatch)
            free[rank] = end[result] = start + UNITS[action.op]
            if result in waiting:
                runnable.extend(waiting.pop(result))
    stuck = [
        f"rank {rank} before {lane[len(done)]}" for rank, (done, lane) in enumerate(zip(starts, lanes)) if len(done) < len(lane)
    ]
    if stuck:
        raise PlanError(f"no order of the computations works: {', '.join(stuck)} wait for each other")
    return starts


def _enablers() -> dict[Op, tuple[Op, int]]:
    """What must have happened on the other end before an action can go on, as (operation, offset of the stage).

    Every transfer is an unbuffered rendezvous: a receive completes once its send has started, a send once its receive has
    completed. An ACCEPT starts once its EVICT has, because the sizes arrive with it.
    """
    enabled_by: dict[Op, tuple[Op, int]] = {Op.ACCEPT: (Op.EVICT, 0)}
    for send, (receive, offset) in RECEIVER_OF.items():
        enabled_by[WAIT_OF[receive]] = (send, -offset)
        enabled_by[WAIT_OF[send]] = (WAIT_OF[receive], offset)
    return enabled_by


ENABLED_BY = _enablers()


class Stuck(NamedTuple):
    """A lane that can never go on: the action it stands before, and what it waits for."""

    rank: int
    action: Action
    missing: Key


def linearise(plan: Plan) -> tuple[list[tuple[int, Action]], list[Stuck]]:
    """Run the plan with unbuffered transfers, every lane as far as it can go.

    No rank ever chooses, so this one greedy run decides for all interleavings: if it ends, every execution ends.

    Returns:
        One global order of all actions with their ranks, and the lanes that got stuck (none in a sound plan).
    """
    lanes = [(rank, lane) for rank in range(plan.num_ranks) for lane in (plan.actions[rank], *plan.chains(rank).values())]
    done: set[Key] = set()
    order: list[tuple[int, Action]] = []
    waiting: dict[Key, list[int]] = defaultdict(list)
    blocked: dict[int, Stuck] = {}
    walks = [_walk(rank, lane, done, order) for rank, lane in lanes]
    runnable = deque(range(len(lanes)))
    while runnable:
        index = runnable.popleft()
        blocked.pop(index, None)
        for event in walks[index]:
            if isinstance(event, Stuck):
                blocked[index] = event
                waiting[event.missing].append(index)
                break
            if event in waiting:
                runnable.extend(waiting.pop(event))
    return order, list(blocked.values())


def _walk(rank: int, lane: Sequence[Action], done: set[Key], order: list[tuple[int, Action]]) -> Iterator[Key | Stuck]:
    """Do a lane's actions one by one: yield the key of each action done, or what is missing whenever it cannot go on."""
    for action in lane:
        key = action[:3]
        enabler = ENABLED_BY.get(action.op)
        if enabler is not None:
            missing = (enabler[0], action.stage + enabler[1], action.microbatch)
            while missing not in done:
                yield Stuck(rank, action, missing)
        done.add(key)
        order.append((rank, action))
        yield key
