"""How fast each rank is: measured in every step, averaged, and when it is worth dealing anew."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from bpipe.engine.run import Observer, Run
from bpipe.plan.action import COMPUTE, Action
from bpipe.relaxed.paths import Paths, paths_of

__all__: list[str] = []

NEWEST = 0.3  # the weight of the latest step in the moving average of a throughput
WORTH_IT = 1.05  # deal anew if the slowest rank would be done this much earlier: messages on new paths are agreed on anew


class Stopwatch(Observer):
    """Measures how long the computations of a step take on this rank."""

    def __init__(self) -> None:
        self._begin = self.seconds = 0.0

    def started(self, run: Run) -> None:
        self.seconds = 0.0

    def before(self, run: Run, action: Action) -> None:
        self._begin = time.perf_counter()

    def after(self, run: Run, action: Action) -> None:
        if action.op in COMPUTE:
            self.seconds += time.perf_counter() - self._begin


class Throughputs:
    """The throughputs of all seats, in microbatches a second; equal on all ranks, which learn the same."""

    def __init__(self, depth: int, num_seats: int) -> None:
        self._depth, self._num_seats = depth, num_seats
        self.known: dict[int, float] = {}

    def learn(self, measured: Mapping[int, float]) -> None:
        """Learn from a step: a moving average."""
        for seat, speed in measured.items():
            before = self.known.get(seat, speed)
            self.known[seat] = before + NEWEST * (speed - before)

    def table(self, seats: Collection[int]) -> list[list[float]]:
        """Return those of all seats, for each replica: 0 of who is not there, and of who is unknown the mean one of its stage."""
        known = {seat: self.known[seat] for seat in sorted(seats) if seat in self.known}
        table = [0.0] * self._num_seats
        for seat in seats:
            beside = [speed for one, speed in known.items() if (one - seat) % self._depth == 0] or list(known.values()) or [1.0]
            table[seat] = known.get(seat, sum(beside) / len(beside))
        return [table[first : first + self._depth] for first in range(0, self._num_seats, self._depth)]

    def better_paths(self, paths: Paths, seats: Collection[int]) -> Paths | None:
        """Return new paths for as many microbatches, if those are noticeably better than the present ones."""
        table = self.table(seats)
        speeds, dealt = list(chain.from_iterable(table)), paths_of(len(paths), table)
        return dealt if _slowest_s(paths, speeds) > WORTH_IT * _slowest_s(dealt, speeds) else None


def _slowest_s(paths: Paths, speeds: Sequence[float]) -> float:
    """Return how long the rank takes that is done last with its microbatches; endless if who gets one is not there."""
    counts = Counter(chain.from_iterable(paths))
    return max(count / speeds[seat] if speeds[seat] else math.inf for seat, count in counts.items())
