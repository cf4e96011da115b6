"""Observers of a step while it runs: they are told before and after each action, on the thread that does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bpipe.schedules import Action

if TYPE_CHECKING:
    from bpipe.runtime.run import Run

__all__: list[str] = []


class Observer:
    """Follows the steps of one rank. Each method does nothing: a subclass overrides those that it needs.

    An observer that keeps the `Run` keeps the step's tensors.
    """

    def started(self, run: Run) -> None:
        """Follow a step that is ready for its first action."""

    def before(self, run: Run, action: Action) -> None:
        """Follow an action that is about to be done."""

    def after(self, run: Run, action: Action) -> None:
        """Follow an action that was done without an error."""

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        """Follow a step whose actions were all done; `stats` is what they used."""
