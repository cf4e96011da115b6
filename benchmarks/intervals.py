"""The median of alternating measurements, with the interval in which it lies, as a row of results and its table have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Any, NamedTuple

LEVEL = 0.95
ENDS = ("", "_low", "_high")  # behind a key, of the three numbers


class Interval(NamedTuple):
    """A median and the ends of its 95% interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, row: Mapping[str, Any], key: str) -> Interval:
        """What a row has under a key; a number without ends is exact."""
        return cls(*(row.get(key + end, row[key]) for end in ENDS))

    def named(self, key: str) -> dict[str, float]:
        """What a row has of it, under a key."""
        return {key + end: number for end, number in zip(ENDS, self, strict=True)}


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


def columns(key: str, heading: str, form: str = ".3f") -> list[tuple[str, str, str]]:
    """The columns of an interval in a table."""
    return [(key + end, text, form) for end, text in zip(ENDS, (heading, "from", "to"), strict=True)]


def as_they_are(*keys: str) -> list[tuple[str, str, str]]:
    """The columns of what a table shows under its own name."""
    return [(key, key, "") for key in keys]


def error_bars(found: Sequence[Interval]) -> list[list[float]]:
    """How far the ends of intervals are from their medians, as matplotlib takes it."""
    return [[one.median - one.low for one in found], [one.high - one.median for one in found]]
