"""How long pieces take, learned from those that ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

__all__: list[str] = []

LATEST, ENOUGH = 5, 3  # runs of a piece that are kept; and as many as it takes to leave the slowest out
DOUBTED = 0.98  # what is left of a time that is known from few runs, each time that a piece did not fit by it


class KnownSeconds:
    """The seconds of pieces, by key. One slow moment does not count, and the first runs, which are slow, do not stay decisive."""

    def __init__(self) -> None:
        self._latest: dict[Hashable, deque[float]] = {}
        self._doubt: dict[Hashable, float] = {}

    def fits(self, key: Hashable, seconds: float, unknown_s: float) -> bool:
        """Return whether a piece fits; one that never ran is taken to need `unknown_s`."""
        latest = sorted(self._latest.get(key, ()))
        if not latest:
            return seconds >= unknown_s
        if len(latest) >= ENOUGH:
            return seconds >= latest[-2]
        needed = latest[-1] * self._doubt.get(key, 1.0)
        if seconds < needed:
            self._doubt[key] = self._doubt.get(key, 1.0) * DOUBTED
        return seconds >= needed

    def learn(self, key: Hashable, seconds: float) -> None:
        """Learn from a piece that ran."""
        self._latest.setdefault(key, deque(maxlen=LATEST)).append(seconds)
        self._doubt.pop(key, None)
