"""Run a blocking call in a daemon thread, so that the caller can time out or be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from bpipe.comm.rendezvous.shortage import naming_shortage
from bpipe.errors import format_error

__all__: list[str] = []

T = TypeVar("T")
LOOK_S = 0.25


class GivenUpError(Exception):
    """The caller no longer waits for the work."""


class Interruptible:
    """Runs pieces of work, which check now and then whether they are still wanted.

    Args:
        look: called in the caller's thread now and then while it waits; raises to give up the work.
    """

    def __init__(self, look: Callable[[], None]) -> None:
        self._look = look
        self._reason: BaseException | None = None  # why the work was given up
        self.note = ""  # what it is waiting for
        self.has_begun = False

    def check(self, note: str) -> None:
        """Record what the work waits for, and raise if it is no longer wanted. The work calls this.

        Raises:
            GivenUpError: the caller has given up; it carries the reason, for other threads that wait for the work.
        """
        self.note = note
        if self._reason is not None:
            raise GivenUpError(format_error(self._reason))

    def look(self, note: str) -> None:
        """Record what the caller itself waits for, and raise if it has to give up. The caller calls this."""
        self.note = note
        self._look()

    def run(self, work: Callable[[], T]) -> T:
        """Run a piece of work in another thread, and wait for it.

        Raises:
            CommError: no thread can start.
        """
        results: list[T] = []
        errors: list[BaseException] = []
        done = threading.Event()

        def body() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            done.set()

        with naming_shortage():
            threading.Thread(target=body, name="bpipe-opening", daemon=True).start()
        self.has_begun = True
        try:
            while not done.wait(LOOK_S):
                self._look()
        except BaseException as error:
            self._reason = error
            raise
        if errors:
            raise errors[0]
        return results[0]
