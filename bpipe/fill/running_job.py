"""A fill job on a rank: its pieces run one at a time, apart from training, and are held to what they were given."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from bpipe.comm.health.failure import Cause, Failure
from bpipe.device import current_stream, is_asynchronous, on_stream
from bpipe.errors import FillError, format_error
from bpipe.fill.counted import Counted
from bpipe.fill.fence import fence_of
from bpipe.fill.job import Settings
from bpipe.session.context import RankContext

__all__: list[str] = []

T = TypeVar("T")
UNDO = "undo that before the piece ends"


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
    """A job from when the rank gets it until it gets another one. All of the job's code runs in a thread of the job.

    Raises:
        FillError: no thread can start.
    """

    def __init__(self, job: Any, settings: Settings, context: RankContext) -> None:
        self.job: Any = job  # None from when it was stopped
        self.settings, self._context, self._device = settings, context, context.transport.device
        self._counted, self._fence = Counted(self._device), fence_of(job, self._device)
        self._around_s = math.inf  # what changing over to the job and back takes besides a piece, at least
        self._limit_s: float | None = None  # when the piece under way has taken too long, by the control thread's clock

    def begin(self) -> None:
        """Let the job learn for which stages the rank runs, if it wants to.

        Raises:
            Exception: what the job raises.
        """
        if (begin := getattr(self.job, "begin", None)) is not None:
            stages = {index: stage.submod for index, stage in self._context.stages.items()}
            self._fence.run(lambda: begin(stages))

    def run_piece(self, seconds: float, num_bytes: int) -> Piece:
        """Ask for a piece, and check what it has taken."""
        settings, around_s = self.settings, self._around_s if self._around_s < math.inf else 0.0
        began = time.perf_counter_ns()
        is_done, took = self._call(seconds, lambda: self._step(max(0.0, seconds - around_s), num_bytes)) or (False, 0.0)
        piece = Piece(is_done, began, time.perf_counter_ns(), self._counted.peak_bytes)
        self._around_s = min(self._around_s, piece.seconds - took)
        if piece.seconds > seconds + settings.grace_s:
            self._refuse(f"took {piece.seconds:.3g} s and was given {seconds:.3g} s")
        elif settings.held_bytes is not None:
            self._check_bytes(num_bytes, settings.held_bytes)
        return piece

    def ask(self, method: str, *given: int) -> None:
        """Call a method of the job that it may have, on the caller's stream."""
        if (call := getattr(self.job, method, None)) is not None:
            stream = current_stream(self._device) if is_asynchronous(self._device) else None

            def on_the_callers_stream() -> None:
                with on_stream(stream):
                    call(*given)

            self._call(None, on_the_callers_stream)

    def look(self, now: float) -> None:
        """Break the pipeline if a piece does not end. Called by the control thread."""
        limit, context = self._limit_s, self._context
        if limit is not None and now > limit and self.settings.on_error == "fail":
            self._limit_s = None
            text = f"FillError: the fill job {self.settings.name} does not end: it has run for more than grace_s="
            place, step = context.transport.control.activity.place(), context.guard.num_steps
            failure = Failure(Cause.RAISED, context.group_rank, step, place, f"{text}{self.settings.grace_s:g} s too long")
            context.transport.control.fail(failure)  # type: ignore[attr-defined]

    def _step(self, seconds: float, num_bytes: int) -> tuple[bool, float]:
        """Run a piece on a stream of the job, which ends before anything else is; return whether there was one, and its seconds."""
        began = time.perf_counter()
        stream = self._context.transport.streams.of("fill", self._device)
        if self.settings.held_bytes is not None:
            self._counted.begin()
            self._counted.__enter__()  # type: ignore[no-untyped-call]  # the fence leaves it, and any mode that the job has left on above it
        with on_stream(stream):
            took = self.job.step(seconds, num_bytes)
            if stream is not None:
                stream.synchronize()
        return took is not None, time.perf_counter() - began

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

    def _call(self, seconds: float | None, work: Callable[[], T]) -> T | None:
        """Run the job's code; name the job meanwhile, and turn an error of it into ours, or stop it."""
        activity = self._context.transport.control.activity
        activity.filling = self.settings.name
        self._limit_s = None if seconds is None else time.monotonic() + seconds + self.settings.grace_s
        found = None
        try:  # no context manager: Python takes our error about a StopIteration for one of its own there
            found = self._fence.run(work)
        except Exception as error:
            self._refuse(f"raised {format_error(error)}", error)
        finally:
            activity.filling, self._limit_s = "", None
        self._check_left()
        return found

    def _check_left(self) -> None:
        """Refuse what a piece has left on that the fence had to switch off, or cannot: training would go on in that state."""
        if left := self._fence.own.left:
            raise FillError(
                f"the fill job {self.settings.name} leaves {' and '.join(left)} changed behind a piece, for good: {UNDO}"
            )
        if self._fence.left_on and self.job is not None:
            self._refuse(f"leaves {self._fence.left_on} on behind a piece: {UNDO}")

    def _refuse(self, why: str, error: Exception | None = None) -> None:
        text = f"the fill job {self.settings.name} {why}"
        if self.settings.on_error == "fail":
            raise FillError(text) from error
        self.job = None
        self._context.log().warning("%s: it is stopped, and training goes on", text)
