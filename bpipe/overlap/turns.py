"""Two threads of which one runs at a time: they change over where one of them says so, always at the same points.

So the two halves of a pair run in the same order in every step and on every rank that has the same stage: their collectives meet
each other, and results do not depend on who is faster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch

from bpipe.device import random_state, set_random_state
from bpipe.errors import StageError

__all__: list[str] = []

LOOK_S = 0.2

RandomStates = list[torch.Tensor | None]


class Half(IntEnum):
    """The half of a pair that a thread runs."""

    FORWARD = 0
    BACKWARD = 1

    @property
    def other(self) -> Half:
        return Half(1 - self)

    @property
    def text(self) -> str:
        return self.name.lower()


class Turns:
    """The turns of a forward and a backward. The forward begins; each half has random numbers of its own meanwhile.

    Args:
        devices: besides the CPU, those whose random numbers the halves may use.
    """

    def __init__(self, devices: list[torch.device]) -> None:
        self._devices = devices
        self._changed = threading.Condition()
        self._turn = Half.FORWARD
        self._threads = [threading.get_ident(), 0]  # of each half
        self._ended: set[Half] = set()
        self._random: dict[Half, RandomStates] = {}
        self._before_backward: RandomStates = []
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
            if half.other not in self._ended:
                self._random[half] = self._random_states()
                self._give(half.other)
                self._await(half)
                self._restore(half)
            self._check(half)

    def end(self, half: Half, error: BaseException | None = None) -> None:
        """Note that a half has ended, and let the other one run."""
        with self._changed:
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
        end = None if seconds is None else time.monotonic() + seconds
        while not has_come():
            left = LOOK_S if end is None else min(LOOK_S, end - time.monotonic())
            if left <= 0:
                return False
            self._changed.wait(left)
        return True

    def _check(self, half: Half) -> None:
        if self.error is not None:
            raise StageError(f"this {half.text} was stopped, because the {half.other.text} beside it has failed") from self.error

    def _drawn(self, half: Half) -> StageError | None:
        """Return an error if a backward has drawn random numbers, which it would have drawn after the forward's."""
        if half is Half.FORWARD or not self._before_backward or self._are_equal(self._before_backward, self._random_states()):
            return None
        return StageError(
            "a backward draws random numbers, so its results would depend on how far the forward beside it has come: leave "
            "`schedule.overlap` unset for this model, or draw in the forward"
        )

    def _random_states(self) -> RandomStates:
        return [torch.get_rng_state(), *map(random_state, self._devices)]

    def _restore(self, half: Half) -> None:
        of_cpu, *others = self._random[half]
        assert of_cpu is not None
        torch.set_rng_state(of_cpu)
        for state, device in zip(others, self._devices):
            set_random_state(state, device)

    @staticmethod
    def _are_equal(one: RandomStates, other: RandomStates) -> bool:
        return all(a is None or b is None or torch.equal(a, b) for a, b in zip(one, other))


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
