"""Detect pipelines that two ranks call in different orders, which would deadlock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Protocol

from bpipe.comm.health.activity import Activity, State
from bpipe.comm.wire.frames import Frame, Kind

__all__: list[str] = []


class Peer(Protocol):
    """Another rank of a pipeline, and the process that it is in."""

    process: bytes


class OpenPipeline(Protocol):
    """The control plane of a pipeline of this process, as far as it is looked at here: `control.Line`."""

    activity: Activity
    caller: int  # the thread that made the latest call
    is_closing: bool

    @property
    def calls(self) -> Mapping[int, Mapping[int, Frame]]:
        """The frames of the others' collective calls, by number and rank."""

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The other ranks."""

    def abandon(self) -> None:
        """Give up its connections without a word."""


_OPEN: weakref.WeakSet[OpenPipeline] = weakref.WeakSet()  # of this process: the only place where its pipelines know of each other


def add(line: OpenPipeline) -> None:
    _OPEN.add(line)


def remove(line: OpenPipeline) -> None:
    _OPEN.discard(line)


def _lines() -> list[OpenPipeline]:
    while True:
        with suppress(RuntimeError):  # another thread has opened or closed one in the meantime
            return list(_OPEN)


def crossed(line: OpenPipeline, missing: Collection[int]) -> set[int]:
    """Return the missing ranks that wait for this one in a call of another pipeline, which this thread has not made.

    Args:
        line: the control plane of the pipeline that this thread calls.
        missing: the ranks that have not come to that call.
    """
    processes = {line.peers[rank].process: rank for rank in missing}
    waiting = {process for other in _lines() if other is not line for process in _waiting_in(other)}
    return {rank for process, rank in processes.items() if process in waiting}


def _waiting_in(line: OpenPipeline) -> list[bytes]:
    """Return the processes that wait in a call of a pipeline that this thread also calls, but is not calling now."""
    if line.activity.state is not State.OUTSIDE or line.is_closing or line.caller != threading.get_ident():
        return []
    frames = list(line.calls.get(line.activity.call + 1, {}).items())
    return [line.peers[rank].process for rank, frame in frames if frame.kind is Kind.CALL]


def _close_in_fork() -> None:
    """Close the connections of the parent's pipelines in a child, which would otherwise keep them open after the parent ends."""
    for line in _lines():
        line.abandon()


os.register_at_fork(after_in_child=_close_in_fork)
