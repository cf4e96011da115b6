"""Wait for what must happen, on a machine of any speed: only what hangs, or a machine that is too slow, runs out of patience."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")
PATIENCE_S = 60.0  # many times what anything here takes


def too_late(what: str, seconds: float = PATIENCE_S) -> str:
    """What a test says when a deadline is over."""
    return f"not within {seconds:g} s: {what}. Either it hangs, or this machine is too slow"


def until(has_happened: Callable[[], object], what: str) -> None:
    """Wait until something has happened."""
    deadline = time.monotonic() + PATIENCE_S
    while not has_happened():
        assert time.monotonic() < deadline, too_late(what)
        time.sleep(0.002)


def ended(thread: threading.Thread) -> None:
    """Wait until a thread has ended."""
    thread.join(PATIENCE_S)
    assert not thread.is_alive(), too_late(f"the end of the thread {thread.name}")


def outcomes(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Make calls in threads of their own, side by side; errors are results, also that a call does not end."""
    found: list[Any] = [AssertionError(too_late(f"the end of call {number} of {len(calls)}")) for number in range(len(calls))]

    def make(number: int, call: Callable[[], Any]) -> None:
        try:
            found[number] = call()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=make, args=each, daemon=True) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return found


def outcome(call: Callable[[], T]) -> T:
    """Make a call that must not hang."""
    (found,) = outcomes([call])
    if isinstance(found, BaseException):
        raise found
    return found
