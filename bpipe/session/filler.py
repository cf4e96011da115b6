"""What runs while a rank waits, as a session sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bpipe.engine.run import Observer, Run
from bpipe.schedules import Action

__all__: list[str] = []


class Filler(Observer):
    """Fills the time in which a rank waits: before an action that waits, and while ranks begin a step."""

    @property
    def job(self) -> Any:
        """What it runs; None once that was stopped."""
        return None

    def drop(self) -> None:
        """Run nothing any more."""

    def returned(self, result: Any) -> None:
        """Learn what a step that has finished is about to return, which the user may hold from then on."""

    def between_steps(self, have_come: Callable[[], bool]) -> None:
        """Fill the time until all ranks have come to a step. The other ranks already know that this one has come.

        Args:
            have_come: tells, without waiting, whether all have.
        """

    def numbers(self) -> dict[str, float]:
        """Return the numbers of the latest step, to be added to its stats."""
        return {}


def both(outer: Observer | None, inner: Observer | None) -> Observer | None:
    """Return one observer for two of the same run; the first one's actions last longer."""
    return _Both(outer, inner) if outer is not None and inner is not None else outer or inner


class _Both(Observer):
    def __init__(self, outer: Observer, inner: Observer) -> None:
        self._outer, self._inner = outer, inner

    def started(self, run: Run) -> None:
        self._outer.started(run)
        self._inner.started(run)

    def before(self, run: Run, action: Action) -> None:
        self._outer.before(run, action)
        self._inner.before(run, action)

    def after(self, run: Run, action: Action) -> None:
        self._inner.after(run, action)
        self._outer.after(run, action)
