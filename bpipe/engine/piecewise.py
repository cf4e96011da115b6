"""Run a forward or a backward in pieces: the plan's actions between two pieces run when the computation reaches them."""

from __future__ import annotations

from collections.abc import Callable

from bpipe.schedules import Action, Op

__all__: list[str] = []


class PiecesOf:
    """The pieces of one computation while it runs.

    Args:
        first: the first piece; `last` is the part of the last one.
        advance: runs every action that the plan has before a piece, and begins the piece.
    """

    def __init__(self, first: Action, last: int, advance: Callable[[Action], None]) -> None:
        self._first, self._last, self._advance = first, last, advance
        self._part, self._step = first.part, 1 if first.op is Op.F else -1
        self._error: BaseException | None = None

    def reach(self, part: int) -> None:
        """Advance to the piece that saves or needs a part; pieces before it that autograd has skipped are begun on the way.

        Tensors saved behind the last piece belong to it: a piece that is not in the plan would never be reached.

        An error raised here passes through the user's forward, which may catch it, so it is raised again until the end.
        """
        if self._error is not None:
            raise self._error
        while (part - self._part) * self._step > 0 and self._part != self._last:
            self._part += self._step
            try:
                self._advance(self._first._replace(part=self._part))
            except BaseException as error:
                self._error = error
                raise

    def finish(self) -> None:
        """Advance to the last piece, after the computation has ended."""
        self.reach(self._last)
