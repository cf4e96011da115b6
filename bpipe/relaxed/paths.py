"""The plan of a step whose microbatches take different replicas of the stages.

There are S stages and d replicas of each. Replica r of stage s is stage r*S + s of the plan, on the rank of the same number. Each
rank runs the next backward if it can, else the next forward, while it has few enough microbatches in flight. If the second replica
of stage 0 is twice as fast as all others, it gets two of three microbatches, which go to both replicas of stage 1 in turns:

    routes: 4 stages, 6 microbatches, peak slots 2 1 4 1
    rank 0 | F0 F3 .. .. B0 b0 .. B3 b3 .. .. .. .. ..
    rank 1 | .. F0 B0 b0 F2 B2 b2 F4 B4 b4 .. .. .. ..
    rank 2 | F1 F2 F4 F5 B1 b1 .. B2 b2 .. B4 b4 B5 b5
    rank 3 | .. F1 B1 b1 F3 B3 b3 F5 B5 b5 .. .. .. ..
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError
from bpipe.flow.shaping import shaped
from bpipe.plan.action import Action, Op
from bpipe.plan.plan import Plan
from bpipe.relaxed.dealing import deal
from bpipe.schedules.by_name import finish

__all__ = ["routed_plan"]

Paths = tuple[tuple[int, ...], ...]
ROUNDING = 1e-9
SHARE = {Op.F: 1 / 3, Op.B: 2 / 3}  # of the time of a microbatch


def paths_of(num_microbatches: int, throughputs: Sequence[Sequence[float]]) -> Paths:
    """Return the stages of the plan that each microbatch passes: those of each stage are dealt to its replicas."""
    depth = len(throughputs[0])
    dealt = [deal(num_microbatches, [replica[stage] for replica in throughputs]) for stage in range(depth)]
    return tuple(tuple(replica * depth + stage for stage, replica in enumerate(each)) for each in zip(*dealt))


def routed_plan(
    num_microbatches: int, throughputs: Sequence[Sequence[float]], paths: Paths | None = None, *, in_flight: float = 2.5
) -> Plan:
    """Build the verified plan of a step in which microbatches are dealt to replicas by speed.

    With `in_flight=1.0` the replicas of stage s have S - s microbatches in flight on average, as in 1F1B, each in proportion to its
    speed: so many are needed if none ever waits. But those behind one on a slow replica do wait, because a stage takes its
    microbatches in order. Two and a half times as many make up for nearly all of it.

    Args:
        num_microbatches: m, of a step of all replicas together.
        throughputs: for each replica, one number for each of its stages: microbatches per second; 0 for a rank that is not there.
        paths: those of the microbatches, if they are known; default: dealt by `deal`.
        in_flight: how many microbatches ranks may have in flight, as a multiple of that.

    Returns:
        The plan, over all S*d ranks; those that are not there have nothing to do.

    Raises:
        ConfigurationError: a number of throughputs is wrong, or a stage is on no rank.

    Example:
        >>> plan = routed_plan(4, [[1, 1], [2, 2]])
        >>> plan.flow.arguments("alternatives")[1]
        ((0, 1), (2, 3), (2, 3), (0, 1))
        >>> [str(action) for action in plan.compute(2)]
        ['2F1', '2F2', '2B1', '2B2']
    """
    check_count("num_microbatches", num_microbatches)
    depth = len(throughputs[0]) if throughputs else 0
    if not depth or any(len(one) != depth for one in throughputs):
        counts = [len(one) for one in throughputs]
        raise ConfigurationError(f"throughputs of {counts} stages: give each replica one for each stage")
    num_ranks = depth * len(throughputs)
    paths = paths or paths_of(num_microbatches, throughputs)
    chain = shaped(None, "chain", tuple(range(depth)), num_microbatches)
    plan = Plan(
        name="routes",
        flow=shaped(chain, "alternatives", tuple(range(num_ranks)), paths, False),
        actions=_greedy(paths, [speed for replica in throughputs for speed in replica], in_flight),
        served=((),) * num_ranks,
        slots=(None,) * num_ranks,
    )
    return finish(plan)


def most_in_flight(stage: int, depth: int, speeds: Sequence[float], in_flight: float) -> int:
    """Return the most microbatches in flight on a rank: `in_flight` times S - s, by its share of its stage's speed."""
    position = stage % depth
    present = [speed for speed in speeds[position::depth] if speed]
    return max(1, math.ceil(in_flight * (depth - position) * speeds[stage] * len(present) / sum(present) - ROUNDING))


def _greedy(paths: Paths, speeds: Sequence[float], in_flight: float) -> tuple[tuple[Action, ...], ...]:
    """Return each rank's computations, in the order in which they would run at these speeds.

    A stage takes its microbatches in ascending order, forward and backward. It never gets stuck: the first microbatch that has not
    run backward everywhere finds every stage on its path empty, or has run forward there.
    """
    depth = len(paths[0])
    lanes: list[list[Action]] = [[] for _ in speeds]
    most = [most_in_flight(stage, depth, speeds, in_flight) if speed else 0 for stage, speed in enumerate(speeds)]
    passing = [[unit for unit, path in enumerate(paths) if path[stage % depth] == stage] for stage in range(len(speeds))]
    due = {op: [deque(units) for units in passing] for op in SHARE}
    ready = {(Op.F, path[0], unit) for unit, path in enumerate(paths)}
    is_busy = [False] * len(speeds)
    ends: list[tuple[float, int, Action]] = []  # a heap of computations that run: when each ends, and its rank

    def begin(stage: int, now: float) -> None:
        """Let a rank run its next computation, if there is one that can run."""
        for op in (Op.B, Op.F):
            queue = due[op][stage]
            running = len(due[Op.B][stage]) - len(due[Op.F][stage])
            if queue and (op, stage, queue[0]) in ready and (op is Op.B or running < most[stage]):
                action = Action(op, stage, queue.popleft())
                lanes[stage].append(action)
                is_busy[stage] = True
                heappush(ends, (now + SHARE[op] / speeds[stage], stage, action))
                return

    for stage in range(len(speeds)):
        begin(stage, 0.0)
    while ends:
        now, stage, (op, _, unit, *_) = heappop(ends)
        is_busy[stage] = False
        path, place = paths[unit], stage % depth
        after = place + (1 if op is Op.F else -1)
        if after == depth:
            ready.add((Op.B, stage, unit))
        elif after >= 0:
            ready.add((op, path[after], unit))
        for each in {stage, path[min(max(after, 0), depth - 1)]}:
            if not is_busy[each]:
                begin(each, now)
    return tuple(map(tuple, lanes))
