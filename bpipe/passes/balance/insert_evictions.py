"""Insert evictions as actions into the evictor's list, and mirror them in the acceptor's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from bpipe.passes.balance.greedy import Eviction
from bpipe.passes.balance.rank_steps import RankSteps
from bpipe.plan.action import COMPUTE, MIRROR, Action, Op

__all__: list[str] = []

# The steps of an eviction before which its transfers start and end, in their order at one boundary.
_STEPS: dict[Op, Callable[[Eviction], int]] = {
    Op.WAIT_EVICT: attrgetter("left"),
    Op.LOAD: attrgetter("load"),
    Op.WAIT_LOAD: attrgetter("back"),
    Op.EVICT: attrgetter("start"),
}


def insert_evictions(rank: RankSteps, evictions: Sequence[Eviction]) -> tuple[Action, ...]:
    """Return the rank's list with its evictions in it.

    At one boundary memory is freed before it is allocated: on this rank by completed evictions, on the acceptor by completed
    loads.
    """
    moves: dict[int, list[Action]] = defaultdict(list)
    for op, step_of in _STEPS.items():
        for eviction in evictions:
            moves[step_of(eviction)].append(Action(op, *eviction.which, eviction.peer))
    lane: list[Action] = []
    step, ends = 0, iter(rank.boundaries[1:])
    for action in rank.actions:
        if action[0] in COMPUTE:
            end = next(ends)
            while step < end:
                lane += moves.get(step, ())
                step += 1
        lane.append(action)
    return tuple(lane)


def mirrored(actions: Iterable[Action], evictor: int, acceptor: int) -> tuple[Action, ...]:
    """Return the acceptor's end of an evictor's transfers: the same events in the same order, so no cycle of waits arises."""
    return tuple(Action(MIRROR[a[0]], *a[1:4], evictor) for a in actions if a[4] == acceptor and a[0] in MIRROR)
