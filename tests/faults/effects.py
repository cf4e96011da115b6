"""What strikes: each effect takes the scene and a value of the user's code, and tells when it happens."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.faults.scene import Scene
from tests.patience import until

Effect = Callable[[Scene, Any], Any]


def changing(change: Callable[[Any], Any]) -> Effect:
    """An output, gradient or loss that is not what it should be."""

    def effect(scene: Scene, value: Any) -> Any:
        scene.fired()
        return change(value)

    return effect


def raising(error: Callable[[], BaseException], *, after_s: float = 0.0) -> Effect:
    """An error, some seconds after the other ranks have had time to go on."""

    def effect(scene: Scene, value: Any) -> Any:
        time.sleep(after_s)
        scene.fired()
        raise error()

    return effect


def boom() -> BaseException:
    return ValueError("boom")


def calling(call: Callable[[Scene], object]) -> Effect:
    """A call from inside the user's code."""

    def effect(scene: Scene, value: Any) -> Any:
        scene.fired()
        call(scene)
        return value

    return effect


def signalling(number: signal.Signals) -> Effect:
    """A signal to this process."""
    return calling(lambda scene: send(number, os.getpid()))


def send(number: signal.Signals, *pids: int) -> None:
    """Send a signal, and stay here while it arrives."""
    for pid in pids:
        os.kill(pid, number)
    time.sleep(0.01)


def until_given_up(scene: Scene, value: Any = None) -> Any:
    """Code that takes its time, until this pipeline has failed because of that."""
    scene.fired()
    given_up(scene)
    return value


def given_up(scene: Scene) -> None:
    """Wait until the latest pipeline has failed, here or elsewhere."""
    control = scene.pipelines[-1].schedule.session.context.transport.control
    until(lambda: control.failure, "the pipeline gives up a rank whose own code does not end")


def sleeping(seconds: float) -> Effect:
    """Code that takes its time."""
    return calling(lambda scene: time.sleep(seconds))
