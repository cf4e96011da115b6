"""Lower bounds of a step: what no order of the same computations can beat, on the simulator's cost model."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from bpipe.plan.action import Op
from bpipe.search.job_shop import JobShop

__all__: list[str] = []


def lower_bound_s(shop: JobShop, limits: Sequence[int | None]) -> float:
    """Return the seconds that every order takes at least.

    For each rank alone, it is what its computations take if they may be interrupted: each begins when those before it can have
    ended, and is followed by those behind it (Jackson's preemptive schedule; Carlier, 1982). For a rank with a limit of memory, it
    is also the least time in which it can hold all that microbatches keep, if each is kept as briefly as can be.

    Args:
        shop: the computations.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
    """
    order = _in_order(shop)
    heads_s, tails_s = _heads_s(shop, order), _tails_s(shop, order)
    bound_s = max((heads_s[one] + shop.seconds[one] + tails_s[one] for one in order), default=0.0)
    for lane, limit in zip(shop.lanes, limits):
        if lane:
            bound_s = max(bound_s, _preemptive_s(lane, heads_s, shop.seconds, tails_s))
            if limit is not None and limit > 0:
                first_s = min(heads_s[one] for one in lane)
                last_s = min((tails_s[one] for one in lane if shop.gives[one]), default=0.0)
                bound_s = max(bound_s, first_s + _kept_s(shop, lane) / limit + last_s)
    return bound_s


def _in_order(shop: JobShop) -> list[int]:
    """Return the computations, each behind those that it needs or comes after."""
    followers = [[*later, *(consumer.number for consumer in consumers)] for later, consumers in zip(shop.later, shop.consumers)]
    missing = [len(makers) + len(earlier) for makers, earlier in zip(shop.makers, shop.earlier)]
    order = [number for number, count in enumerate(missing) if not count]
    for number in order:  # which grows
        for follower in followers[number]:
            missing[follower] -= 1
            if not missing[follower]:
                order.append(follower)
    return order


def _heads_s(shop: JobShop, order: Sequence[int]) -> list[float]:
    """Return when each computation can begin at the earliest."""
    heads_s = [0.0] * len(order)
    for number in order:
        for one in shop.earlier[number]:
            heads_s[number] = max(heads_s[number], heads_s[one] + shop.seconds[one])
        for consumer, _, seconds, latency_s in shop.consumers[number]:
            heads_s[consumer] = max(heads_s[consumer], heads_s[number] + shop.seconds[number] + seconds + latency_s)
    return heads_s


def _tails_s(shop: JobShop, order: Sequence[int]) -> list[float]:
    """Return how long the step goes on at least behind each computation."""
    tails_s = [0.0] * len(order)
    for number in reversed(order):
        for consumer, _, seconds, latency_s in shop.consumers[number]:
            tails_s[number] = max(tails_s[number], seconds + latency_s + shop.seconds[consumer] + tails_s[consumer])
        for one in shop.earlier[number]:
            tails_s[one] = max(tails_s[one], shop.seconds[number] + tails_s[number])
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


def _kept_s(shop: JobShop, lane: Sequence[int]) -> float:
    """Return what a rank's microbatches keep, times the seconds that they keep it at least."""
    if any(len(makers) > 1 for makers in shop.makers):
        return 0.0  # a skip may overtake what it skips, so that nothing is known of how long that takes
    alone_s = _alone_s(shop)
    kept = 0.0
    for number in lane:
        op, stage, unit, *_ = shop.actions[number]
        if op is Op.F:
            back = shop.backward_of(stage, unit)
            kept_s = alone_s[back] + shop.seconds[back] - alone_s[number]
            kept += (shop.takes[number] - shop.gives[number]) * kept_s
        elif op is Op.W:
            kept += shop.gives[number] * shop.seconds[number]
    return kept


def _alone_s(shop: JobShop) -> list[float]:
    """Return when each computation of a unit would begin if its ranks computed nothing else."""
    alone_s = [0.0] * len(shop.actions)
    runnable = [number for number, makers in enumerate(shop.makers) if not makers]
    for number in runnable:  # which grows
        for consumer, _, seconds, latency_s in shop.consumers[number]:
            alone_s[consumer] = alone_s[number] + shop.seconds[number] + seconds + latency_s
            runnable.append(consumer)
    return alone_s
