"""Two threads of which one runs at a time: they change over where one of them says so, always at the same points.

So the two halves of a pair run in the same order in every step and on every rank that has the same stage: their collectives meet
each other, and results do not depend on who is faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from math import inf
from types import MappingProxyType
from typing import Any

import torch

from bpipe.device.generators import PYTHON, TORCH, GlobalNumPy, Source, are_equal, threads_beside, torch_on
from bpipe.errors import StageError
from bpipe.logs import warn_once

__all__: list[str] = []

LOOK_S = 0.2


class Half(IntEnum):
    """The half of a pair that a thread runs."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def other(self) -> Half:
        return Half(1 - self)


class Turns:
    """The turns of a forward and a backward. The forward begins; each half has random numbers of torch's own meanwhile.

    Args:
        devices: besides the CPU, those whose random numbers the halves may use.
        sources: others that they may draw from, by name: Python's, NumPy's, and the generators of modules.
    """

    def __init__(self, devices: list[torch.device], sources: Mapping[str, Source | GlobalNumPy] = MappingProxyType({})) -> None:
        self._sources = sources
        self._torch = [TORCH, *map(torch_on, devices)]
        self._global = {name for name, source in sources.items() if source is PYTHON or isinstance(source, GlobalNumPy)}
        self._states = {name: source.get() for name, source in sources.items()}  # where the turn began
        self._drew: dict[Half, set[str]] = {Half.FORWARD: set(), Half.BACKWARD: set()}
        self._changed = threading.Condition()
        self._turn = Half.FORWARD
        self._threads = [threading.get_ident(), 0]  # of each half
        self._ended: set[Half] = set()
        self._random: dict[Half, list[Any]] = {}  # of torch, where each half goes on
        self._before_backward: list[Any] = []
        self.error: BaseException | None = None  # the first one of either half

    def begin_backward(self) -> None:
        """Wait for the backward's first turn, in its thread.

        Raises:
            StageError: the forward has failed.
        """
        with self._changed:
            self._threads[Half.BACKWARD] = threading.get_ident()
            self._await(Half.BACKWARD)
            self._before_backward = self._random_states()

    def change_over(self, half: Half) -> None:
        """Let the other half run up to where it changes over, or to its end.

        Raises:
            StageError: the other half has failed.
        """
        with self._changed:
            self._end_turn(half)
            if half.other not in self._ended:
                self._random[half] = self._random_states()
                self._give(half.other)
                self._await(half)
                self._restore(half)
            self._check(half)

    def end(self, half: Half, error: BaseException | None = None) -> None:
        """Note that a half has ended, and let the other one run."""
        with self._changed:
            if error is None:
                self._end_turn(half)
            if self.error is None:
                self.error = error or self._drawn(half)
            self._random[half] = self._random_states()
            self._ended.add(half)
            self._give(half.other)

    def join(self, half: Half, seconds: float | None = None) -> bool:
        """Wait until a half has ended, at most some seconds, and return whether it has."""
        with self._changed:
            return self._wait_for(lambda: half in self._ended, seconds)

    def close(self) -> None:
        """Leave the random numbers as the forward has left them: a backward draws none."""
        with self._changed:
            self._restore(Half.FORWARD)

    def half_here(self) -> Half | None:
        """Return the half that the calling thread runs; None for a thread that belongs to neither."""
        here = threading.get_ident()
        return Half(self._threads.index(here)) if here in self._threads else None

    def _give(self, half: Half) -> None:
        self._turn = half
        self._changed.notify_all()

    def _await(self, half: Half) -> None:
        self._wait_for(lambda: self._turn is half or self.error is not None)
        self._check(half)

    def _wait_for(self, has_come: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait, and look up every now and then: Python handles Ctrl-C in its main thread, but only while that runs."""
        end = inf if seconds is None else time.monotonic() + seconds
        while not self._changed.wait_for(has_come, min(LOOK_S, end - time.monotonic())):
            if time.monotonic() >= end:
                return False
        return True

    def _check(self, half: Half) -> None:
        if self.error is not None:
            this, other = half.name.lower(), half.other.name.lower()
            raise StageError(f"this {this} was stopped, because the {other} beside it has failed") from self.error

    def _end_turn(self, half: Half) -> None:
        """Note what a half has drawn in its turn; both may not draw from the same source, which one after the other would share."""
        before, self._states = self._states, {name: source.get() for name, source in self._sources.items()}
        self._drew[half] |= {name for name, state in self._states.items() if not are_equal(state, before[name])}
        both = self._drew[half] & self._drew[half.other]
        if both and both <= self._global and (threads := threads_beside(*self._threads)):
            warn_once(
                "numbers of pairs",
                "random numbers were drawn both during a backward and during the forward beside it (%s), by these or by another "
                "thread of this process (%s). If both draw them themselves, leave `schedule.overlap` unset: results depend on how "
                "far the forward has come. If another thread does, as one that loads data, give it a generator of its own",
                ", ".join(sorted(both)),
                threads,
            )
        elif both and self.error is None:
            self.error = StageError(
                f"a backward and the forward beside it both draw random numbers ({', '.join(sorted(both))}), so its results would "
                "depend on how far the forward has come: leave `schedule.overlap` unset for this model, or draw in forwards alone"
            )

    def _drawn(self, half: Half) -> StageError | None:
        """Return an error if a backward has drawn random numbers, which it would have drawn after the forward's."""
        if half is Half.FORWARD or all(map(are_equal, self._before_backward, self._random_states())):
            return None
        return StageError(
            "a backward draws random numbers, so its results would depend on how far the forward beside it has come: leave "
            "`schedule.overlap` unset for this model, or draw in the forward"
        )

    def _random_states(self) -> list[Any]:
        return [source.get() for source in self._torch]

    def _restore(self, half: Half) -> None:
        for source, state in zip(self._torch, self._random[half]):
            source.set(state)


_RUNNING: list[Turns] = []  # one for each pipeline of the process that runs a pair now


@contextmanager
def running(turns: Turns) -> Iterator[None]:
    """Let `change_over` find the turns of a pair while it runs."""
    _RUNNING.append(turns)
    try:
        yield
    finally:
        _RUNNING.remove(turns)


def change_over() -> None:
    """Let the other half of the pair run that this thread belongs to; do nothing where there is none.

    Autograd runs the backward of an asynchronous device in threads of its own, which are not Python's: they are the backward's,
    as long as no second pipeline of this process runs a pair.
    """
    for turns in list(_RUNNING):
        half = turns.half_here()
        if half is not None:
            turns.change_over(half)
            return
    if len(_RUNNING) == 1 and isinstance(threading.current_thread(), threading._DummyThread):
        _RUNNING[0].change_over(Half.BACKWARD)
