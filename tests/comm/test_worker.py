"""A thread for jobs: in order, with their outcomes, and nothing kept once they are done."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest

from bpipe.comm.transport.worker import Worker
from tests.patience import PATIENCE_S, until


class Thing:
    """Something that a job holds."""


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def wait_for_the_end_of(name: str) -> None:
    until(lambda: name not in names(), f"the thread {name} ends")


def test_jobs_are_done_in_order_and_tell_what_they_gave() -> None:
    worker, done = Worker("in order"), []
    futures = [worker.submit(partial(done.append, index)) for index in range(5)]
    failing = worker.submit(partial(divmod, 1, 0))
    last = worker.submit(lambda: "after an error")
    assert [future.result(PATIENCE_S) for future in futures] == [None] * 5
    assert done == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        failing.result(PATIENCE_S)
    assert last.result(PATIENCE_S) == "after an error"
    worker.close()
    wait_for_the_end_of("in order")


def test_what_a_job_holds_is_gone_when_it_is_done() -> None:
    """Whoever waited may count the owners of a tensor that was sent."""
    worker = Worker("holding")
    for _ in range(200):
        thing = Thing()
        held, future = weakref.ref(thing), worker.submit(partial(id, thing))
        del thing
        future.result(PATIENCE_S)
        assert held() is None
    worker.close()


def test_a_cancelled_job_is_left_out() -> None:
    worker, go = Worker("cancelling"), threading.Event()
    first, second, third = worker.submit(go.wait), worker.submit(lambda: 2), worker.submit(lambda: 3)
    assert second.cancel()
    go.set()
    assert (first.result(PATIENCE_S), third.result(PATIENCE_S)) == (True, 3)
    worker.close()


def test_a_worker_that_nobody_has_any_more_ends() -> None:
    worker = Worker("forgotten")
    assert "forgotten" in names()
    del worker
    gc.collect()
    wait_for_the_end_of("forgotten")
