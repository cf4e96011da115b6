"""Make an order of computations faster by simulated annealing (Kirkpatrick et al., 1983) from any order that fits.

A move takes one computation, or it and all later ones of its kind and stage, some places forwards or backwards in its lane. Most
moves take a computation of the critical path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random

from bpipe.search.job_shop import JobShop, Lanes, Times

__all__: list[str] = []

CRITICAL = 0.8  # of all moves: those on the critical path
TOGETHER = 0.4  # of all moves: those that also take the later computations of the kind
MEAN_PLACES = 2.5
FIRST_TEMPERATURE = 0.01  # of the step
ROUNDING = 1e-9
ENDS = 1e-4  # the weight of the mean end of the ranks beside the step, so that a rank which ends earlier is worth something


def annealed(
    shop: JobShop,
    lanes: Lanes,
    limits: Sequence[int | None],
    tries: int,
    random: Random,
    *,
    least_s: float = 0.0,
    fits: Callable[[Lanes], bool] = lambda _: True,
) -> list[Lanes]:
    """Return ever faster orders, beginning with a given one: the last one is the fastest that is found.

    Args:
        shop: the computations.
        lanes: an order that ends and fits.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
        tries: moves to try.
        random: decides about the moves.
        least_s: no order takes less, so that the search ends there.
        fits: decides whether an order that would be the fastest so far fits in all, where the limits do not say all.
    """
    times = shop.run(lanes)
    assert times is not None, "the first order ends"
    found, least, reached = [lanes], times.step_s, _score(times)
    temperature_s, path = FIRST_TEMPERATURE * least, critical_path(shop, lanes, times)
    for tried in range(tries):
        if least <= least_s * (1 + ROUNDING):
            break
        rank, lane = _moved(shop, lanes, path, random)
        if lane == lanes[rank] or not shop.fits(lane, limits[rank]):
            continue
        moved = [*lanes[:rank], lane, *lanes[rank + 1 :]]
        times = shop.run(moved)
        if times is None:
            continue
        is_fastest = times.step_s < least * (1 - ROUNDING)
        if is_fastest and not fits(moved):
            continue
        score = _score(times)
        allowed_s = temperature_s * (1 - tried / tries) ** 2
        if score <= reached or (allowed_s > 0 and random.random() < exp((reached - score) / allowed_s)):
            lanes, reached, path = moved, score, critical_path(shop, moved, times)
            if is_fastest:
                found.append(moved)
                least = times.step_s
    return found


def _score(times: Times) -> float:
    return times.step_s + ENDS * sum(times.rank_s) / len(times.rank_s)


def _moved(shop: JobShop, lanes: Lanes, path: Sequence[int], random: Random) -> tuple[int, list[int]]:
    """Return a lane after a random move, and its rank."""
    if random.random() < CRITICAL:
        number = random.choice(path)
        rank = shop.rank[number]
        index = lanes[rank].index(number)
    else:
        rank = random.randrange(len(lanes))
        if not lanes[rank]:
            return rank, lanes[rank]
        index = random.randrange(len(lanes[rank]))
    places = int(random.expovariate(1 / MEAN_PLACES)) + 1
    if random.random() < 0.5:
        places = -places
    if random.random() < TOGETHER:
        return rank, _all_moved(shop, lanes[rank], index, places)
    lane = lanes[rank].copy()
    number = lane.pop(index)
    lane.insert(max(0, index + places), number)
    return rank, lane


def _all_moved(shop: JobShop, lane: Sequence[int], index: int, places: int) -> list[int]:
    """Move a computation and all later ones of its kind and stage by as many places."""
    op, stage, *_ = shop.actions[lane[index]]
    by = places + (0.5 if places > 0 else -0.5)
    keys = [
        place + by if place >= index and shop.actions[number][:2] == (op, stage) else place for place, number in enumerate(lane)
    ]
    return [lane[place] for place in sorted(range(len(lane)), key=keys.__getitem__)]


def critical_path(shop: JobShop, lanes: Lanes, times: Times) -> list[int]:
    """Return computations from the last one backwards, each of which holds up the one before it here."""
    before: dict[int, int] = {}  # what its rank runs before each computation
    for lane in lanes:
        before.update(zip(lane[1:], lane))
    begin_s, seconds, rounding = times.begin_s, shop.seconds, ROUNDING * times.step_s

    def end_s(number: int) -> float:
        return begin_s[number] + seconds[number]

    number: int | None = max((lane[-1] for lane in lanes if lane), key=end_s)
    path = list[int]()
    while number is not None:
        path.append(number)
        other = before.get(number)
        if other is None or begin_s[other] + seconds[other] < begin_s[number] - rounding:
            other = max(shop.makers[number], key=end_s, default=None)
        number = other
    return path
