"""Pair forwards with the backwards that follow them, so that the two may run side by side (DualPipe, arXiv 2412.19437).

A pair begins when the inputs of both are there, and its results are sent when both have ended. So a schedule gains by it only where
it has a forward more in flight than it needs without pairs: interleaved 1F1B with one more forward ahead, or DualPipeV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.errors import PlanError
from bpipe.flow.flow import Flow
from bpipe.passes.communicate import without_transfers
from bpipe.plan.action import COMPUTE, Action, MicrobatchKey, Op, OpKey
from bpipe.plan.order import RESULT, needs
from bpipe.plan.plan import Plan

__all__: list[str] = []


def overlap(plan: Plan) -> Plan:
    """Return the computations of a plan, with each forward paired with the whole backward behind it, where the plan allows that.

    They must be of different microbatches. Where all ranks would wait for each other with all of these pairs, some stay apart.

    Raises:
        PlanError: the computations wait for each other in a cycle even without pairs.

    Example:
        >>> from bpipe.schedules import build, finish
        >>> print(finish(overlap(build("1f1b", 2, 3))))
        1f1b: 2 stages, 3 microbatches, peak slots 2 1
        rank 0 | F0  ..  ..  ..  (F1 B0  b0) ..  ..  ..  (F2 B1  b1) ..  ..  ..  B2  b2
        rank 1 | ..  F0  B0  b0  ..  ..  ..  F1  B1  b1  ..  ..  ..  F2  B2  b2  ..  ..
    """
    base = without_transfers(plan)
    return replace(base, overlapped=pairs_of(base.actions, base.flow))


def pairs_of(lanes: Sequence[Sequence[Action]], flow: Flow) -> frozenset[MicrobatchKey]:
    """Return the forwards, by stage and unit, that can run side by side with the backward behind them.

    Args:
        lanes: the whole computations of each rank; among them may be what gathers and frees weights.
        flow: what each computation needs.

    Raises:
        PlanError: the computations wait for each other in a cycle.
    """
    pairs: set[MicrobatchKey] = set()
    done: set[OpKey] = set()
    positions = [0] * len(lanes)

    def is_ready(action: Action) -> bool:
        return action.op not in COMPUTE or done.issuperset(needs(flow, action))

    def advance(rank: int, *, splits: bool) -> bool:
        """Run a rank's computations as far as they can, all pairs as pairs; or the first half of one pair alone."""
        lane, begin = lanes[rank], positions[rank]
        while positions[rank] < len(lane):
            first, *both = lane[positions[rank] : positions[rank] + 2]
            if not is_ready(first):
                break
            is_pair = bool(both) and first.op is Op.F and both[0].op is Op.B
            is_pair = is_pair and first.microbatch // flow.units != both[0].microbatch // flow.units
            if is_pair and is_ready(both[0]):
                pairs.add(first.key)
            elif is_pair and not splits:
                break
            if first.op in COMPUTE:
                done.add((RESULT[first.op], first.stage, first.microbatch))
            positions[rank] += 1
            if splits:
                break
        return positions[rank] > begin

    while any(at < len(lane) for at, lane in zip(positions, lanes)):
        moved = [rank for rank in range(len(lanes)) if advance(rank, splits=False)]
        if not moved and not any(advance(rank, splits=True) for rank in range(len(lanes))):
            raise PlanError("the computations wait for each other in a cycle: no pair of them is to blame")
    return frozenset(pairs)
