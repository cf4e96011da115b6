"""Insert evictions as actions into the evictor's list, and mirror them in the acceptor's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from bpipe.passes.balance.greedy import Eviction
from bpipe.passes.balance.rank_steps import RankSteps
from bpipe.plan.action import COMPUTE, MIRROR, Action, Op

__all__: list[str] = []


def insert_evictions(rank: RankSteps, evictions: Iterable[Eviction]) -> tuple[Action, ...]:
    """Return the rank's list with its evictions in it.

    At one boundary memory is freed before it is allocated: on this rank by completed evictions, on the acceptor by completed
    loads.
    """
    moves: dict[int, list[list[Action]]] = defaultdict(lambda: [[], [], [], []])
    for eviction in evictions:
        for order, (op, step) in enumerate(
            (
                (Op.WAIT_EVICT, eviction.left),
                (Op.LOAD, eviction.load),
                (Op.WAIT_LOAD, eviction.back),
                (Op.EVICT, eviction.start),
            )
        ):
            moves[step][order].append(Action(op, *eviction.which, eviction.peer))
    lane: list[Action] = []
    step = 0
    for action in rank.actions:
        while action.op in COMPUTE and step < len(rank.steps):
            for group in moves.get(step, ()):
                lane += group
            step += 1
            if rank.steps[step - 1] is not None:
                break
        lane.append(action)
    return tuple(lane)


def mirrored(actions: Iterable[Action], evictor: int, acceptor: int) -> tuple[Action, ...]:
    """Return the acceptor's end of an evictor's transfers: the same events in the same order, so no cycle of waits arises."""
    return tuple(a._replace(op=MIRROR[a.op], peer=evictor) for a in actions if a.op in MIRROR and a.peer == acceptor)
