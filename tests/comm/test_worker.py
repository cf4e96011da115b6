"""A thread for jobs: in order, with their outcomes, and nothing kept once they are done."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial

import pytest

from bpipe.comm.transport.worker import Worker


class Thing:
    """Something that a job holds."""


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def ended(name: str) -> bool:
    """Whether a thread ends soon."""
    until = time.monotonic() + 10
    while name in names() and time.monotonic() < until:
        time.sleep(0.01)
    return name not in names()


def test_jobs_are_done_in_order_and_tell_what_they_gave() -> None:
    worker, done = Worker("in order"), []
    futures = [worker.submit(partial(done.append, index)) for index in range(5)]
    failing = worker.submit(partial(divmod, 1, 0))
    last = worker.submit(lambda: "after an error")
    assert [future.result(10) for future in futures] == [None] * 5
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        failing.result(10)
    assert last.result(10) == "after an error"
    worker.close()
    assert ended("in order")


def test_what_a_job_holds_is_gone_when_it_is_done() -> None:
    """Whoever waited may count the owners of a tensor that was sent."""
    worker = Worker("holding")
    for _ in range(200):
        thing = Thing()
        held, future = weakref.ref(thing), worker.submit(partial(id, thing))
        del thing
        future.result(10)
        assert held() is None
    worker.close()


def test_a_cancelled_job_is_left_out() -> None:
    worker, go = Worker("cancelling"), threading.Event()
    first, second, third = worker.submit(go.wait), worker.submit(lambda: 2), worker.submit(lambda: 3)
    assert second.cancel()
    go.set()
    assert (first.result(10), third.result(10)) == (True, 3)
    worker.close()


def test_a_worker_that_nobody_has_any_more_ends() -> None:
    worker = Worker("forgotten")
    assert "forgotten" in names()
    del worker
    gc.collect()
    assert ended("forgotten")
