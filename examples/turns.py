"""Which schedule takes which step: plain and balanced 1F1B in turns at first, to compare them, then balanced."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import bpipe

__all__ = ["Turns"]


class Turns:
    """The first steps in turns; of them the balanced ones are traced, but for the first, which also agrees on shapes.

    Every rank asks for every step: where tracing starts, all do.

    Args:
        plain: the schedule to compare with.
        balanced: the one that trains.
        steps: the steps that they take in turns.
        folder: where the trace goes.
    """

    def __init__(self, plain: bpipe.Schedule, balanced: bpipe.Schedule, *, steps: range, folder: Path) -> None:
        self._plain, self._balanced, self._steps = plain, balanced, steps
        self.trace = bpipe.trace(balanced, folder)
        self._tracing = ExitStack()

    def __enter__(self) -> Turns:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._tracing.__exit__(kind, error, traceback)

    def take(self, step: int) -> tuple[str, bpipe.Schedule]:
        """Return whose turn it is, by name."""
        if step in self._steps[2:3]:
            self._tracing.enter_context(self.trace)
        if step == self._steps.stop:
            self._tracing.close()
        return ("plain", self._plain) if step in self._steps[::2] else ("balanced", self._balanced)
