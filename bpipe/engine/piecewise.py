"""A forward or a backward in pieces: what the plan puts between them runs when the computation reaches them."""

from __future__ import annotations

from collections.abc import Callable

from bpipe.schedules import Action, Op

__all__: list[str] = []


class PiecesOf:
    """The pieces of one computation while it runs.

    Args:
        first: the first piece; `last` is the part of the last one.
        advance: does everything that the plan has up to a piece, and begins it.
    """

    def __init__(self, first: Action, last: int, advance: Callable[[Action], None]) -> None:
        self._first, self._last, self._advance = first, last, advance
        self._part, self._step = first.part, 1 if first.op is Op.F else -1
        self._error: BaseException | None = None

    def reach(self, part: int) -> None:
        """Go on to the piece that saves or needs a part; those before it that autograd passed over are begun on the way.

        What is saved behind the last piece belongs to it: a piece that the plan does not have would never be reached.

        What this raises passes through the user's forward, which may catch it, so it is raised again until the computation ends.
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
        """Go on to the last piece, when the computation has ended."""
        self.reach(self._last)
