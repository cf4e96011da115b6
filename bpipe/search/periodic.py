"""Anneal an order as a pattern that repeats with each microbatch, so that a move changes all microbatches alike.

Each stage's forward, backward and W have an offset in the pattern, and microbatch i follows i periods behind the first. A rank runs
what it has in the order of these times; ranks that wait less run earlier. This is how the building blocks of Qi et al. (arXiv
2405.15362) become schedules; here the offsets are searched for.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp
from random import Random

from bpipe.plan.action import Op
from bpipe.search.job_shop import JobShop, Lanes

__all__: list[str] = []

FIRST_TEMPERATURE = 0.02  # of the step
SHIFT = 0.3  # of a period: the standard deviation of a move
REST = 0.5  # of all moves: those that take all that is later in the pattern


class Pattern:
    """The offsets of a shop's computations, which repeat with each microbatch."""

    def __init__(self, shop: JobShop, lanes: Lanes) -> None:
        times = shop.run(lanes)
        assert times is not None, "the order ends"
        self._shop = shop
        kinds: dict[tuple[Op, int], list[int]] = {}
        for lane in lanes:
            for number in lane:
                op, stage, *_ = shop.actions[number]
                kinds.setdefault((op, stage), []).append(number)
        self.period_s = max(sum(shop.seconds[number] for number in lane) for lane in lanes) / max(map(len, kinds.values()))
        self.offsets: list[float] = []
        self._place = [(0, 0.0)] * len(shop.actions)  # of each computation its kind, and how much later its pattern begins
        for kind, numbers in enumerate(kinds.values()):
            for turn, number in enumerate(numbers):
                self._place[number] = kind, turn * self.period_s
            middle = len(numbers) // 2
            self.offsets.append(times.begin_s[numbers[middle]] - middle * self.period_s)

    def lanes(self, offsets: Sequence[float]) -> Lanes:
        """Return the order that offsets lead to."""
        keys = [offsets[kind] + later_s for kind, later_s in self._place]
        return [sorted(lane, key=keys.__getitem__) for lane in self._shop.lanes]


def annealed_pattern(shop: JobShop, lanes: Lanes, limits: Sequence[int | None], tries: int, random: Random) -> Lanes | None:
    """Return the fastest order of a pattern like an order's that fits; None if none does.

    Args:
        shop: the computations.
        lanes: an order that ends.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
        tries: moves to try.
        random: decides about the moves.
    """
    pattern = Pattern(shop, lanes)
    offsets = pattern.offsets
    reached, best, least = float("inf"), None, float("inf")
    temperature = None
    for tried in range(tries + 1):
        moved = offsets if not tried else _moved(offsets, pattern.period_s, random)
        order = pattern.lanes(moved)
        if not all(shop.fits(lane, None) for lane in order) or (times := shop.run(order)) is None:
            continue
        peaks = zip(shop.peaks(order), limits)
        over = max(((peak - limit) / max(1, peak) for peak, limit in peaks if limit is not None), default=0.0)
        score = times.step_s * (1 + max(0.0, over))
        if temperature is None:
            temperature = FIRST_TEMPERATURE * score
        allowed = temperature * (1 - tried / (tries + 1)) ** 2
        if score <= reached or random.random() < exp((reached - score) / allowed):
            offsets, reached = moved, score
            if over <= 0 and times.step_s < least:
                best, least = order, times.step_s
    return best


def _moved(offsets: Sequence[float], period_s: float, random: Random) -> list[float]:
    chosen = random.randrange(len(offsets))
    by = random.gauss(0.0, SHIFT * period_s)
    if random.random() < REST:
        first = offsets[chosen]
        return [one + by if one >= first else one for one in offsets]
    return [one + by if kind == chosen else one for kind, one in enumerate(offsets)]
