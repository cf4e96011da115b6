"""Work in a thread of its own: its caller gives it up, and the work says why to whoever else waits for it."""

from __future__ import annotations

import threading

import pytest

from bpipe.comm.rendezvous.interruptible import GivenUpError, Interruptible
from tests.patience import PATIENCE_S, too_late


def test_the_work_hears_why_it_is_given_up() -> None:
    heard: list[BaseException] = []
    ended = threading.Event()

    def look() -> None:
        raise TimeoutError(f"waited too long: {interruptible.note}")

    def work() -> None:
        try:
            while True:
                interruptible.check("for rank 1")
        except GivenUpError as error:
            heard.append(error)
            ended.set()

    interruptible = Interruptible(look)
    with pytest.raises(TimeoutError, match="waited too long: for rank 1"):
        interruptible.run(work)
    assert ended.wait(PATIENCE_S), too_late("the work hears that it is given up")
    assert str(heard[0]) == "TimeoutError: waited too long: for rank 1"


def test_what_the_work_returns_and_raises_is_the_caller_s() -> None:
    interruptible = Interruptible(lambda: None)
    assert interruptible.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible.run(lambda: 1 / 0)
