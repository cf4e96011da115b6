"""Detect pipelines that two ranks call in different orders, which would deadlock."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import Protocol

from bpipe.comm.health.failure import Failure

__all__: list[str] = []


class Peer(Protocol):
    """Another rank of a pipeline, and the process that it is in."""

    process: bytes


class OpenPipeline(Protocol):
    """The part of a pipeline's control plane that this module reads: `driver.ConnectedControlPlane` has it."""

    @property
    def peers(self) -> Mapping[int, Peer]:
        """The ranks that this one is linked with."""

    def awaited_by(self) -> list[bytes]:
        """Return the processes that wait in a call of this pipeline that the current thread usually makes, and is not making."""

    def fail(self, failure: Failure) -> None:
        """Break it, on all ranks."""

    def abandon(self) -> None:
        """Close its connections without a message to the peers."""


_OPEN: weakref.WeakSet[OpenPipeline] = weakref.WeakSet()  # of this process: the only place where its pipelines know of each other


def add(pipeline: OpenPipeline) -> None:
    _OPEN.add(pipeline)


def remove(pipeline: OpenPipeline) -> None:
    _OPEN.discard(pipeline)


def _pipelines() -> list[OpenPipeline]:
    while True:
        with suppress(RuntimeError):  # another thread has opened or closed one in the meantime
            return list(_OPEN)


def crossed(pipeline: OpenPipeline, missing: Collection[int]) -> dict[int, OpenPipeline]:
    """Return the missing ranks that wait for this one in a call of another pipeline, which this thread has not made, and that one.

    Both ranks see it where all ranks are linked. Of many ranks it suffices that those see it whose predecessor waits elsewhere:
    if some ranks wait in one pipeline and some in another, and their order is the same in both, there is such a rank.

    Args:
        pipeline: the one that this thread calls.
        missing: the ranks that have not come to that call.
    """
    waiting = {process: other for other in _pipelines() if other is not pipeline for process in other.awaited_by()}
    processes = {rank: pipeline.peers[rank].process for rank in missing}
    return {rank: waiting[process] for rank, process in processes.items() if process in waiting}


def _close_in_fork() -> None:
    """Close the connections of the parent's pipelines in a child, which would otherwise keep them open after the parent ends."""
    for pipeline in _pipelines():
        pipeline.abandon()


os.register_at_fork(after_in_child=_close_in_fork)
