"""What a thread of the host knows of the device: by itself, from who started it, and from who hands it a result.

Without this, a thread that waits for a stream would order what another thread does, which nothing tells of it.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any


def install(simulator: Any) -> None:
    """Give the threads that Python starts clocks of their own, for good."""
    _follow_threads(simulator)
    _follow_futures(simulator)


def _follow_threads(simulator: Any) -> None:
    start, join = threading.Thread.start, threading.Thread.join

    def starting(self: Any) -> None:
        known, run = simulator.known_here(), self.run

        def running() -> None:
            simulator.begin_thread()
            simulator.learn(known)
            try:
                run()
            finally:
                self._known_at_end = simulator.known_here()

        self.run = running
        start(self)

    def joining(self: Any, timeout: float | None = None) -> None:
        join(self, timeout)
        if not self.is_alive():
            simulator.learn(getattr(self, "_known_at_end", ([], [])))

    threading.Thread.start, threading.Thread.join = starting, joining  # type: ignore[method-assign]


def _follow_futures(simulator: Any) -> None:
    """Who is to fulfil a future knows what its maker knew; who gets the result, what was known when it was there."""
    future: Any = Future
    make, begin, result = future.__init__, future.set_running_or_notify_cancel, future.result
    fulfil, fail = future.set_result, future.set_exception

    def making(self: Any) -> None:
        make(self)
        self._known = simulator.known_here()

    def beginning(self: Any) -> bool:
        simulator.learn(self._known)
        return bool(begin(self))

    def fulfilling(self: Any, value: Any) -> None:
        self._known = simulator.known_here()
        fulfil(self, value)

    def failing(self: Any, error: Any) -> None:
        self._known = simulator.known_here()
        fail(self, error)

    def asking(self: Any, timeout: float | None = None) -> Any:
        try:
            return result(self, timeout)
        finally:
            if self.done():
                simulator.learn(self._known)

    future.__init__, future.set_running_or_notify_cancel, future.result = making, beginning, asking
    future.set_result, future.set_exception = fulfilling, failing
