"""Show a run's progress: a bar on a terminal, a line every few steps in a log, nothing on ranks that print nothing."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["Journal"]

LINE_EVERY = 5  # steps, where there is no terminal


class Journal:
    """Show steps, losses in nats per byte, and the time that is left.

    Args:
        history: the run adds to it: "step", the steps done; "losses", one per step; "validation_losses", by step.
        num_steps: steps in all.
        is_shown: False on all ranks but one.
    """

    def __init__(self, history: dict[str, Any], *, num_steps: int, is_shown: bool) -> None:
        self.history, self.num_steps, self.first_step = history, num_steps, history["step"]
        self.started = time.perf_counter()
        self.console = Console(quiet=not is_shown)
        self.bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[losses]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not (is_shown and self.console.is_terminal),
        )
        self.task = self.bar.add_task("", total=num_steps, completed=self.first_step, losses="")

    def __enter__(self) -> Journal:
        if self.first_step >= self.num_steps:
            self.console.print(f"step {self.first_step} of {self.num_steps} is done: give more --steps to go on")
        self.bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.bar.stop()

    def show(self) -> None:
        """Show the step that the history just gained."""
        step = self.history["step"]
        self.bar.update(self.task, completed=step, losses=self._losses())
        is_first = step == self.first_step + 1
        if self.bar.disable and (is_first or step % LINE_EVERY == 0 or step == self.num_steps):
            line = f"step {step}/{self.num_steps}  {self._losses()}  {self._left_s():.0f} s left"
            self.console.print(line, highlight=False)

    def _losses(self) -> str:
        validation = list(self.history["validation_losses"].values())
        return f"loss {self.history['losses'][-1]:.3f}" + (f"  validation {validation[-1]:.3f}" if validation else "")

    def _left_s(self) -> float:
        done = self.history["step"] - self.first_step
        return (self.num_steps - self.history["step"]) * (time.perf_counter() - self.started) / done
