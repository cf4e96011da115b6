"""The median of alternating measurements, with the interval in which it lies."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median
from typing import NamedTuple

LEVEL = 0.95


class Interval(NamedTuple):
    """A median and the ends of its 95% interval."""

    median: float
    low: float
    high: float


def interval(values: Sequence[float]) -> Interval:
    """The median, and the two order statistics between which it lies with 95%, whatever the distribution.

    The number of values below the true median is binomial, so the k-th smallest and the k-th largest of n enclose it with
    probability 1 - 2 P(Binomial(n, 1/2) < k). Fewer than six values give their extremes.
    """
    ordered, n = sorted(values), len(values)
    below, outside = 0, 0.0
    while True:
        outside += comb(n, below) / 2**n
        if 2 * outside > 1 - LEVEL or below >= (n - 1) // 2:
            break
        below += 1
    last = max(below - 1, 0)
    return Interval(median(ordered), ordered[last], ordered[n - 1 - last])


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours over theirs, round by round."""
    return interval([one / other for one, other in zip(ours, theirs, strict=True)])
