"""Lower bounds of a step: what no order of the same computations can beat, on the simulator's cost model."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from operator import add

from bpipe.plan.action import Op
from bpipe.search.job_shop import SAME_RANK, Consumer, JobShop

__all__: list[str] = []

Arcs = Sequence[Sequence[Consumer]]  # for each computation those that follow it, each with the message to it, if there is one


def lower_bound_s(shop: JobShop, limits: Sequence[int | None]) -> float:
    """Return the seconds that every order takes at least.

    For each rank alone, it is what its computations take if they may be interrupted: each begins when those before it can have
    ended, and is followed by those behind it (Jackson's preemptive schedule; Carlier, 1982). For a rank with a limit of memory, it
    is also the least time in which it can hold all that microbatches keep, if each is kept as briefly as can be.

    Args:
        shop: the computations.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
    """
    after = [[Consumer(one, SAME_RANK, 0.0, 0.0) for one in later] for later in shop.later]
    arcs = list(map(add, after, shop.consumers))
    heads_s, order = _heads_s(shop.seconds, arcs)
    tails_s = _tails_s(shop.seconds, arcs, order)
    bound_s = max((heads_s[one] + shop.seconds[one] + tails_s[one] for one in order), default=0.0)
    alone_s = _alone_s(shop)
    for lane, limit in zip(shop.lanes, limits):
        if lane:
            bound_s = max(bound_s, _preemptive_s(lane, heads_s, shop.seconds, tails_s))
            if limit is not None and limit > 0 and alone_s is not None:
                first_s = min(heads_s[one] for one in lane)
                last_s = min((tails_s[one] for one in lane if shop.gives[one]), default=0.0)
                bound_s = max(bound_s, first_s + _kept_s(shop, lane, alone_s) / limit + last_s)
    return bound_s


def _heads_s(seconds: Sequence[float], arcs: Arcs) -> tuple[list[float], list[int]]:
    """Return when each computation can begin at the earliest, and all of them, each behind those that it needs or comes after."""
    heads_s, missing = [0.0] * len(arcs), [0] * len(arcs)
    for followers in arcs:
        for follower, *_ in followers:
            missing[follower] += 1
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:  # which grows
        end_s = heads_s[number] + seconds[number]
        for follower, _, message_s, latency_s in arcs[number]:
            heads_s[follower] = max(heads_s[follower], end_s + message_s + latency_s)
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)
    return heads_s, order


def _tails_s(seconds: Sequence[float], arcs: Arcs, order: Sequence[int]) -> list[float]:
    """Return how long the step goes on at least behind each computation."""
    tails_s = [0.0] * len(order)
    for number in reversed(order):
        for follower, _, message_s, latency_s in arcs[number]:
            tails_s[number] = max(tails_s[number], message_s + latency_s + seconds[follower] + tails_s[follower])
    return tails_s


def _preemptive_s(lane: Sequence[int], heads_s: Sequence[float], seconds: Sequence[float], tails_s: Sequence[float]) -> float:
    """Return the least step of one rank: of what has come, what is followed by most runs, interrupted by what comes."""
    coming = sorted(lane, key=heads_s.__getitem__)
    left: list[tuple[float, float]] = []  # a heap of what has come: less its tail, and the seconds that are left of it
    now = step_s = 0.0
    for index, number in enumerate(coming):
        now = max(now, heads_s[number])
        heappush(left, (-tails_s[number], seconds[number]))
        until = heads_s[coming[index + 1]] if index + 1 < len(coming) else inf
        while left and now < until:
            tail, rest = heappop(left)
            runs_s = min(rest, until - now)
            now += runs_s
            if runs_s < rest:
                heappush(left, (tail, rest - runs_s))
            else:
                step_s = max(step_s, now - tail)
    return step_s


def _alone_s(shop: JobShop) -> list[float] | None:
    """Return when each computation of a unit would begin if its ranks computed nothing else.

    It is None if there are skips: one may overtake what it skips, so that nothing is known of how long that takes.
    """
    return None if any(len(makers) > 1 for makers in shop.makers) else _heads_s(shop.seconds, shop.consumers)[0]


def _kept_s(shop: JobShop, lane: Sequence[int], alone_s: Sequence[float]) -> float:
    """Return what a rank's microbatches keep, times the seconds that they keep it at least."""
    kept = 0.0
    for number in lane:
        op, stage, unit, *_ = shop.actions[number]
        if op is Op.F:
            back = shop.made_by((Op.B, stage, unit))
            kept_s = alone_s[back] + shop.seconds[back] - alone_s[number]
            kept += (shop.takes[number] - shop.gives[number]) * kept_s
        elif op is Op.W:
            kept += shop.gives[number] * shop.seconds[number]
    return kept
