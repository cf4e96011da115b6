"""A fill job on a rank: its pieces run one at a time, apart from training, and are held to what they were given."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from bpipe.comm.health.failure import Cause, Failure
from bpipe.device import on_stream
from bpipe.errors import FillError, format_error
from bpipe.fill.counted import Counted
from bpipe.fill.job import Settings
from bpipe.fill.own_state import OwnState
from bpipe.session.context import RankContext

__all__: list[str] = []


class Piece(NamedTuple):
    """A piece that was asked for: whether the job did one, when, in nanoseconds of the host's clock, and what it took at a time."""

    is_done: bool
    began_ns: int
    ended_ns: int
    peak_bytes: int

    @property
    def seconds(self) -> float:
        return (self.ended_ns - self.began_ns) / 1e9


class RunningJob:
    """A job from when the rank gets it until it gets another one.

    Args:
        job: what to run; None from when it was stopped.
        settings: its settings.
        context: the rank's.
    """

    def __init__(self, job: Any, settings: Settings, context: RankContext) -> None:
        self.job: Any = job
        self.settings, self._context = settings, context
        device = context.transport.device
        self._counted, self._own = Counted(device), OwnState(device)
        self._limit_s: float | None = None  # when the piece under way has taken too long, by the control thread's clock

    def run_piece(self, seconds: float, num_bytes: int) -> Piece:
        """Ask for a piece, and check what it has taken."""
        settings, is_done = self.settings, False
        began = time.perf_counter_ns()
        with self._failing(seconds), self._on_own_stream(), self._own.active(), self._counting():
            is_done = self.job.step(seconds, num_bytes) is not None
        piece = Piece(is_done, began, time.perf_counter_ns(), self._counted.peak_bytes)
        self._check_left()
        if piece.seconds > seconds + settings.grace_s:
            self._refuse(f"took {piece.seconds:.3g} s and was given {seconds:.3g} s")
        elif settings.held_bytes is not None:
            self._check_bytes(num_bytes, settings.held_bytes)
        return piece

    def ask(self, method: str, *given: int) -> None:
        """Call a method of the job that it may have."""
        if (call := getattr(self.job, method, None)) is not None:
            with self._failing(None), self._own.active():
                call(*given)
            self._check_left()

    def look(self, now: float) -> None:
        """Break the pipeline if a piece does not end. Called by the control thread."""
        limit, context = self._limit_s, self._context
        if limit is not None and now > limit and self.settings.on_error == "fail":
            self._limit_s = None
            text = f"FillError: the fill job {self.settings.name} does not end: it has run for more than grace_s="
            place, step = context.transport.control.activity.place(), context.guard.num_steps
            failure = Failure(Cause.RAISED, context.group_rank, step, place, f"{text}{self.settings.grace_s:g} s too long")
            context.transport.control.fail(failure)  # type: ignore[attr-defined]

    @contextmanager
    def _counting(self) -> Iterator[None]:
        if self.settings.held_bytes is None:
            yield
            return
        self._counted.begin()
        with self._counted:
            yield

    def _check_left(self) -> None:
        """Raise if a piece has left on what only the job's own code can undo: training would go on in that state."""
        if self._own.left:
            raise FillError(
                f"the fill job {self.settings.name} leaves {' and '.join(self._own.left)} changed behind a piece: undo it before "
                "the piece ends, and open a context within a piece, not around a yield"
            )

    def _check_bytes(self, given: int, held: int) -> None:
        peak, kept = self._counted.peak_bytes, self._counted.live_bytes()
        way_out = "say what it keeps (held_bytes=; kept_bytes= of an Inference), and give it a budget= with room for that"
        if peak > given + held:
            self._refuse(
                f"took {peak:,} bytes at a time and was given {given:,} beside its held_bytes={held:,}: make its pieces smaller, "
                f"or {way_out}"
            )
        elif kept > held:
            self._refuse(f"keeps {kept:,} bytes between pieces, and says held_bytes={held:,}: let it keep less, or {way_out}")

    @contextmanager
    def _failing(self, seconds: float | None) -> Iterator[None]:
        """Name the job while it runs, and turn an error of it into ours, or stop it."""
        activity = self._context.transport.control.activity
        activity.filling = self.settings.name
        self._limit_s = None if seconds is None else time.monotonic() + seconds + self.settings.grace_s
        try:
            yield
        except Exception as error:
            self._refuse(f"raised {format_error(error)}", error)
        finally:
            activity.filling, self._limit_s = "", None

    def _refuse(self, why: str, error: Exception | None = None) -> None:
        text = f"the fill job {self.settings.name} {why}"
        if self.settings.on_error == "fail":
            raise FillError(text) from error
        self.job = None
        self._context.log().warning("%s: it is stopped, and training goes on", text)

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Let a piece run on a stream of the job, and end before anything else is done."""
        transport = self._context.transport
        stream = transport.streams.of("fill", transport.device)
        with on_stream(stream):
            yield
            if stream is not None:
                stream.synchronize()
