"""A watchdog for a rank that waits too long: it asks all ranks for a heartbeat with their status, logs it once, then gives up."""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import NamedTuple

from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.effects import Send, Warn
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.status_report import RELOADS, name_ranks, report
from bpipe.comm.wire.frames import Frame, Kind

__all__: list[str] = []

SLOW_S = 30.0
ANSWERS_S = 1.0  # a process that runs answers a heartbeat within this time
ASKING = struct.Struct("<I")  # the body of a question: who asks

Finding = Send | Warn | Failure  # a question to the others, a warning, or the end of the wait


class Timeouts(NamedTuple):
    """The longest waits of a rank for another one.

    Args:
        timeout_s: seconds after which a single wait fails.
        slow_s: seconds in a single wait after which the rank logs what all ranks are doing.
    """

    timeout_s: float
    slow_s: float


class Watchdog:
    """A watchdog over the waits of one rank.

    Args:
        rank: its rank in the pipeline's group, which has `size` ranks.
        activity: what this rank is doing.
        timeouts: how long a wait may take.
        now: the time in seconds, by the clock that drives it.
    """

    def __init__(self, rank: int, size: int, activity: Activity, timeouts: Timeouts, now: float) -> None:
        self._rank, self._size, self._activity = rank, size, activity
        self._timeouts = timeouts
        self._here = self._place()  # where this rank was at the latest look
        self._time_s = self._since = now  # of the latest look, and when this rank came to where it is
        self._asked_s: float | None = None
        self._number = 0  # of the latest question
        self._answers: dict[int, Status] = {}
        self._heard: set[int] = set()  # from whom anything has come since
        self._others: set[int] = set()  # who ask as well, since this rank's own latest question or the start of the step
        self._shown_step = -1  # the latest step in which this rank or another one has logged a report

    def tick(self, now: float, missing: Collection[int]) -> list[Finding]:
        """Check how long this rank has waited, and ask the others, warn or fail if that is too long.

        Args:
            now: seconds of the clock.
            missing: the ranks that may not have come to the collective call that this rank makes.
        """
        status, self._time_s = self._activity.status(), now
        here = self._place()
        if here != self._here:
            self._here, self._since, self._asked_s = here, now, None
        if not self._activity.is_waiting():
            return []
        seconds = now - self._since
        if self._asked_s is None:
            is_slow = seconds >= self._timeouts.slow_s and self._shown_step < status.step
            return [self._question(now)] if is_slow or seconds >= self._timeouts.timeout_s - ANSWERS_S else []
        if len(self._answers) + 1 < self._size and now - self._asked_s < ANSWERS_S:
            return []
        waiting = self._waiting(status, seconds, missing)
        if seconds < self._timeouts.timeout_s - ANSWERS_S:
            self._asked_s = None
        return [*self._show(status, waiting), *self._give_up(status, waiting, seconds)]

    def _place(self) -> tuple[object, ...]:
        return (*self._activity.status()[:4], self._activity.call, self._activity.under_way, self._activity.filling)

    def shows(self) -> bool:
        """Return whether this rank waits now, or what all ranks are doing was already shown in this step."""
        return self._activity.is_waiting() or self._shown_step >= self._activity.step

    def answer(self, asking: int) -> Status:
        """Return this rank's status for a rank that asks."""
        self._others.add(asking)
        if self._asked_s is None:  # that rank will show it; between steps, the number here is already the next one's
            self._shown_step = max(self._shown_step, self._activity.step - (self._activity.state is State.OUTSIDE))
        return self._status()

    def on_status(self, rank: int, number: int, status: Status) -> None:
        """Record the answer of a rank."""
        if number == self._number:
            self._answers[rank] = status
            self._heard.add(rank)

    def heard(self, rank: int) -> None:
        """Record that something has come from a rank, so its process runs."""
        self._heard.add(rank)

    def _question(self, now: float) -> Send:
        self._asked_s = now
        self._number += 1
        self._answers = {}
        self._heard = set()
        self._others = set()
        return Send(Frame(Kind.ASK, self._number, ASKING.pack(self._rank)))

    def _status(self) -> Status:
        return self._activity.status()._replace(seconds=self._time_s - self._since)

    def _show(self, status: Status, waiting: str) -> list[Warn]:
        """Log what all ranks are doing as a warning, once per step, and only on the lowest of the ranks that ask."""
        shows = self._shown_step < status.step and self._rank < min(self._others, default=self._rank + 1)
        self._shown_step = status.step
        return [Warn(f"{waiting}.\n{self._report()}")] if shows else []

    def _give_up(self, status: Status, waiting: str, seconds: float) -> list[Failure]:
        if seconds < self._timeouts.timeout_s:
            return []
        text = f"{waiting}: longer than timeout_s={self._timeouts.timeout_s:g}"
        return [Failure(Cause.TIMED_OUT, self._rank, status.step, self._activity.place(), text, self._report())]

    def _waiting(self, status: Status, seconds: float, missing: Collection[int]) -> str:
        """Describe in one line which rank this one waits for, and which ranks are frozen."""
        waits = f"rank {self._rank} has waited {seconds:.1f} s {self._for_whom(status, missing)}"
        frozen = sorted(set(range(self._size)) - self._heard - {self._rank})
        if not frozen:
            return waits
        if status.state is State.MEETING and status.call == 1:  # a rank answers nothing before it has met those it is linked with
            return f"{waits}; no answer from {name_ranks(frozen)}, where not all of the others have come, or which is frozen"
        are = "is" if len(frozen) == 1 else "are"
        why = f"no answer in {ANSWERS_S:g} s (stopped, in code that holds Python's GIL, or cut off from the network)"
        return f"{waits}; {name_ranks(frozen)} {are} frozen: {why}"

    def _for_whom(self, status: Status, missing: Collection[int]) -> str:
        if status.state is State.MEETING:
            late = [rank for rank in missing if rank not in self._answers or self._answers[rank].call < status.call]
            return f"for {name_ranks(late or missing or {self._rank})} to begin step {status.step}"
        if status.state is State.SHARING:
            return f"for other replicas of its stage, in step {status.step}"
        action = self._activity.action()
        if action is None:
            return f"in step {status.step} for {RELOADS}"
        return f"in step {status.step}, {self._activity.place_of(action)}, for rank {self._activity.group_rank(action.peer)}"

    def _report(self) -> str:
        statuses = {**self._answers, self._rank: self._status()}
        return report(self._activity, statuses, self._size)
