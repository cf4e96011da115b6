"""Run the two halves of a pair in two threads, of which one runs at a time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

from bpipe.device.generators import PYTHON, GlobalNumPy, Source
from bpipe.device.thread_state import ThreadState, devices_in_use
from bpipe.errors import StageError
from bpipe.logs import LOG
from bpipe.overlap.turns import Half, Turns, running
from bpipe.torch_private.engine_and_graph import hooks_around
from bpipe.torch_private.modes import dispatch_modes, function_modes

__all__ = ["TwoThreads"]

GRACE_S = 5.0  # seconds that a half gets to reach a point where it stops, after the other one has failed

Work = Callable[[], None]


class TwoThreads:
    """Run a forward and a backward side by side: while one waits for its communication, the other one computes.

    The forward runs in the caller's thread, the backward in a second one, with the caller's device, stream, autocast and grad mode.
    One of them runs at a time. They change over where a module calls `yield_here` or `all_to_all`, in its forward and at the same
    points of its backward, always in the same order. Results are those of one after the other to the bit.

    Where a torch function mode, a dispatch mode or a saved-tensor hook is active around the step, which belong to a thread, pairs
    run one after the other, and the logger "bpipe" says so once.

    Args:
        grace_s: after one half has failed, seconds that the other one gets to end, or to reach a point where it changes over.

    Raises:
        StageError: from a call, if a backward draws torch's random numbers, or other ones that the forward beside it draws, too
            (a warning instead, if another thread may have drawn these); else the error of the half that failed first.

    Example:
        >>> order = []
        >>> from bpipe.overlap import TwoThreads, yield_here
        >>> def half(name):
        ...     for number in range(2):
        ...         order.append(f"{name}{number}")
        ...         yield_here()
        >>> TwoThreads()(lambda: half("F"), lambda: half("B"))
        >>> order
        ['F0', 'B0', 'F1', 'B1']
    """

    def __init__(self, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._has_warned = False
        self._worker: _Worker | None = None
        self._global: dict[str, Source | GlobalNumPy] = {"Python's numbers": PYTHON, "NumPy's numbers": GlobalNumPy()}
        self._sources = self._global

    def begin_step(self, sources: Sequence[Source]) -> None:
        """Learn the generators of the modules and the loss that a step runs: from these, too, only one half of a pair may draw."""
        own = {f"generator {number} of the rank's modules": one for number, one in enumerate(sources)}
        self._sources = {**self._global, **own}

    def __repr__(self) -> str:
        return f"TwoThreads(grace_s={self._grace_s:g})"

    def __call__(self, forward: Work, backward: Work) -> None:
        """Run both, and return when both have ended."""
        if why := _bound_to_thread():
            if not self._has_warned:
                LOG.warning(
                    "forwards and backwards run one after the other, because %s is active, which belongs to one thread", why
                )
            self._has_warned = True
            forward()
            backward()
            return
        devices = devices_in_use()
        turns, state = Turns(devices, self._sources), ThreadState(devices)
        worker, self._worker = self._worker or _Worker(), None  # a thread whose work has not ended is lost
        try:
            with running(turns):
                try:
                    worker.put(lambda: state.context.run(_run_backward, backward, turns, state))
                    forward()
                except BaseException as error:
                    turns.end(Half.FORWARD, error)
                else:
                    turns.end(Half.FORWARD)
                if self._joined(turns):
                    self._worker = worker
                else:
                    LOG.warning("the backward of a pair has not ended within %g s after its forward failed", self._grace_s)
            if turns.error is not None:
                raise turns.error
            turns.close()
        finally:
            turns.error = None  # it would keep this frame alive

    def _joined(self, turns: Turns) -> bool:
        """Wait for the backward, but not for long once something has failed; return whether it has ended."""
        while turns.error is None:
            try:
                if turns.join(Half.BACKWARD):
                    return True
            except BaseException as error:  # Ctrl-C
                turns.end(Half.FORWARD, error)
        return turns.join(Half.BACKWARD, self._grace_s)


def _bound_to_thread() -> str:
    """Return what is active in the calling thread that no other thread can have, too; empty if nothing is."""
    if function_modes():
        return "a torch function mode, such as a default device"
    if dispatch_modes():
        return "a torch dispatch mode"
    return "a saved-tensor hook around the step" if hooks_around() is not None else ""


def _run_backward(backward: Work, turns: Turns, state: ThreadState) -> None:
    try:
        with state.entered():
            turns.begin_backward()
            backward()
    except BaseException as error:
        turns.end(Half.BACKWARD, error)
    else:
        turns.end(Half.BACKWARD)


class _Worker:
    """A thread that waits for work. It ends with the process, or when nobody can give it work any more."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        thread = threading.Thread(target=_serve, args=(self._queue,), name="bpipe-backward", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise StageError(
                f"TwoThreads takes a second thread, and none can start ({error}): raise the limit of threads (`ulimit -u`, or the "
                "container's), or leave schedule.overlap unset"
            ) from error
        weakref.finalize(self, self._queue.put, None)

    def put(self, work: Work) -> None:
        self._queue.put(work)


def _serve(queue: SimpleQueue[Work | None]) -> None:
    while (work := queue.get()) is not None:
        work()
        del work  # which keeps a step's tensors alive
