"""The rules of a pipeline's control plane: which ranks are connected, which call each makes, and which failure came first.

There are no sockets, threads, locks or clocks in here. Each event is a method, and returns what the driver has to do about it, in
order. The driver lets in one event at a time. In `driver.py` events come from connections and threads; in a test, in any order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.collective import Collective, check_alike, data_of, frame_of
from bpipe.comm.health.effects import Effect, Send, Signal
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.watchdog import Timeouts, Watchdog
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError, CommError

__all__: list[str] = []

MAX_REFUSAL_BYTES = 4096

# A call completes only when all ranks have made it, so another rank is at most one call ahead of this one, and further only by
# calls that a rank has refused or made differently, which complete for nobody.
MOST_AHEAD = 64
MOST_AHEAD_BYTES = 2**30 + 2**26  # of one rank: its longest call, and refusals

Effects = list[Effect]


class Membership:
    """One rank's knowledge of a pipeline's ranks.

    Args:
        rank: this rank in the pipeline's group, which has `size` ranks.
        activity: what it is doing.
        timeouts: how long a wait may take.
        now: seconds of the driver's clock.

    Attributes:
        failure: the first failure that it knows of.
        original: the error behind it, if it is this rank's own.
        is_settled: whether the failure was sent to all ranks, and nothing waits for a transfer any more.
        has_left: whether this rank has closed the pipeline.
        waits_for: the ranks that this one waits for in a call.
    """

    def __init__(self, rank: int, size: int, activity: Activity, timeouts: Timeouts, now: float) -> None:
        self.rank, self.size, self.activity = rank, size, activity
        self.failure: Failure | None = None
        self.original: BaseException | None = None
        self.is_settled = self.has_left = False
        self._others = frozenset(range(size)) - {rank}
        self._calls: dict[int, dict[int, Frame]] = defaultdict(dict)  # of the others, by number and rank
        self._num_steps_of: dict[int, int] = {}  # that each rank that closed the pipeline has made
        self.waits_for: frozenset[int] = frozenset()
        self._watchdog = Watchdog(rank, size, activity, timeouts, now)

    # This rank's calls

    def begin_call(self, call: Collective, data: bytes) -> Effects:
        """Take part in the next call; `end_call` must follow, also after an error."""
        self.activity.state = State.MEETING
        return [self._next_call(frame_of(call, self.activity.call + 1, data))]

    def refuse(self, why: str) -> Effects:
        """Refuse the next call, which this rank has done with that."""
        return [self._next_call(Frame(Kind.REFUSAL, self.activity.call + 1, why.encode(errors="replace")[:MAX_REFUSAL_BYTES]))]

    def _next_call(self, frame: Frame) -> Send:
        self.activity.call = frame.number
        for number in [number for number in self._calls if number < frame.number]:
            del self._calls[number]
        return Send(frame)

    def collected(self, call: Collective) -> dict[int, bytes] | None:
        """Return what the other ranks give to the call under way, by rank; None if some have not made it.

        Raises:
            AgreementError: another rank refuses the call, makes a different one, or has closed the pipeline.
            CommError: something has failed.
        """
        self.check()
        frames = self._calls[self.activity.call]
        for rank, frame in sorted(frames.items()):
            check_alike(rank, frame, call)
        self.waits_for = self._others - frames.keys()
        self._check_present(self.waits_for)
        return None if self.waits_for else {rank: data_of(frame) for rank, frame in frames.items()}

    def _check_present(self, missing: Collection[int]) -> None:
        for rank in sorted(missing & self._num_steps_of.keys()):
            num_steps = self._num_steps_of[rank]
            raise AgreementError(
                f"rank {rank} closed this pipeline after {num_steps} steps, but rank {self.rank} makes another call: "
                "make the same calls on all ranks"
            )

    def end_call(self, state: State) -> None:
        """Go back to the state that this rank was in before the call."""
        self.activity.state, self.waits_for = state, frozenset()
        self._calls.pop(self.activity.call, None)

    def callers(self) -> list[int]:
        """Return the ranks that have made the next call while this rank is in none."""
        if self.activity.state is not State.OUTSIDE or self.has_left:
            return []
        return [rank for rank, frame in list(self._calls.get(self.activity.call + 1, {}).items()) if frame.kind is Kind.CALL]

    # Other ranks

    def receive(self, rank: int, frame: Frame) -> Effects:
        """Take in a frame from another rank.

        Raises:
            CommError: its body is not what its kind says; report `nonsense` then.
        """
        if frame.kind in (Kind.CALL, Kind.REFUSAL):
            return self._keep(rank, frame)
        if frame.kind is Kind.FAILED:
            return self.fail(Failure.unpack(frame.body, self.size), reported_by_peer=True)
        if frame.kind is Kind.LEFT:
            return self._see_off(rank, frame.number)
        if frame.kind is Kind.ASK:
            return [Send(Frame(Kind.STATUS, frame.number, self._watchdog.answer(rank).pack()), to=rank)]
        self._watchdog.on_status(rank, frame.number, Status.unpack(frame.body))
        return []

    def _keep(self, rank: int, frame: Frame) -> Effects:
        """Keep what a rank says to a call until this rank makes that call, unless it says more than it can have to say."""
        ahead = frame.number - self.activity.call
        if self.failure is not None or ahead < 0:
            return [Signal.WAKE]
        kept = sum(len(frames[rank].body) for frames in self._calls.values() if rank in frames)
        if ahead > MOST_AHEAD or kept + len(frame.body) > MOST_AHEAD_BYTES:
            how = f"is {ahead} calls ahead of rank {self.rank}, and has sent {kept + len(frame.body)} bytes for them"
            return self._exceeds(rank, f"{how}: either its loop catches the error of each call and calls again, or it")
        self._calls[frame.number][rank] = frame
        return [Signal.WAKE]

    def does_not_read(self, rank: int, num_waiting: int) -> Effects:
        """Take note that a rank reads none of what this rank sends it, while that many frames wait."""
        how = f"does not read what rank {self.rank} sends it, so that {num_waiting} messages wait"
        return self._exceeds(rank, f"{how}: either its process is frozen, or it")

    def _exceeds(self, rank: int, how: str) -> Effects:
        return self.fail(Failure(Cause.DISAGREED, rank, self.activity.step, "", f"rank {rank} {how} is not a sound rank of bpipe"))

    def heard_from(self, rank: int) -> None:
        """Take note that something has come from a rank, so its process runs."""
        self._watchdog.heard(rank)

    def _see_off(self, rank: int, num_steps: int) -> Effects:
        self._num_steps_of[rank] = num_steps
        step = self.activity.step
        if self.activity.state is not State.RUNNING or num_steps > step:
            return [Signal.WAKE]
        error = f"rank {rank} closed this pipeline in the middle of step {step}: its program has probably ended"
        return [Signal.WAKE, *self.fail(Failure(Cause.LOST, rank, step, "", error))]

    def disconnected(self, rank: int) -> Effects:
        """Take note that the connection to a rank has ended, which means that it is lost unless it has closed the pipeline."""
        if rank in self._num_steps_of:
            return []
        where = f" while rank {self.rank} was at {place}" if (place := self.activity.place()) else ""
        error = (
            f"rank {rank} was lost{where}, step {self.activity.step}: the connection to it ended without notice, because its "
            "process or its machine ended (killed? out of memory?) or the network was cut. Look at its log, and restart from a "
            "checkpoint."
        )
        return self.fail(Failure(Cause.LOST, rank, self.activity.step, "", error))

    def nonsense(self, rank: int, error: Exception) -> Effects:
        """Take note that a rank has sent bytes that are not a frame, or a frame whose body is malformed."""
        text = f"rank {rank} sent rank {self.rank} bytes that are not a bpipe message: {error}"
        return self.fail(Failure(Cause.DISAGREED, rank, -1, "", text))

    def crossed(self, ranks: Collection[int], name: str) -> Effects:
        """Take note that ranks wait for this one in another pipeline while it calls this one, which has this name."""
        error = (
            f"rank {self.rank} calls {name} while rank {min(ranks)} waits for it in another pipeline: "
            "call pipelines in the same order on all ranks"
        )
        return self.fail(Failure(Cause.DISAGREED, self.rank, self.activity.step, "", error))

    # Failures

    def fail(self, failure: Failure, original: BaseException | None = None, *, reported_by_peer: bool = False) -> Effects:
        """Break the pipeline, unless it is broken already or this rank has left it.

        Args:
            failure: what happened.
            original: this rank's own error.
            reported_by_peer: whether another rank reported it; that rank then informs all ranks.
        """
        if self.failure is not None or self.has_left:
            return []
        self.original, self.failure = original, failure  # in this order: other threads read both without the lock
        return [Signal.RELEASE] if reported_by_peer else [self._report(failure), Signal.RELEASE]

    @staticmethod
    def _report(failure: Failure) -> Send:
        return Send(Frame(Kind.FAILED, 0, failure.pack()))

    def raised(self, error: BaseException, place: str) -> Effects:
        """Take note of an error on this rank."""
        return self.fail(Failure.raised(error, self.rank, self.activity.step, place), error)

    def interrupted(self) -> Effects:
        """Take note of Ctrl-C."""
        return self.fail(Failure(Cause.RAISED, self.rank, self.activity.step, self.activity.place(), "KeyboardInterrupt"))

    def released(self) -> Effects:
        """Take note that all waits in transfers were ended after a failure."""
        self.is_settled = True
        return [Signal.WAKE]

    def check(self) -> None:
        """Raise if something has failed."""
        if self.failure is not None:
            raise self._error(self.failure)

    def error_for(self, error: BaseException) -> BaseException:
        """Return what to raise in place of an error: the failure behind it, if it only says that the pipeline broke."""
        if self.failure is None or not isinstance(error, CommError):
            return error
        return self._error(self.failure)

    def _error(self, failure: Failure) -> BaseException:
        return failure.as_error(self.rank, self.activity.place()) if self.original is None else self.original

    # Time, and the end

    def tick(self, now: float) -> Effects:
        """Look whether this rank waits too long."""
        effects: Effects = []
        for finding in self._watchdog.tick(now, self.waits_for):
            effects += self.fail(finding) if isinstance(finding, Failure) else [finding]
        return effects

    def shows_waits(self) -> bool:
        """Return whether this rank's waits in this step are shown, or will be."""
        return self._watchdog.shows()

    def leave(self) -> Effects:
        """Close the pipeline."""
        if self.has_left:
            return []
        self.has_left = True
        return [Send(Frame(Kind.LEFT, self.activity.step)) if self.failure is None else self._report(self.failure)]
