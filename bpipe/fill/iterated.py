"""A fill job made of pieces that run one after the other, each of which is measured when it runs."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from typing import Any

from bpipe.fill.fence import Fence, fence_here
from bpipe.fill.job import Job, OnError
from bpipe.fill.piece_seconds import KnownSeconds

__all__ = ["Pieces"]

UNKNOWN_S = 0.01  # what an unknown piece is taken to need at most


class Pieces(Job):
    """Any callable that yields: what it does between two yields is a piece.

    How long a piece takes is known from earlier ones: what is yielded is the key of the next piece, and those with equal keys take
    alike. One with a new key runs where at least `unknown_s` is free.

    Args:
        make: makes the iterator, such as a generator function. It is called when the first piece runs, and again after the last
            one if `repeats`.
        num_bytes: what a piece takes of the device at most while it runs.
        repeats: whether to begin again after the end.
        unknown_s: see above.
        name: `Job.name`; default: the callable's.
        on_error: `Job.on_error`.
        budget: `Job.budget`.
        held_bytes: `Job.held_bytes`.
        static_bytes: `Job.static_bytes`.
        grace_s: `Job.grace_s`.

    Attributes:
        is_over: whether the last piece has run.
        num_pieces: how many have run.

    Example:
        >>> def count():
        ...     for i in range(3):
        ...         yield
        >>> job = Pieces(count)
        >>> [job.step(1.0, 0) is None for _ in range(5)], job.is_over
        ([False, False, False, False, True], True)
    """

    _pieces: Iterator[Any] | None = None
    _fence: Fence | None = None  # in whose thread the iterator was made

    def __init__(
        self,
        make: Callable[[], Iterable[Hashable]],
        *,
        num_bytes: int = 0,
        repeats: bool = False,
        unknown_s: float = UNKNOWN_S,
        name: str = "",
        on_error: OnError = "fail",
        budget: int | None = None,
        held_bytes: int | None = 0,
        static_bytes: int = 0,
        grace_s: float = Job.grace_s,
    ) -> None:
        self._make, self._num_bytes, self._repeats, self._unknown_s = make, num_bytes, repeats, unknown_s
        self.name = name or getattr(make, "__name__", "")
        self.on_error, self.budget, self.grace_s = on_error, budget, grace_s
        self.held_bytes, self.static_bytes = held_bytes, static_bytes
        self._next: Hashable = None  # the key of the piece that runs next
        self._known = KnownSeconds()
        self.is_over, self.num_pieces = False, 0

    def step(self, seconds: float, num_bytes: int) -> float | None:
        """Run the next piece, if it fits."""
        if self.is_over or num_bytes < self._num_bytes or not self._known.fits(self._next, seconds, self._unknown_s):
            return None
        began, key = time.perf_counter(), self._next
        if self._pieces is None:
            self._pieces, self._fence = iter(self._make()), fence_here()
            if self._fence is not None and isinstance(self._pieces, Generator):
                self._fence.generators.add(self._pieces)
        try:
            self._next = next(self._pieces)
        except StopIteration:
            self._pieces, self._next, self.is_over = None, None, not self._repeats
        self.num_pieces += 1
        took = time.perf_counter() - began
        self._known.learn(key, took)
        return took

    def __del__(self) -> None:
        """Leave the contexts in which a generator has yielded where it entered them: they may belong to its thread.

        The garbage collector calls this in any thread. Beside training, it must not swap the state of the process.
        """
        fence, pieces = self._fence, self._pieces
        if fence is not None and isinstance(pieces, Generator) and fence.is_of_this_thread and not sys.is_finalizing():
            fence.run(pieces.close)
