"""Who follows a step while it runs: told before and after each action, on the thread that does it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from bpipe.schedules import Action

if TYPE_CHECKING:
    from bpipe.runtime.run import Run

__all__: list[str] = []


class Observer:
    """Follows the steps of one rank. Each method does nothing: a subclass has those that it needs.

    Whoever keeps the `Run` keeps the step's tensors.
    """

    def started(self, run: Run) -> None:
        """A step is ready for its first action."""

    def before(self, run: Run, action: Action) -> None:
        """An action is about to be done."""

    def after(self, run: Run, action: Action) -> None:
        """An action was done without an error."""

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        """All actions of a step were done, and this is what they used."""
