"""What goes wrong while a forward and a backward run side by side."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import bpipe
from bpipe.errors import RankFailedError, StageError
from bpipe.overlap import TwoThreads
from tests.faults.case import Case, Setup, Strike
from tests.faults.effects import boom, raising, send
from tests.faults.scene import Scene

Half = Callable[[], None]
Wrong = Callable[[Scene, Half, Half], None]

SETUP = Setup(schedule=bpipe.DualPipeV, num_stages=4, options={"overlapped": True})  # rank 1 runs 2F2 beside 1B0
THERE = "the other raises too"


def paired(wrong: Wrong | None = None) -> Callable[[Scene], None]:
    """Steps whose pairs run in two threads, or on the rank at fault by a function that does something wrong."""

    def play(scene: Scene) -> None:
        pipeline = scene.open()
        pipeline.schedule.overlap = TwoThreads()
        if scene.is_culprit and wrong is not None:
            pipeline.schedule.overlap = lambda forward, backward: wrong(scene, forward, backward)
        for _ in range(2):
            pipeline.step()

    return play


def in_a_pair(name: str, error: str, *, strike: Strike | None = None, wrong: Wrong | None = None, **more: Any) -> Case:
    case = Case(
        name=name,
        outcome=f"StageError there, which names the pair; {THERE}",
        setup=SETUP,
        strike=strike,
        play=paired(wrong),
        here=StageError,
        there=RankFailedError,
        error=error,
    )
    return replace(case, **more)


def forward_alone(scene: Scene, forward: Half, backward: Half) -> None:
    scene.fired()
    forward()


def backward_twice(scene: Scene, forward: Half, backward: Half) -> None:
    forward()
    backward()
    scene.fired()
    backward()


def raise_it(scene: Scene, forward: Half, backward: Half) -> None:
    scene.fired()
    raise boom()


def swallow(scene: Scene, forward: Half, backward: Half) -> None:
    """An error of a half counts, whatever becomes of it."""
    for half in (forward, backward):
        with suppress(ValueError):
            half()


def interrupt(scene: Scene, value: Any) -> Any:
    """Ctrl-C while the main thread waits for the backward."""
    scene.fired()
    send(signal.SIGINT, os.getpid())
    time.sleep(0.5)
    return value


AN_ERROR = f"ValueError there, {THERE}"
CASES = [
    in_a_pair(
        "the forward of a pair raises",
        "ValueError: boom",
        strike=Strike(stage=2, microbatch=2, effect=raising(boom)),
        outcome=AN_ERROR,
        here=ValueError,
    ),
    in_a_pair(
        "the backward of a pair raises, in its thread",
        "ValueError: boom",
        strike=Strike(where="backward", stage=1, microbatch=0, effect=raising(boom)),
        outcome=AN_ERROR,
        here=ValueError,
    ),
    in_a_pair(
        "the backward of a pair raises, and the overlap function catches it",
        "ValueError: boom",
        strike=Strike(where="backward", stage=1, microbatch=0, effect=raising(boom)),
        wrong=swallow,
        outcome=AN_ERROR,
        here=ValueError,
    ),
    in_a_pair(
        "Ctrl-C while the backward of a pair runs in its thread",
        "KeyboardInterrupt",
        strike=Strike(where="backward", stage=1, microbatch=0, effect=interrupt),
        action="2F2",
        outcome=f"KeyboardInterrupt there; {THERE}",
        here=KeyboardInterrupt,
    ),
    in_a_pair("an overlap function raises", "ValueError: boom", wrong=raise_it, outcome=AN_ERROR, here=ValueError),
    in_a_pair(
        "an overlap function does not run the backward",
        "given 2F2 and 1B0: backward() was not called: call both, each once",
        wrong=forward_alone,
    ),
    in_a_pair(
        "an overlap function runs the backward twice",
        "given 2F2 and 1B0: backward() was called a second time",
        wrong=backward_twice,
    ),
]
