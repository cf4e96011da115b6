"""Give the two halves of a pair to the user's function, and check that it has run both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from typing import Any

from bpipe.cleanup import note
from bpipe.comm.health.activity import place_of
from bpipe.engine.run import Run
from bpipe.errors import StageError
from bpipe.logs import LOG
from bpipe.model.state.reachable import Reachable
from bpipe.plan.action import Action

__all__: list[str] = []

Half = Callable[[], None]
Overlap = Callable[[Half, Half], object]


class SideBySide:
    """Runs pairs of a forward and a backward by a function of the user's, which has to call each of them once."""

    def __init__(self, function: Overlap) -> None:
        self.function = function
        self._has_warned = False

    def runs(self, run: Run, users: Sequence[Any]) -> bool:
        """Return whether a step's pairs run side by side: not where it has none, or FSDP2 or DDP act between computations.

        Args:
            users: the modules and the loss of the step, of whose generators the function learns if it has a `begin_step`.
        """
        if not run.plan.overlapped:
            return False
        if run.is_sharded and not self._has_warned:
            self._has_warned = True
            LOG.warning("forwards and backwards run one after the other, because a stage is under FSDP2 or DDP, which expect that")
        begin_step = getattr(self.function, "begin_step", None)
        if begin_step is not None and not run.is_sharded:
            begin_step(Reachable(users).sources)
        return not run.is_sharded

    def __call__(self, run: Run, execute: Callable[[Action], None], forward: Action, backward: Action) -> None:
        """Run a pair.

        Raises:
            StageError: the function has not called both halves, each once and to its end, and the forward in its own thread.
            BaseException: an error of one of the halves, or of the function.
        """
        place = f"the overlap function, given {run.plan.show(forward)} and {run.plan.show(backward)}"
        halves = (
            _Half(execute, forward, f"{place}: forward()", get_ident()),
            _Half(execute, backward, f"{place}: backward()", None),
        )
        run.is_side_by_side = True
        try:
            self.function(*halves)
            for half in halves:
                half.check()
        except BaseException as error:
            note(error, f"bpipe: in {place}; {place_of(forward, run.plan.units)}, step {run.step}")
            raise
        finally:
            run.is_side_by_side = False


class _Half:
    """One half of a pair, which the function calls: in a certain thread, or with None in any."""

    def __init__(self, execute: Callable[[Action], None], action: Action, place: str, thread: int | None) -> None:
        self._execute, self._action, self._place, self._thread = execute, action, place, thread
        self._has_begun = self._has_ended = False
        self._error: BaseException | None = None

    def __call__(self) -> None:
        """Run this half."""
        if self._has_begun:
            raise StageError(f"{self._place} was called a second time")
        if self._thread not in (None, get_ident()):
            raise StageError(f"{self._place} was called in another thread than the function: only backward() may be")
        self._has_begun = True
        try:
            self._execute(self._action)
        except BaseException as error:
            self._error = error
            raise
        self._has_ended = True

    def check(self) -> None:
        """Raise unless this half has run to its end; an error of it counts even if the function has caught it."""
        error, self._error = self._error, None  # it would keep its frames alive
        if error is not None:
            raise error
        if not self._has_begun:
            raise StageError(f"{self._place} was not called: call both, each once")
        if not self._has_ended:
            raise StageError(f"{self._place} was still running when the function returned: wait for its thread")
