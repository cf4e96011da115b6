"""The rules of a pipeline's control plane: which ranks are connected, which call each makes, and which failure came first.

There are no sockets, threads, locks or clocks in here. Each event is a method, and returns what the driver has to do about it, in
order. The driver lets in one event at a time. In `driver.py` events come from connections and threads; in a test, in any order.

A rank hears only from the ranks that it is linked with. What all have to know, such as a failure, each one forwards over its links
when it hears of it for the first time. So it reaches every rank on many ways, whichever rank is lost or does not answer.
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Collection
from typing import NamedTuple

from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.collective import HAS_LEFT, REFUSES, Collective, Objection
from bpipe.comm.health.effects import Effect, Send, Signal
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.gather import AllGather, Given, Part, longest, most_in_part, most_in_parts
from bpipe.comm.health.links import links, onward, strides, told_by
from bpipe.comm.health.watchdog import ASKING, Timeouts, Watchdog
from bpipe.comm.wire.codec import decode_text
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import CommError

__all__: list[str] = []

LEFT = struct.Struct("<Q")  # the number of the latest call for which it has sent all, or that it has refused
STATUS = struct.Struct("<II")  # who asks and who answers; the status follows

# A call completes only when all ranks have made it, so another rank is at most one call ahead of this one, and further only by
# calls that a rank has refused or made differently, which complete for nobody.
MOST_AHEAD = 64
MOST_AHEAD_BYTES = 2**26  # of one link, besides the longest message that it can send now

Effects = list[Effect]


class Left(NamedTuple):
    """After how many steps a rank closed the pipeline, and up to which call the others have all that they need of it."""

    num_steps: int
    num_calls: int


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
    """

    def __init__(self, rank: int, size: int, activity: Activity, timeouts: Timeouts, now: float) -> None:
        self.rank, self.size, self.activity = rank, size, activity
        self.failure: Failure | None = None
        self.original: BaseException | None = None
        self.is_settled = self.has_left = False
        self.links = links(rank, size)
        self._call: AllGather | None = None  # under way
        self._num_calls = 0  # up to the latest one that takes nothing more from this rank
        self._parts: dict[int, dict[int, Part]] = defaultdict(dict)  # from the links, by call and rank
        self._kept: dict[int, Counter[int]] = defaultdict(Counter)  # the bytes of those
        self._has_traced = False  # only then is there something to gather
        self._objections: dict[int, dict[int, Objection]] = defaultdict(dict)  # by call and what the rank does instead
        self._latest_step = Given()  # that all ranks have agreed on
        self._left: dict[int, Left] = {}
        self._asked: dict[int, tuple[int, int]] = {}  # each rank's latest question, and the link that it came over
        self._watchdog = Watchdog(rank, size, activity, timeouts, now)

    # This rank's calls

    def begin_call(self, call: Collective, data: bytes) -> Effects:
        """Take part in the next call; `end_call` must follow, also after an error."""
        self.activity.state = State.MEETING
        number = self._next_call()
        self._has_traced |= call is Collective.TRACE
        earlier = self._latest_step if call is Collective.STEP else Given()
        self._call = AllGather(self.rank, self.size, call, number, data, earlier)
        return [*self._call.begin(), *self._go_on(self._call)]

    def refuse(self, why: str) -> Effects:
        """Refuse the next call, which this rank has done with that."""
        self._num_calls = self._next_call()
        return self._object(self._num_calls, Objection(self.rank, REFUSES, text=why))

    def _next_call(self) -> int:
        self.activity.call += 1
        for number in [number for number in self._parts if number < self.activity.call]:
            del self._parts[number]
            self._kept.pop(number, None)
        if self._objections:
            for number in [number for number in self._objections if number < self.activity.call - 1]:  # others may be in that call
                del self._objections[number]
        return self.activity.call

    def _go_on(self, call: AllGather) -> Effects:
        """Go on with the call under way, as far as is possible with what has come."""
        effects: Effects = []
        for rank, left in self._left.items():
            if left.num_calls < call.number:
                effects += self._object(call.number, Objection(rank, HAS_LEFT, left.num_steps))
        parts = self._parts.get(call.number, {})
        for rank, part in parts.items():
            if part.call != call.call:
                effects += self._object(call.number, Objection(rank, part.call))
                effects += self._object(call.number, Objection(self.rank, call.call))
        if call.number in self._objections:
            return [*effects, Signal.WAKE]
        effects += call.go_on(parts)
        if call.is_in_last_round:
            self._num_calls = call.number
        return effects if call.num_known < self.size else [*effects, Signal.WAKE]

    def _object(self, number: int, objection: Objection, source: int | None = None) -> Effects:
        """Note an objection to a call, and tell the others, unless one like it is known.

        Args:
            number: the call's.
            objection: to the call.
            source: the link that it came over, if it is another rank's.
        """
        known = self._objections[number]
        if objection.doing in known:
            return []
        known[objection.doing] = objection
        return self._spread(objection.frame(number), source)

    def _spread(self, frame: Frame, source: int | None) -> Effects:
        """Send to all what this rank has noticed itself, or forward what has come from a link."""
        to = self.links if source is None else onward(self.rank, source, self.size)
        return [Send(frame, to)] if to else []

    def collected(self, call: Collective) -> list[bytes] | None:
        """Return what the ranks give to the call under way; None if that is not known yet.

        Raises:
            AgreementError: another rank refuses the call, makes a different one, or has closed the pipeline.
            CommError: something has failed.
        """
        self.check()
        assert self._call is not None, "begin_call comes first"
        for objection in list(self._objections.get(self._call.number, {}).values()):
            objection.check(call, self.rank)
        given = self._call.result()
        if given is not None and call is Collective.STEP:
            self._latest_step = given
        return None if given is None else list(given.data)

    def end_call(self, state: State) -> None:
        """Go back to the state that this rank was in before the call."""
        self.activity.state, self._call = state, None
        self._parts.pop(self.activity.call, None)
        self._kept.pop(self.activity.call, None)

    def waits_for(self) -> set[int]:
        """Return the ranks that may not have come to the call under way; of those that are far away this rank hears last."""
        if self._call is None:
            return set()
        known = {(self.rank - back) % self.size for back in range(self._call.num_known)}
        return set(range(self.size)) - known - self._parts.get(self._call.number, {}).keys()

    def late(self) -> set[int]:
        """Return the ranks that have certainly not come to the call under way: those whose first message has not come."""
        if self._call is None or self._call.num_known > 1:
            return set()
        first = {(self.rank - stride) % self.size for stride in strides(self.size)[0]}
        return first - self._parts.get(self._call.number, {}).keys()

    def callers(self) -> list[int]:
        """Return the links that have made the next call while this rank is in none."""
        if self.activity.state is not State.OUTSIDE or self.has_left:
            return []
        return list(self._parts.get(self.activity.call + 1, {}))

    # Other ranks

    def receive(self, rank: int, frame: Frame) -> Effects:
        """Take in a frame from a rank that this one is linked with.

        Raises:
            CommError: its body is not what its kind says; report `nonsense` then.
        """
        if frame.kind is Kind.CALL:
            return self._take_part(rank, frame)
        if frame.kind is Kind.REFUSAL:
            return self._take_objection(rank, frame)
        if frame.kind is Kind.FAILED:
            return self.fail(Failure.unpack(frame.body, self.size), source=rank)
        if frame.kind is Kind.LEFT:
            return self._see_off(rank, Left(frame.number, _one(LEFT, frame)))
        if frame.kind is Kind.ASK:
            return self._answer(rank, frame)
        return self._take_status(frame)

    def does_not_read(self, rank: int, num_waiting: int) -> Effects:
        """Take note that a rank reads none of what this rank sends it, while that many frames wait."""
        how = f"does not read what rank {self.rank} sends it, so that {num_waiting} messages wait"
        return self._exceeds(rank, f"{how}: either its process is frozen, or it")

    def _exceeds(self, rank: int, how: str) -> Effects:
        return self.fail(Failure(Cause.DISAGREED, rank, self.activity.step, "", f"rank {rank} {how} is not a sound rank of bpipe"))

    def heard_from(self, rank: int) -> None:
        """Take note that something has come from a rank, so its process runs."""
        self._watchdog.heard(rank)

    def _take_part(self, rank: int, frame: Frame) -> Effects:
        call = self._call if self._call is not None and self._call.number == frame.number else None
        if call is None and frame.number <= self.activity.call:  # which this rank has done with
            return []
        if effects := self._check_ahead(rank, frame):
            return effects
        part = Part.unpack(frame.body, self.size)
        if (part.entries or not part.is_last) and (effects := self._check_told(rank, frame, part)):
            return effects
        parts = self._parts[frame.number]
        parts[rank] = parts[rank].followed_by(part) if rank in parts else part
        return [] if call is None else self._go_on(call)

    def _check_told(self, rank: int, frame: Frame, part: Part) -> Effects:
        """Break the pipeline if a part has more than it can have, else count it.

        Raises:
            CommError: it tells of a rank that the sender cannot have heard of.
        """
        kept = self._kept[frame.number][rank]
        if len(frame.body) > (most := self.most_of_call(rank, frame.number, part.call)):
            how = f"has sent {kept + len(frame.body)} bytes to call {frame.number}, where {kept + most} are the most allowed: it"
            return self._exceeds(rank, how)
        if strange := part.entries.keys() - told_by(self.rank, rank, self.size):
            raise CommError(f"it tells of rank {min(strange)}, of which it cannot have heard then")
        self._kept[frame.number][rank] = kept + len(frame.body)
        return []

    def _take_objection(self, rank: int, frame: Frame) -> Effects:
        if frame.number == 0:  # it has not come as far as a first call
            error = f"rank {rank} gave up while the ranks met for their first step: {decode_text(frame.body)}"
            return self.fail(Failure(Cause.DISAGREED, rank, self.activity.step, "", error))
        if frame.number < self.activity.call - 1:
            return []
        if effects := self._check_ahead(rank, frame):
            return effects
        objection = Objection.unpack(frame.body, self.size)
        if objection.doing == HAS_LEFT:
            self._left.setdefault(objection.rank, Left(objection.num_steps, frame.number - 1))
        return [*self._object(frame.number, objection, rank), Signal.WAKE]

    def most_of_call(self, rank: int, number: int, call: int) -> int:
        """Return how many bytes the next part of a message may have that a link sends to a call.

        Only what may come now is waited for: to that call no more than its kind allows, a trace only once one was begun, and to
        all calls together no more than the longest message and some others.
        """
        num_told = len(told_by(self.rank, rank, self.size))
        to_this, to_all = self._kept[number][rank] if number in self._kept else 0, sum(kept[rank] for kept in self._kept.values())
        if call == Collective.GATHER and not self._has_traced:
            call = Collective.TRACE
        return min(
            most_in_part(call, self.size),
            most_in_parts(call, num_told, self.size) - to_this,
            longest(num_told, self.size, traces=self._has_traced) + MOST_AHEAD_BYTES - to_all,
        )

    def _check_ahead(self, rank: int, frame: Frame) -> Effects:
        """Break the pipeline if a rank is further ahead than it can be; a broken one keeps nothing more."""
        ahead = frame.number - self.activity.call
        if self.failure is not None:
            return [Signal.WAKE]
        if ahead <= MOST_AHEAD:
            return []
        how = f"is {ahead} calls ahead of rank {self.rank}"
        return self._exceeds(rank, f"{how}: either its loop catches the error of each call and calls again, or it")

    def _see_off(self, rank: int, left: Left) -> Effects:
        self._left[rank] = left
        return self._miss() or ([] if self._call is None else self._go_on(self._call))

    def _miss(self) -> Effects:
        """Break the pipeline if a rank has left in the middle of this rank's step, or before it began its own part of that.

        While this rank still compares what all ranks gave, a rank may have left because it found that they disagree. This rank
        is about to find the same, which says more.
        """
        step = self.activity.step
        if self.activity.state in (State.PREPARING, State.RUNNING):
            for rank, left in self._left.items():
                if left.num_steps <= step:
                    error = f"rank {rank} closed this pipeline in the middle of step {step}: its program has probably ended"
                    return self.fail(Failure(Cause.LOST, rank, step, "", error))
        return []

    def _answer(self, rank: int, frame: Frame) -> Effects:
        """Answer a question, and forward it if this is the first time that it has come."""
        asking = _one(ASKING, frame)
        if asking >= self.size:
            raise CommError(f"a question of rank {asking} in a pipeline of {self.size} ranks")
        if asking == self.rank or self._asked.get(asking, (0, 0))[0] >= frame.number:
            return []
        self._asked[asking] = frame.number, rank
        status = self._watchdog.answer(asking).pack()
        answer = Send(Frame(Kind.STATUS, frame.number, STATUS.pack(asking, self.rank) + status), [rank])
        return [answer, *self._spread(frame, rank)]

    def _take_status(self, frame: Frame) -> Effects:
        """Take in an answer, or hand it on to who has asked, the way that the question came."""
        if len(frame.body) < STATUS.size:
            raise CommError(f"{len(frame.body)} bytes are not a status")
        asking, rank = STATUS.unpack_from(frame.body)
        if max(asking, rank) >= self.size:
            raise CommError(f"an answer of rank {rank} to rank {asking} in a pipeline of {self.size} ranks")
        if asking == self.rank:
            self._watchdog.on_status(rank, frame.number, Status.unpack(frame.body[STATUS.size :]))
            return []
        number, link = self._asked.get(asking, (0, 0))
        return [Send(frame, [link])] if number == frame.number else []

    def disconnected(self, rank: int) -> Effects:
        """Take note that the connection to a rank has ended, which means that it is lost unless it has closed the pipeline."""
        if rank in self._left:
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

    def fail(self, failure: Failure, original: BaseException | None = None, *, source: int | None = None) -> Effects:
        """Break the pipeline, unless it is broken already or this rank has left it.

        Args:
            failure: what happened.
            original: this rank's own error.
            source: the link that the failure came over, if another rank has reported it.
        """
        if self.failure is not None or self.has_left:
            return []
        self.original, self.failure = original, failure  # in this order: other threads read both without the lock
        return [*self._spread(Frame(Kind.FAILED, 0, failure.pack()), source), Signal.RELEASE]

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
        """Look whether this rank waits too long, or for one that had left before it began to."""
        effects = self._miss()
        for finding in self._watchdog.tick(now, self.waits_for()):
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
        if self.failure is not None:
            return self._spread(Frame(Kind.FAILED, 0, self.failure.pack()), None)
        return self._spread(Frame(Kind.LEFT, self.activity.step, LEFT.pack(self._num_calls)), None)


def _one(format: struct.Struct, frame: Frame) -> int:
    """Return the only number in a frame's body."""
    if len(frame.body) != format.size:
        raise CommError(f"{len(frame.body)} bytes in a frame of kind {frame.kind.name}")
    return int(format.unpack(frame.body)[0])
