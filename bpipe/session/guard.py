"""Let one step run at a time and none after an error, and make all ranks fail together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bpipe.cleanup import note, noted_on
from bpipe.comm.transport.base import Transport
from bpipe.engine.lanes import Lanes
from bpipe.errors import CommError, PipelineBrokenError, RankFailedError, TransferError, format_error

__all__: list[str] = []

RELEASED_S = 5.0  # how long to wait for threads to return from a transfer that was ended


class Guard:
    """Let the steps of one rank run one at a time, and refuse steps after an error.

    Args:
        owner: what users have constructed, for messages; they make a `call` of it for each `unit`.
    """

    def __init__(
        self, transport: Transport, lanes: Lanes, *, owner: str = "schedule", call: str = "step()", unit: str = "step"
    ) -> None:
        self._transport, self._lanes, self._owner, self._call, self._unit = transport, lanes, owner, call, unit
        self._running = threading.Lock()
        self.num_steps = 0
        self.broken: BaseException | str | None = None  # why no further step may run
        self.known_to_all: BaseException | None = None  # an error that all ranks raise, before anything was sent
        self.is_closed = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Allow one step at a time, and refuse steps after an error.

        Raises:
            PipelineBrokenError: a step is running, an earlier one failed, or the pipeline is closed.
        """
        if self._running.locked():
            raise PipelineBrokenError(
                f"{self._call} was called inside another {self._unit}, or from a second thread: run one {self._unit} at a time"
            )
        with self._running:
            self._check_whole()
            yield

    def _check_whole(self) -> None:
        """Raise if a step has failed, here or on another rank, or if the pipeline is closed."""
        if self.broken is not None:
            cause = self.broken if isinstance(self.broken, BaseException) else None
            raise PipelineBrokenError(
                f"this pipeline broke in {self._unit} {self.num_steps} ({self.broken if cause is None else format_error(cause)}). "
                f"Gradients may be incomplete: zero them, close() this {self._owner} and build a new one over the same process "
                "group."
            ) from cause
        if self.is_closed:
            raise PipelineBrokenError(f"this {self._owner} was closed: build a new one")
        if self._transport.control.failure is not None:
            with self.breaking():
                self._transport.control.check()

    @contextmanager
    def failing_together(self, *harmless: type[Exception]) -> Iterator[None]:
        """Report an error raised inside to all ranks, and raise its cause; the pipeline is broken then.

        Args:
            harmless: errors that all ranks raise alike, before anything is sent; they do not break the pipeline.
        """
        try:
            yield
        except BaseException as error:
            control = self._transport.control
            if control.failure is None and (isinstance(error, harmless) or error is self.known_to_all):
                raise
            reason = self.broken = error
            with noted_on(error):
                reason = self.broken = control.broke(error, control.activity.place())
            with noted_on(reason):
                self._lanes.join(RELEASED_S)
                self._transport.settle(RELEASED_S)
                self._transport.streams.join()
            if reason is error:
                raise
            if not isinstance(error, CommError):
                raise reason from error
            if not isinstance(error, RankFailedError | TransferError):  # these say no more than that the other rank failed
                note(reason, f"bpipe: here: {format_error(error)}")
            raise reason from reason.__cause__
        finally:
            self._transport.control.activity.end(self.num_steps)

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Mark the pipeline as broken by an error raised inside, because it leaves messages in flight."""
        try:
            yield
        except BaseException as error:
            self.broken = error
            raise

    def leave(self) -> None:
        """Prevent any further step from starting."""
        if self._running.locked():
            raise PipelineBrokenError(
                f"close() was called inside a {self._unit}: close the {self._owner} after its {self._unit} has returned or raised"
            )
        if isinstance(self.broken, BaseException):
            self.broken = format_error(self.broken)  # the error's frames keep the step's tensors alive
        self.is_closed = True
