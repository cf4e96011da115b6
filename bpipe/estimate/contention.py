"""Contention in measured steps: how much longer computations take while transfers of their rank are in flight."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from bpipe.estimate.measured_links import Flight, Way, seconds_of, weighted_median
from bpipe.plan.action import HOST
from bpipe.simulator.costs import Link

__all__: list[str] = []

LEAST_DIFFERENCE = 0.1  # of a computation: two whose transfers differ by less are not compared
LEAST_SHARE, MOST_SHARE = 0.01, 0.9  # of the time beside transfers that can be lost to them

Times = list[tuple[float, float]]  # from when to when, in order, without overlaps


class Worked(NamedTuple):
    """A computation as it was measured.

    Args:
        seconds: how long it took.
        beside_s: for how much of that a transfer of its rank was in flight.
    """

    seconds: float
    beside_s: float


def busy_times(flights: Mapping[Way, Sequence[Flight]], links: Mapping[Way, Link | None]) -> dict[int, Times]:
    """Return when transfers of each rank were in flight; one of which no lane saw the end takes what its link takes for it."""
    found: dict[int, Times] = defaultdict(list)
    for way, of_way in flights.items():
        free, link = 0.0, links[way] or Link()
        for flight in of_way:
            begin = max(flight.begin_s, free)
            end = flight.end_s if flight.is_seen else min(flight.end_s, begin + seconds_of(link, flight.num_bytes))
            free = max(free, end)
            for rank in {*way} - {HOST}:
                found[rank].append((flight.begin_s, end))
    return {rank: _joined(times) for rank, times in found.items()}


def _joined(times: Iterable[tuple[float, float]]) -> Times:
    joined: Times = []
    for begin, end in sorted(times):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        elif end > begin:
            joined.append((begin, end))
    return joined


def beside_s(begin_s: float, end_s: float, busy: Times) -> float:
    """Return for how many seconds of a computation its rank had transfers in flight."""
    seconds, place = 0.0, max(0, bisect_right(busy, (begin_s,)) - 1)
    while place < len(busy) and busy[place][0] < end_s:
        seconds += max(0.0, min(end_s, busy[place][1]) - max(begin_s, busy[place][0]))
        place += 1
    return seconds


def lost_share(alike: Iterable[Sequence[Worked]]) -> float:
    """Return the share of the time beside transfers that computations lose to them: 1 - 1/slowdown, and 0 if it cannot be told.

    A computation of w seconds takes w + share * beside_s. Of computations that do the same, each of the half with the longest
    times beside transfers is compared with one of the other half. The median counts, if three quarters say that there is a loss.

    Args:
        alike: computations that do the same, such as the forwards of a stage.
    """
    slopes: list[tuple[float, float]] = []
    for some in alike:
        ordered = sorted(some, key=lambda one: one.beside_s)
        for less, more in zip(ordered, ordered[-(-len(ordered) // 2) :]):
            difference = more.beside_s - less.beside_s
            if difference > LEAST_DIFFERENCE * less.seconds:
                slopes.append(((more.seconds - less.seconds) / difference, difference))
    return min(MOST_SHARE, weighted_median(slopes)) if weighted_median(slopes, 0.25) >= LEAST_SHARE else 0.0
