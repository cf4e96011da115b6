"""Call a fill job where a rank waits, while there are time and bytes for another piece, and see that it keeps to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.api.loopback import LoopbackGroup
from bpipe.comm.health.failure import Cause, Failure
from bpipe.device import current_stream, is_asynchronous, on_stream, random_state, set_random_state
from bpipe.engine.run import Run
from bpipe.errors import ConfigurationError, FillError, format_error
from bpipe.fill.counted import Counted
from bpipe.fill.job import Settings
from bpipe.fill.room import Rooms, Waits
from bpipe.plan.action import COMPUTE, HOST, SHARDING, START_OF
from bpipe.schedules import Action, Op, Plan
from bpipe.session.context import RankContext
from bpipe.session.filler import Filler
from bpipe.session.session import Session

__all__: list[str] = []

FILLED = frozenset({Op.WAIT_RECV_F, Op.WAIT_RECV_B, Op.WAIT_LOAD, Op.WAIT_SEND_F, Op.WAIT_SEND_B, Op.WAIT_EVICT})
ON_STAGE = COMPUTE | SHARDING
BETWEEN = "between steps"  # as the place of a wait
STARVED = 5  # steps without any bytes for the job, after which that is said
NUMBERS = ("fill_offered_s", "fill_used_s", "fill_overrun_s", "fill_pieces", "fill_peak_bytes")


@dataclass(slots=True)
class _Wait:
    """A wait under way.

    Args:
        place: where it is in a plan.
        since: when it began.
        missing_s: seconds after which what is waited for had not come yet.
        has_come: whether it was seen to have come.
    """

    place: Hashable
    since: float
    missing_s: float = 0.0
    has_come: bool = False

    def seconds(self) -> float:
        return time.perf_counter() - self.since


class JobFiller(Filler):
    """Runs one job in the waits of one rank.

    How long a wait takes is known from the latest steps of the same plan, and what memory is free meanwhile from the plan and the
    measured sizes of its microbatches. So nothing is filled in the first steps.

    Args:
        job: what to run.
        context: the rank's.
        budget: returns the budget of `Balanced` for this rank in bytes, if it has one.
        tell: called with the begin and the end of each piece, in nanoseconds of the host's clock.

    Raises:
        ConfigurationError: the job has no `step`, or a setting of it is not valid.
    """

    def __init__(
        self, job: Any, context: RankContext, budget: Callable[[], int | None], tell: Callable[[int, int], None]
    ) -> None:
        self.settings = Settings.of(job)
        self.job: Any = job  # None once it was stopped
        self._context, self._budget, self._tell = context, budget, tell
        device = context.transport.device
        self._waits, self._rooms, self._counted, self._own = Waits(), Rooms(), Counted(device), _OwnState(device)
        self._always = self._own_peak = 0  # bytes of the rank: what stays, and the most at a time
        self._wait: _Wait | None = None
        self._limit_s: float | None = None  # when the piece under way has taken too long, by the control thread's clock
        self._is_watched = False
        self._last_use: tuple[Plan | None, dict[int, int]] = None, {}  # the place of each stage's last action in the lane
        self._numbers = dict.fromkeys(NUMBERS, 0.0)
        self._most_free: int | None = None  # bytes, in any wait so far
        self._num_starved = 0  # steps in which there were none

    # What the session calls

    def between_steps(self, have_come: Callable[[], bool]) -> None:
        self._numbers = dict.fromkeys(NUMBERS, 0.0)
        self._wait = _Wait(BETWEEN, time.perf_counter())
        self._fill(self._wait, have_come, 0)

    def started(self, run: Run) -> None:
        self._end()
        control = self._context.transport.control
        if not self._is_watched and hasattr(control, "looks"):
            control.looks.append(self._look)
            self._is_watched = True
        if self._last_use[0] is not run.plan:
            places = {action.stage: place for place, action in enumerate(run.plan.actions[run.rank]) if action.op in ON_STAGE}
            self._last_use = run.plan, places

    def before(self, run: Run, action: Action) -> None:
        if action.op not in FILLED or action.peer == HOST:
            return
        taken, key = self._rooms.taken(run.plan), action[1:4] if action.part and action.peer is not None else action[1:3]
        posted = run.microbatches[key].transfers.get((START_OF[action.op], action.part))
        if posted is not None and taken is not None:  # in the first step, the size of a message comes with it
            self._wait = _Wait((id(run.plan), action.identity), time.perf_counter())
            self._fill(self._wait, posted.transfer.has_come, taken[self._place(run)])

    def after(self, run: Run, action: Action) -> None:
        if action.op in FILLED:
            self._end()
        elif action.op in ON_STAGE and self._is_last(run, action) and not run.sharding.is_needed:
            self._ask("stage_done", action.stage)

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        if run.plan.has_backward:
            if run.sharding.is_needed:
                for stage in self._last_use[1]:
                    self._ask("stage_done", stage)
            self._ask("finish")
        self._rooms.learn(run.plan, run.rank, run.evictions.ledger.footprints, run.twins.exchanged_bytes)
        self._always = int(stats["static_bytes"] + stats["remote_buffer_bytes"]) + run.twins.held_bytes
        self._own_peak = int(stats["predicted_device_peak_bytes"])
        self._say_if_starved()

    def numbers(self) -> dict[str, float]:
        return dict(self._numbers)

    def _place(self, run: Run) -> int:
        return self._context.transport.control.activity.position if run.position is None else run.position

    def _is_last(self, run: Run, action: Action) -> bool:
        return run.plan.has_backward and self._last_use[1][action.stage] == self._place(run)

    # A wait

    def _fill(self, wait: _Wait, has_come: Callable[[], bool | None], taken: int) -> None:
        """Run pieces until what is waited for has come, is about to come, or nothing fits."""
        expected = self._waits.expected(wait.place)
        if self.job is None or expected <= 0:
            return
        device = self._context.transport.device
        if is_asynchronous(device):
            current_stream(device).synchronize()  # the host may be ahead of the device, which does not wait yet
        free = self._free(taken)
        self._most_free = free if self._most_free is None else max(self._most_free, free)
        if free >= 0:
            self._numbers["fill_offered_s"] += expected
        while self.job is not None and free >= 0:
            now = wait.seconds()
            wait.has_come = bool(has_come())
            if wait.has_come or now >= expected:
                break
            wait.missing_s = now
            if not self._run_piece(expected - now, free):
                break

    def _end(self) -> None:
        """Learn from the wait under way, which has ended."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self._waits.learn(wait.place, wait.missing_s if wait.has_come else wait.seconds())

    def _free(self, taken: int) -> int:
        """Return the bytes that a piece may take while the rank's microbatches and messages take some; negative if none."""
        limit = self.settings.budget or self._budget() or self._own_peak
        return limit - self._always - (self.settings.held_bytes or 0) - taken

    def _say_if_starved(self) -> None:
        """Warn once if the job cannot run because the rank has no bytes for it."""
        if self._most_free is None or self._most_free >= 0 or self.job is None:
            return
        self._num_starved += 1
        if self._num_starved == STARVED:
            keeps, lacks = self.settings.held_bytes or 0, -self._most_free
            self._context.log().warning(
                f"the fill job {self.settings.name} has not run in {STARVED} steps: it keeps {keeps:,} bytes, which are {lacks:,} "
                "more than this rank has free in any wait within its budget: give the job a larger budget=, or balance the schedule"
            )

    # A piece

    def _run_piece(self, seconds: float, num_bytes: int) -> bool:
        """Run a piece, and check what it has taken; return whether there was one."""
        numbers, settings, is_done = self._numbers, self.settings, False
        began, modes = time.perf_counter_ns(), self._modes()
        with self._failing(seconds), self._own.active(), self._on_own_stream(), self._counting():
            is_done = self.job.step(seconds, num_bytes) is not None
        ended = time.perf_counter_ns()
        if modes != self._modes():  # which only the job's own code can undo
            raise FillError(
                f"the fill job {settings.name} leaves inference mode or autocast switched behind a piece: open it within a piece, "
                "not around a yield"
            )
        took = (ended - began) / 1e9
        if is_done:
            self._tell(began, ended)
            numbers["fill_used_s"] += took
            numbers["fill_pieces"] += 1
        numbers["fill_overrun_s"] += max(0.0, took - seconds)
        if took > seconds + settings.grace_s:
            self._refuse(f"took {took:.3g} s and was given {seconds:.3g} s")
        elif settings.held_bytes is not None:
            self._check_bytes(num_bytes, settings.held_bytes)
        return is_done

    def _modes(self) -> tuple[bool, ...]:
        kinds = {"cpu", self._context.transport.device.type}
        return torch.is_inference_mode_enabled(), *(torch.is_autocast_enabled(kind) for kind in sorted(kinds))

    @contextmanager
    def _counting(self) -> Iterator[None]:
        if self.settings.held_bytes is None:
            yield
            return
        self._counted.begin()
        with self._counted:
            yield

    def _check_bytes(self, given: int, held: int) -> None:
        peak, kept = self._counted.peak_bytes, self._counted.live_bytes()
        self._numbers["fill_peak_bytes"] = max(self._numbers["fill_peak_bytes"], peak)
        if peak > given + held:
            self._refuse(f"took {peak:,} bytes at a time and was given {given:,} beside its held_bytes={held:,}")
        elif kept > held:
            self._refuse(f"keeps {kept:,} bytes between pieces, and says held_bytes={held:,}")

    def _ask(self, method: str, *given: int) -> None:
        """Call a method of the job that it may have."""
        if (call := getattr(self.job, method, None)) is not None:
            with self._failing(None):
                call(*given)

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

    def _look(self, now: float) -> None:
        """Break the pipeline if a piece does not end. Called by the control thread."""
        limit, context = self._limit_s, self._context
        if limit is not None and now > limit and self.settings.on_error == "fail":
            self._limit_s = None
            text = f"FillError: the fill job {self.settings.name} does not end: it has run for more than grace_s="
            place, step = context.transport.control.activity.place(), context.guard.num_steps
            failure = Failure(Cause.RAISED, context.group_rank, step, place, f"{text}{self.settings.grace_s:g} s too long")
            context.transport.control.fail(failure)  # type: ignore[attr-defined]


def filler_of(job: Any, session: Session) -> JobFiller:
    """Return what runs a job in the waits of a session's rank.

    Raises:
        ConfigurationError: the job is not valid, or the rank never waits because all ranks share a thread.
    """
    context = session.context
    if isinstance(context.group, LoopbackGroup):
        raise ConfigurationError("the ranks of a Loopback share a thread and never wait: a fill job takes a process for each rank")

    def tell(begin_ns: int, end_ns: int) -> None:
        if session.observer is not None:
            session.observer.filled(begin_ns, end_ns)

    if (begin := getattr(job, "begin", None)) is not None:
        begin({index: stage.submod for index, stage in context.stages.items()})
    return JobFiller(job, context, lambda: session.source.budget(context.plan_rank), tell)


class _OwnState:
    """The job's own random numbers and grad mode, so that a rank's microbatches have the same ones with and without it.

    A generator may yield within `torch.no_grad()`, which holds for its later pieces and for nobody else.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own = self._states()

    def _states(self) -> tuple[torch.Tensor, torch.Tensor | None, bool]:
        return torch.get_rng_state(), random_state(self._device), torch.is_grad_enabled()

    def _set(self, states: tuple[torch.Tensor, torch.Tensor | None, bool]) -> None:
        torch.set_rng_state(states[0])
        set_random_state(states[1], self._device)
        torch.set_grad_enabled(states[2])

    @contextmanager
    def active(self) -> Iterator[None]:
        outside = self._states()
        self._set(self._own)
        try:
            yield
        finally:
            self._own = self._states()
            self._set(outside)
