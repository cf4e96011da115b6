"""Detect pipelines that two ranks call in different orders, which would deadlock."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Collection
from contextlib import suppress
from typing import TYPE_CHECKING

from bpipe.comm.activity import State
from bpipe.comm.frames import Kind

if TYPE_CHECKING:
    from bpipe.comm.control import Line

__all__: list[str] = []

_OPEN: weakref.WeakSet[Line] = weakref.WeakSet()  # of this process: the only place where its pipelines know of each other


def add(line: Line) -> None:
    _OPEN.add(line)


def remove(line: Line) -> None:
    _OPEN.discard(line)


def _lines() -> list[Line]:
    while True:
        with suppress(RuntimeError):  # another thread has opened or closed one in the meantime
            return list(_OPEN)


def crossed(line: Line, missing: Collection[int]) -> set[int]:
    """Return the missing ranks that wait for this one in a call of another pipeline, which this thread has not made.

    Args:
        line: the control plane of the pipeline that this thread calls.
        missing: the ranks that have not come to that call.
    """
    processes = {line.peers[rank].process: rank for rank in missing}
    waiting = {process for other in _lines() if other is not line for process in _waiting_in(other)}
    return {rank for process, rank in processes.items() if process in waiting}


def _waiting_in(line: Line) -> list[bytes]:
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
