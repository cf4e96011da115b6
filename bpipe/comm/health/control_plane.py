"""The control plane of a pipeline, beside its transfers: collective calls, failures, and what each rank is doing."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bpipe.comm.health.activity import Activity
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.failure import Failure

__all__: list[str] = []

Meanwhile = Callable[[Callable[[], bool]], None]  # gets what tells, without waiting, whether all ranks have come


class ControlPlane(ABC):
    """One rank's end of the control plane.

    Attributes:
        activity: what this rank is doing, written by the threads that do it.
        channel_sockets: connections of the pipeline's channels, which a forked child must close as well.
    """

    def __init__(self) -> None:
        self.activity = Activity()
        self.channel_sockets: list[socket.socket] = []

    @property
    @abstractmethod
    def failure(self) -> Failure | None:
        """The first failure that this rank knows of, which breaks the pipeline."""

    @abstractmethod
    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        """Give every rank's bytes to all ranks. Collective; blocks the host, and can be interrupted.

        Args:
            call: which call it is.
            data: this rank's bytes.
            meanwhile: called once this rank's bytes are on their way; the others' are taken when it returns.

        Returns:
            One bytes object per rank, by rank of the group.

        Raises:
            AgreementError: another rank cannot make this call, makes a different one, or has closed the pipeline.
            CommError: something has failed.
        """

    @abstractmethod
    def refuse(self, why: str) -> None:
        """Tell the others, in place of the next call, that this rank cannot make it."""

    @abstractmethod
    def check(self) -> None:
        """Raise if something has failed."""

    @abstractmethod
    def broke(self, error: BaseException, place: str) -> BaseException:
        """Tell all ranks of an error on this rank, which breaks the pipeline.

        Args:
            error: what was raised.
            place: where it was raised.

        Returns:
            The error to raise: the same one, or the reason why a transfer ended, which is another rank's error or another thread's.
        """

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Run a step in this context, so that an interrupt can end it."""
        yield

    @abstractmethod
    def close(self) -> None:
        """Tell the other ranks that this one leaves, and release the thread and the connections."""


class NullControlPlane(ControlPlane):
    """The no-op control plane of a single-rank pipeline."""

    failure = None

    def exchange(self, call: Collective, data: bytes, meanwhile: Meanwhile | None = None) -> list[bytes]:
        return [data]

    def refuse(self, why: str) -> None: ...

    def check(self) -> None: ...

    def broke(self, error: BaseException, place: str) -> BaseException:
        return error

    def close(self) -> None: ...
