"""Transfers are posted before all are aborted, or not at all: one that is posted meanwhile could wait on the device for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from bpipe.comm.transport import communicators
from bpipe.comm.transport.communicators import Communicators
from bpipe.comm.transport.in_flight import InFlight
from bpipe.device import Streams
from bpipe.errors import TransferError
from bpipe.schedules import Channel, Purpose
from tests.patience import PATIENCE_S, ended, too_late

CPU, CHANNEL = torch.device("cpu"), Channel(Purpose.FORWARD, 0, 1)


class Made:
    """A communicator, of whose posts a test decides how they go."""

    supports_coalescing = True

    def __init__(self) -> None:
        self.posts, self.aborted, self.when_posted = 0, threading.Event(), lambda: None

    def _start_coalescing(self) -> None:
        pass

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        pass

    def _end_coalescing(self) -> Any:
        self.when_posted()
        self.posts += 1
        return self

    def wait(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def made() -> Made:
    return Made()


@pytest.fixture
def ours(made: Made, monkeypatch: pytest.MonkeyPatch) -> Communicators:
    monkeypatch.setattr(communicators, "free_bytes", lambda device: 0)
    ours = Communicators(CPU, InFlight(CPU, 2, Streams()))
    connect(ours, made)
    return ours


def connect(ours: Communicators, made: Made) -> None:
    ours.connect(CHANNEL, 0, lambda: made)


def post(ours: Communicators) -> None:
    ours.post(CHANNEL, [torch.zeros(1)], sends=True, what=lambda: "a message")


@pytest.mark.parametrize("end", [Communicators.abort, lambda ours: ours.close(is_whole=False)], ids=["aborted", "closed"])
def test_nothing_is_posted_afterwards(ours: Communicators, made: Made, end: Callable[[Communicators], None]) -> None:
    end(ours)
    before = made.posts
    with pytest.raises(TransferError, match="a message: aborted before it began"):
        post(ours)
    assert made.posts == before


def test_an_abort_waits_for_a_post(ours: Communicators, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "POST_S", PATIENCE_S)
    other = threading.Thread(target=ours.abort)

    def meanwhile() -> None:
        other.start()
        assert not made.aborted.wait(0.1)

    made.when_posted = meanwhile
    post(ours)
    ended(other)
    assert made.aborted.is_set()


def test_an_abort_ends_a_post_that_does_not_end(ours: Communicators, made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicators, "POST_S", 0.05)
    other = threading.Thread(target=ours.abort)

    def meanwhile() -> None:
        other.start()
        assert made.aborted.wait(PATIENCE_S), too_late("the abort of a post that does not end")
        made.aborted.clear()

    made.when_posted = meanwhile
    post(ours)
    assert made.aborted.is_set()
    ended(other)


def test_a_connection_that_is_made_too_late_is_aborted(ours: Communicators, made: Made) -> None:
    ours.abort()
    made.aborted.clear()
    connect(ours, made)
    assert made.aborted.is_set()


def test_a_connection_that_fails_on_its_first_transfer_is_aborted(ours: Communicators, monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing(Made):
        def _end_coalescing(self) -> Any:
            raise RuntimeError("no memory")

    failing = Failing()
    with pytest.raises(RuntimeError, match="no memory"):
        connect(ours, failing)
    assert failing.aborted.is_set()
