"""A thread that does jobs one after the other, and does not keep the process from ending."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from bpipe.comm.rendezvous.shortage import naming_shortage

__all__: list[str] = []

T = TypeVar("T")
ENDS_S = 1.0  # whoever joins a worker has ended what its job may wait for
Jobs = SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]


class Worker:
    """A daemon thread, because at exit the interpreter waits for the threads of `concurrent.futures` before it does anything else.

    Args:
        name: the thread's name.

    Raises:
        CommError: no thread can start.
    """

    def __init__(self, name: str) -> None:
        self._jobs: Jobs = SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        with naming_shortage():
            self._thread.start()
        self._finalizer = weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        """Queue a job behind those that were submitted before, and return its future."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Let the thread end once it has done all jobs."""
        self._finalizer()

    def join(self) -> None:
        """Close it, and wait until the thread has ended, but not for long."""
        self.close()
        if threading.current_thread() is not self._thread:
            self._thread.join(ENDS_S)


def _work(jobs: Jobs) -> None:
    while (one := jobs.get()) is not None:
        job, future = one
        del one
        result, error = _outcome(job) if future.set_running_or_notify_cancel() else (None, None)
        del job  # and what it holds, before anybody goes on
        if error is not None:
            future.set_exception(error)
        elif not future.cancelled():
            future.set_result(result)
        del future, result, error


def _outcome(job: Callable[[], Any]) -> tuple[Any, BaseException | None]:
    try:
        return job(), None
    except BaseException as error:
        return None, error
