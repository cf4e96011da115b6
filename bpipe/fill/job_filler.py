"""Call a fill job where a rank waits, while there are time and bytes for another piece, and see that it keeps to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.device import current_stream, is_asynchronous
from bpipe.engine.run import Run
from bpipe.errors import ConfigurationError
from bpipe.fill.job import Settings
from bpipe.fill.live_storages import LiveStorages
from bpipe.fill.room import Rooms, Waits
from bpipe.fill.running_job import RunningJob
from bpipe.memory.saved.stash import is_on
from bpipe.memory.saved.storages import storages_of
from bpipe.memory.static import bytes_under
from bpipe.model.microbatch import tensors_in
from bpipe.plan.action import COMPUTE, HOST, SHARDING
from bpipe.schedules import Action, Op, Plan
from bpipe.session.context import RankContext
from bpipe.session.filler import Filler
from bpipe.session.session import Session

__all__: list[str] = []

FILLED = frozenset({Op.WAIT_RECV_F, Op.WAIT_RECV_B, Op.WAIT_LOAD, Op.WAIT_SEND_F, Op.WAIT_SEND_B, Op.WAIT_EVICT})
ON_STAGE = COMPUTE | SHARDING
BETWEEN = "between steps"  # as the place of a wait
UNSEEN = 0.5  # of a wait, what is filled where nobody can tell whether it is over: it would measure a fill of all as the wait
STARVED = 5  # steps without any bytes for the job, after which that is said
NUMBERS = ("fill_offered_s", "fill_used_s", "fill_overrun_s", "fill_pieces", "fill_peak_bytes")


@dataclass(slots=True)
class _Wait:
    """A wait under way."""

    plan: Plan | None  # of which it is a part; None between steps
    place: Hashable  # in the plan
    since: float  # when it began
    missing_s: float = 0.0  # after which what is waited for had not come yet
    has_come: bool = False  # whether it was seen to have come

    def seconds(self) -> float:
        return time.perf_counter() - self.since


class JobFiller(Filler):
    """Runs jobs in the waits of one rank, one at a time; what is known of the rank stays when another job comes.

    How long a wait takes is known from the latest steps of the same plan, and what memory is free meanwhile from the plan and the
    measured sizes of its microbatches. So nothing is filled in the first steps.

    Args:
        context: the rank's.
        budget: returns the budget of `Balanced` for this rank in bytes, if it has one.
        tell: called with the begin and the end of each piece, in nanoseconds of the host's clock.
    """

    def __init__(self, context: RankContext, budget: Callable[[], int | None], tell: Callable[[int, int], None]) -> None:
        self._running: RunningJob | None = None
        self._context, self._budget, self._tell = context, budget, tell
        self._waits, self._rooms = Waits(), Rooms()
        self._returned = LiveStorages()  # what was returned to the user, who may still hold it, and what will be
        self._still = self._states = self._own_peak = 0  # bytes: what stays, but for these two; optimizer states; the rank's peak
        self._wait: _Wait | None = None
        self._is_watched = False
        self._last_use: tuple[Plan | None, dict[int, int]] = None, {}  # the place of each stage's last action in the lane
        self._told: set[int] = set()  # the stages that the job knows to be done in this step
        self._numbers = dict.fromkeys(NUMBERS, 0.0)
        self._most_free: int | None = None  # bytes, in any wait of this job so far
        self._num_starved = 0  # steps in which there were none

    @property
    def job(self) -> Any:
        return None if self._running is None else self._running.job

    def take(self, running: RunningJob) -> None:
        """Run a job from now on."""
        self._running = running
        self._most_free, self._num_starved = None, 0

    def drop(self) -> None:
        """Run no job any more."""
        self._running = None

    # What the session calls

    def between_steps(self, have_come: Callable[[], bool]) -> None:
        self._numbers, self._states = dict.fromkeys(NUMBERS, 0.0), self._states_bytes()
        if self.job is not None:
            self._wait = _Wait(None, BETWEEN, time.perf_counter())
            self._fill(self._wait, have_come, 0)

    def started(self, run: Run) -> None:
        self._end()
        self._states, self._told = self._states_bytes(), set()
        control = self._context.transport.control
        if not self._is_watched and hasattr(control, "looks"):
            control.looks.append(self._look)
            self._is_watched = True
        if self._last_use[0] is not run.plan:
            places = {action.stage: place for place, action in enumerate(run.plan.actions[run.rank]) if action.op in ON_STAGE}
            self._last_use = run.plan, places

    def before(self, run: Run, action: Action) -> None:
        if self.job is None or action.op not in FILLED or action.peer == HOST:
            return
        taken, posted = self._rooms.taken(run.plan), run.posted(action)
        if posted is not None and taken is not None:  # in the first step, the size of a message comes with it
            self._note_returned(run.results.returned)
            self._wait = _Wait(run.plan, action.identity, time.perf_counter())
            self._fill(self._wait, posted.has_come, taken[self._place(run)])

    def after(self, run: Run, action: Action) -> None:
        if action.op in FILLED:
            self._end()
        elif action.op in ON_STAGE and run.plan.has_backward and not run.is_sharded:
            is_last = self._last_use[1][action.stage] == self._place(run)
            if is_last:
                self._tell_done(action.stage)

    def finished(self, run: Run, stats: Mapping[str, float]) -> None:
        static = int(stats["static_bytes"] + stats["remote_buffer_bytes"]) + run.exchanges.held_bytes
        self._still = static - self._states_bytes() - bytes_under(run.results.returned)
        self._own_peak = int(stats["predicted_device_peak_bytes"])
        self._note_returned(run.results.returned)
        if run.plan.has_backward:
            for stage in self._last_use[1]:
                if stage not in self._told:  # such as one whose gradients are complete at the end of a step
                    self._tell_done(stage)
            if self._running is not None:
                self._running.ask("finish")
        self._rooms.learn(run.plan, run.rank, run.evictions.ledger.footprints, run.exchanges.exchanged)
        self._say_if_starved()

    def returned(self, result: Any) -> None:
        self._note_returned(tensors_in(result))

    def numbers(self) -> dict[str, float]:
        return dict(self._numbers)

    def _place(self, run: Run) -> int:
        return self._context.transport.control.activity.position if run.position is None else run.position

    def _tell_done(self, stage: int) -> None:
        self._told.add(stage)
        if self._running is not None:
            self._running.ask("stage_done", stage)

    def _states_bytes(self) -> int:
        """Return the bytes of optimizer states as they are now: an optimizer makes them between steps."""
        return self._context.states.of(self._context.modules)

    def _note_returned(self, tensors: Iterable[torch.Tensor]) -> None:
        device = self._context.transport.device
        self._returned.note(one for tensor in tensors for one in storages_of(tensor) if is_on(one.device, device))

    # A wait

    def _fill(self, wait: _Wait, has_come: Callable[[], bool | None], taken: int) -> None:
        """Run pieces until what is waited for has come, is about to come, or nothing fits."""
        expected, running = self._waits.expected(wait.plan, wait.place), self._running
        if running is None or expected <= 0:
            return
        device = self._context.transport.device
        if is_asynchronous(device):
            current_stream(device).synchronize()  # the host may be ahead of the device, which does not wait yet
        free = self._free(running.settings, taken)
        self._most_free = free if self._most_free is None else max(self._most_free, free)
        if free >= 0:
            self._numbers["fill_offered_s"] += expected
        while self._running is running and running.job is not None and free >= 0:
            now, is_here = wait.seconds(), has_come()
            wait.has_come = bool(is_here)
            until = expected if is_here is not None else expected * UNSEEN
            if wait.has_come or now >= until:
                break
            wait.missing_s = now
            if not self._run_piece(running, until - now, free):
                break

    def _run_piece(self, running: RunningJob, seconds: float, num_bytes: int) -> bool:
        """Run a piece, and count it; return whether there was one."""
        piece, numbers = running.run_piece(seconds, num_bytes), self._numbers
        if piece.is_done:
            self._tell(piece.began_ns, piece.ended_ns)
            numbers["fill_used_s"] += piece.seconds
            numbers["fill_pieces"] += 1
        numbers["fill_overrun_s"] += max(0.0, piece.seconds - seconds)
        numbers["fill_peak_bytes"] = max(numbers["fill_peak_bytes"], piece.peak_bytes)
        return piece.is_done

    def _end(self) -> None:
        """Learn from the wait under way, which has ended."""
        wait, self._wait = self._wait, None
        if wait is not None:
            self._waits.learn(wait.plan, wait.place, wait.missing_s if wait.has_come else wait.seconds())

    def _free(self, settings: Settings, taken: int) -> int:
        """Return the bytes that a piece may take while the rank's microbatches and messages take some; negative if none."""
        limit = settings.budget or self._budget() or self._own_peak
        return limit - self._still - self._states - self._returned.num_bytes() - settings.always_bytes - taken

    def _say_if_starved(self) -> None:
        """Warn once if the job cannot run because the rank has no bytes for it."""
        running = self._running
        if self._most_free is None or self._most_free >= 0 or running is None or running.job is None:
            return
        self._num_starved += 1
        if self._num_starved == STARVED:
            name, keeps, lacks = running.settings.name, running.settings.always_bytes, -self._most_free
            self._context.log().warning(
                f"the fill job {name} has not run in {STARVED} steps: it keeps {keeps:,} bytes, which are {lacks:,} "
                "more than this rank has free in any wait within its budget: give the job a larger budget=, or balance the schedule"
            )

    def _look(self, now: float) -> None:
        """Look whether a piece does not end. Called by the control thread."""
        if (running := self._running) is not None:
            running.look(now)


def give_job(job: Any, session: Session) -> None:
    """Let a job run in the waits of a session's rank.

    Raises:
        ConfigurationError: the job is not valid, or the rank never waits because all ranks share a thread.
        FillError: no thread can start for it.
    """
    context = session.context
    if isinstance(context.transport, LoopbackTransport):
        raise ConfigurationError("the ranks of a Loopback share a thread and never wait: a fill job takes a process for each rank")
    running = RunningJob(job, Settings.of(job), context)
    running.begin()
    filler = session.filler
    if not isinstance(filler, JobFiller):

        def tell(begin_ns: int, end_ns: int) -> None:
            if session.observer is not None:
                session.observer.filled(begin_ns, end_ns)

        session.filler = filler = JobFiller(context, lambda: session.source.budget(context.plan_rank), tell)
    filler.take(running)
