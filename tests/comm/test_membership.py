"""The rules of membership, without a socket or a thread: whatever order frames and faults come in, no rank waits for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.health import gather
from bpipe.comm.health.activity import Activity, State
from bpipe.comm.health.collective import HAS_LEFT, MAX_TEXT, REFUSES, Collective, Objection
from bpipe.comm.health.effects import Effect, Send, Signal, Warn
from bpipe.comm.health.failure import Cause, Failure
from bpipe.comm.health.gather import MAX_GIVEN, Part, _in_parts, longest, most_given, most_in_part
from bpipe.comm.health.links import links
from bpipe.comm.health.membership import LEFT, MOST_AHEAD, MOST_AHEAD_BYTES, Membership
from bpipe.comm.health.watchdog import ANSWERS_S, Timeouts
from bpipe.comm.rendezvous.peers import MOST_WAITING
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError, TransferTimeoutError
from tests.tiers import examples

TIMEOUTS = Timeouts(timeout_s=60.0, slow_s=10.0)
STEP, TRACE = Collective.STEP, Collective.TRACE


def member(rank: int = 0, size: int = 3) -> Membership:
    return Membership(rank, size, Activity(), TIMEOUTS, 0.0)


def call(number: int, rank: int, data: bytes = b"", of: Collective = STEP) -> Frame:
    return Frame(Kind.CALL, number, Part(of, 0, {rank: data}).pack())


def as_before(number: int, earlier: int) -> Frame:
    return Frame(Kind.CALL, number, Part(STEP, earlier).pack())


def left(num_steps: int, num_calls: int = 0) -> Frame:
    return Frame(Kind.LEFT, num_steps, LEFT.pack(num_calls))


BOOM = Failure(Cause.RAISED, 1, 4, "stage 1, microbatch 2, action 1F2", "ValueError: boom")


# Calls


def test_a_call_is_sent_and_completes_when_all_have_made_it() -> None:
    one = member()
    assert one.begin_call(STEP, b"mine") == [Send(call(1, 0, b"mine"), [1, 2])]
    assert one.activity.state is State.MEETING
    assert one.collected(STEP) is None and one.waits_for() == one.late() == {1, 2}
    assert one.receive(2, call(1, 2, b"c")) == []
    assert one.collected(STEP) is None and one.waits_for() == one.late() == {1}
    assert one.receive(1, call(1, 1, b"b")) == [Signal.WAKE]
    assert one.collected(STEP) == [b"mine", b"b", b"c"]
    one.end_call(State.OUTSIDE)
    assert one.activity.state is State.OUTSIDE and not one.waits_for()


def test_what_all_gave_before_is_not_sent_again() -> None:
    one = member()
    one.begin_call(STEP, b"a")
    for rank in (1, 2):
        one.receive(rank, call(1, rank, b"x"))
    assert one.collected(STEP) == [b"a", b"x", b"x"]
    one.end_call(State.OUTSIDE)
    assert one.begin_call(STEP, b"a") == [Send(as_before(2, earlier=1), [1, 2])]
    one.receive(1, as_before(2, earlier=1))
    one.receive(2, Frame(Kind.CALL, 2, Part(STEP, 1, {2: b"new"}).pack()))
    assert one.collected(STEP) == [b"a", b"x", b"new"]


def test_another_earlier_call_than_this_one_s_is_an_error() -> None:
    one = member(size=2)
    one.begin_call(STEP, b"")
    with pytest.raises(CommError, match="rank 1 gives the same as in call 7, which is unknown here"):
        one.receive(1, as_before(1, earlier=7))


def test_a_call_may_be_made_by_others_first() -> None:
    one = member()
    for rank in (1, 2):
        one.receive(rank, call(1, rank))
    assert one.callers() == [1, 2]
    assert one.begin_call(STEP, b"")[-1] is Signal.WAKE
    assert one.callers() == []
    assert one.collected(STEP) == [b"", b"", b""]


def test_frames_of_a_call_that_is_over_are_not_kept() -> None:
    one = member()
    one.refuse("no")
    one.receive(1, call(2, 1))
    one.refuse("no")
    one.receive(2, call(2, 2))
    one.begin_call(STEP, b"")
    assert dict(one._parts) == {} and list(one._objections) == [2]


def test_another_call_and_a_refusal_are_errors_that_break_nothing() -> None:
    one = member()
    one.begin_call(STEP, b"")
    one.receive(2, call(1, 2, of=TRACE))
    with pytest.raises(AgreementError, match="rank 2 starts a trace while this one runs a step"):
        one.collected(STEP)
    one.end_call(State.OUTSIDE)
    one.begin_call(STEP, b"")
    one.receive(1, Objection(1, REFUSES, text="no target").frame(2))
    with pytest.raises(AgreementError, match="rank 1 cannot run this step: no target"):
        one.collected(STEP)
    assert one.failure is None


def test_a_refusal_takes_the_place_of_a_call_and_is_cut() -> None:
    one = member()
    (sent,) = one.refuse("x" * 2 * MAX_TEXT)
    assert isinstance(sent, Send) and (sent.frame.kind, sent.frame.number) == (Kind.REFUSAL, 1)
    assert Objection.unpack(sent.frame.body, 3) == Objection(0, REFUSES, text="x" * MAX_TEXT)
    assert one.begin_call(STEP, b"") == [Send(call(2, 0), [1, 2])]


def test_one_that_gives_up_before_its_first_call_is_a_failure() -> None:
    one = member()
    one.receive(1, Frame(Kind.REFUSAL, 0, b"longer than timeout_s=3"))
    with pytest.raises(AgreementError, match="rank 1 gave up while the ranks met for their first step: longer than"):
        one.check()


@given(st.binary(max_size=60), st.integers(0, 2), st.integers(-14, 14).filter(bool))
@settings(max_examples=examples(100))
def test_what_is_not_a_part_of_a_call_is_an_error(data: bytes, rank: int, more: int) -> None:
    one, body = member(), Part(STEP, 0, {rank: data}).pack()
    one.begin_call(STEP, b"")
    for wrong in (body[:more] if more < 0 else body + bytes(more), Part(STEP, 0, {rank + 3: data}).pack()):
        with pytest.raises(CommError):
            one.receive(1, Frame(Kind.CALL, 1, wrong))


def test_long_messages_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "PART_BYTES", 10)
    ranks = Ranks(16, 2, of=lambda rank: b"%d" % rank * 6)
    assert all(len(send.frame.body) < 60 for one in ranks.members for send in one.begin_call(STEP, b"") if isinstance(send, Send))
    ranks = Ranks(16, 2, of=lambda rank: b"%d" % rank * 6)
    ranks.settle()
    assert not any(ranks.left_to_do)


def test_a_rank_far_ahead_breaks_the_pipeline_and_is_named() -> None:
    one, refusal = member(), Objection(1, REFUSES, text="no target")
    for number in range(1, MOST_AHEAD + 1):
        assert one.receive(1, refusal.frame(number)) == [Signal.WAKE]
    assert one.failure is None
    assert Signal.RELEASE in one.receive(1, refusal.frame(MOST_AHEAD + 1))
    assert "rank 1 is 65 calls ahead of rank 0" in str(one.failure)
    one.receive(1, call(3, 1, b"x" * 1000))
    assert len(one._objections) == MOST_AHEAD and not one._parts  # a broken pipeline keeps nothing more


def test_a_rank_that_sends_too_much_for_later_calls_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpipe.comm.health.membership.MOST_AHEAD_BYTES", 4000)
    monkeypatch.setattr("bpipe.comm.health.membership.longest", lambda num_told, size, *, traces: 1050)
    one = member()
    for number in range(1, 5):
        one.receive(2, call(number, 2, bytes(1000)))
        one.receive(1, call(number, 1, bytes(1000)))  # each rank by itself
    assert one.failure is None
    one.receive(2, call(5, 2, bytes(1000)))
    assert "rank 2 has sent 1022 bytes to call 5, " in str(one.failure)


@pytest.mark.parametrize("is_in_call", [False, True])
def test_a_call_s_parts_are_bounded_together(is_in_call: bool) -> None:
    """Each of them may be as long as the longest; in parts a rank could send for ever."""
    one = member()
    if is_in_call:
        one.begin_call(STEP, b"")
    body, number = Part(STEP, 0, {1: bytes(100_000)}, is_last=False).pack(), 0
    while one.failure is None and number < 10:
        one.receive(1, Frame(Kind.CALL, 1, body))
        number += 1
    assert number == 3 and "rank 1 has sent 300066 bytes to call 1, where 262180 are the most allowed" in str(one.failure)
    for _ in range(5):
        one.receive(2, Frame(Kind.CALL, 1, Part(STEP, 0, {2: bytes(100_000)}, is_last=False).pack()))
    assert sum(map(len, one._parts[1][1].entries.values())) <= 200_000


@pytest.mark.parametrize("size, source, tells", [(3, 1, {2}), (16, 14, {12}), (16, 14, {13, 14, 15}), (16, 8, {9})])
def test_a_rank_tells_only_of_those_it_can_have_heard_of(size: int, source: int, tells: set[int]) -> None:
    one = member(0, size)
    with pytest.raises(CommError, match=r"it tells of rank \d+, of which it cannot have heard"):
        one.receive(source, Frame(Kind.CALL, 1, Part(STEP, 0, dict.fromkeys(tells, b"")).pack()))


def test_a_trace_may_be_gathered_only_once_one_was_begun() -> None:
    one = member()
    one.begin_call(STEP, b"")
    for number in (1, 2):  # in the same call and in the next one
        assert one.most_of_call(1, number, Collective.GATHER) == one.most_of_call(1, number, TRACE) < 2**23
        assert one.most_of_call(1, number, 99) < 100
    one.end_call(State.OUTSIDE)
    one.begin_call(TRACE, b"")
    one.end_call(State.OUTSIDE)
    one.begin_call(STEP, b"")
    assert one.most_of_call(1, 3, Collective.GATHER) > 2**28


@pytest.mark.parametrize("size", [2, 7, 64, 512, 4096])
def test_what_a_link_makes_a_rank_keep_is_bounded(size: int) -> None:
    """Whatever it says, before a trace and after one was begun."""
    one = member(0, size)
    most = [MOST_AHEAD_BYTES + longest(size // 2, size, traces=traces) for traces in (False, True)]
    assert most[0] <= 2**26 + 2**30 and most[1] <= 2**26 + 2**30
    assert max(one.most_of_call(link, 1, kind) for link in one.links for kind in Collective) < 2**25


@pytest.mark.parametrize("size", [2, 100, 2048, 2049, 4096, 20_000])
def test_a_gathered_trace_has_fewer_parts_than_may_wait(size: int) -> None:
    """Each rank gives as much as it may; a message of the last round tells of half of them."""
    data = bytes(most_given(Collective.GATHER, size))
    parts = list(_in_parts(Collective.GATHER, 0, dict.fromkeys(range((size + 1) // 2), data)))
    assert len(parts) <= MOST_WAITING / 2
    for part in parts:
        assert sum(map(len, part.entries.values())) + 8 * len(part.entries) < most_in_part(Collective.GATHER, size)


def test_a_rank_that_does_not_read_is_named() -> None:
    one = member()
    sent, _ = one.does_not_read(2, 1024)
    assert isinstance(sent, Send)
    assert "rank 2 does not read what rank 0 sends it, so that 1024 messages wait" in str(one.failure)


# Failures


def test_a_failure_is_sent_to_all_before_transfers_are_released() -> None:
    one, error = member(1), ValueError("boom")
    sent, released = one.raised(error, BOOM.place)
    assert isinstance(sent, Send) and sent.to == {0, 2}
    assert Failure.unpack(sent.frame.body, 3).error == "ValueError: boom"
    assert released is Signal.RELEASE
    assert not one.is_settled and one.released() == [Signal.WAKE] and one.is_settled
    assert one.raised(KeyError("another"), "") == [] and one.error_for(CommError("a transfer ended")) is error
    with pytest.raises(ValueError, match="boom"):
        one.check()


def test_a_failure_that_another_rank_reports_is_not_sent_on() -> None:
    one = member()
    assert one.receive(1, Frame(Kind.FAILED, 0, BOOM.pack())) == [Signal.RELEASE]
    with pytest.raises(RankFailedError, match="rank 1 failed in step 4"):
        one.check()
    mine = ValueError("mine")
    assert one.error_for(mine) is mine
    assert isinstance(one.error_for(CommError("a transfer ended")), RankFailedError)


def test_a_rank_whose_connection_ends_is_lost_unless_it_has_left() -> None:
    one = member()
    assert one.receive(1, left(5)) == []
    assert one.disconnected(1) == [] and one.failure is None
    one.begin_call(STEP, b"")
    with pytest.raises(AgreementError, match="rank 1 closed this pipeline after 5 steps, but rank 0 makes another call"):
        one.collected(STEP)
    sent, released = one.disconnected(2)
    assert isinstance(sent, Send) and released is Signal.RELEASE
    with pytest.raises(RankLostError, match="rank 2 was lost, step 0"):
        one.collected(STEP)


@pytest.mark.parametrize("num_steps, is_lost", [(4, True), (5, True), (6, False)])
def test_a_rank_that_leaves_in_the_middle_of_a_step_is_lost(num_steps: int, is_lost: bool) -> None:
    one = member()
    one.activity.state, one.activity.step = State.RUNNING, 5
    one.receive(1, left(num_steps))
    assert (one.failure is not None) == is_lost
    assert not is_lost or "in the middle of step 5" in str(one.failure)


@pytest.mark.parametrize("state", [State.PREPARING, State.RUNNING])
@pytest.mark.parametrize("num_steps, is_lost", [(4, True), (5, True), (6, False)])
def test_a_rank_that_leaves_before_its_first_action_is_missed(state: State, num_steps: int, is_lost: bool) -> None:
    """Its word comes while this rank is still in the call that began the step, or prepares it, or runs it."""
    for has_begun in (False, True):
        one = member()
        one.activity.step = 5
        one.begin_call(STEP, b"")
        for rank in (1, 2):
            one.receive(rank, call(1, rank))
        if has_begun:
            one.end_call(state)
        effects = one.receive(2, left(num_steps, num_calls=1))
        if not has_begun:
            assert one.failure is None
            one.end_call(state)
            effects = one.tick(0.25)
        assert (Signal.RELEASE in effects) == is_lost
        if is_lost:
            with pytest.raises(RankLostError, match="rank 2 closed this pipeline in the middle of step 5"):
                one.check()


def test_who_leaves_because_the_ranks_disagree_is_not_lost_to_a_rank_that_still_compares() -> None:
    one = member()
    one.activity.state, one.activity.step = State.AGREEING, 5
    assert one.receive(2, left(5, num_calls=1)) == [] and one.tick(0.25) == []
    assert one.failure is None
    one.activity.state = State.PREPARING  # so they agree after all
    assert Signal.RELEASE in one.tick(0.5)


def test_nothing_fails_in_a_pipeline_that_was_left() -> None:
    one = member()
    one.activity.step = 7
    assert one.leave() == [Send(left(7), {1, 2})] and one.leave() == []
    assert one.disconnected(1) == [] and one.failure is None


def test_a_broken_pipeline_is_left_with_its_failure() -> None:
    one = member()
    one.receive(1, Frame(Kind.FAILED, 0, BOOM.pack()))
    assert one.leave() == [Send(Frame(Kind.FAILED, 0, BOOM.pack()), {1, 2})]


@pytest.mark.parametrize("kind", [Kind.CALL, Kind.REFUSAL, Kind.FAILED, Kind.LEFT, Kind.ASK, Kind.STATUS])
def test_a_body_without_sense_is_an_error_for_the_driver_to_report(kind: Kind) -> None:
    one = member()
    with pytest.raises(CommError) as caught:
        one.receive(1, Frame(kind, 1, b"\xff" * 40))
    one.nonsense(1, caught.value)
    with pytest.raises(AgreementError, match="rank 1 sent rank 0 bytes that are not a bpipe message"):
        one.check()


def test_pipelines_called_in_another_order_and_ctrl_c_are_failures_of_this_rank() -> None:
    one, other = member(), member()
    one.crossed({2, 1}, "pipeline 3")
    assert "rank 0 calls pipeline 3 while rank 1 waits for it in another pipeline" in str(one.failure)
    other.interrupted()
    assert str(other.failure) == "rank 0 failed in step 0: KeyboardInterrupt"


# Many ranks


class Ranks:
    """Ranks that make some calls and leave, over connections that keep the order of each one's frames, and nothing more.

    Args:
        of: what each rank gives to a call.
    """

    def __init__(self, size: int, num_calls: int, of: Callable[[int], bytes] = b"%d".__mod__) -> None:
        self.members = [member(rank, size) for rank in range(size)]
        self.given = list(map(of, range(size)))
        self.left_to_do = [num_calls] * size
        self.errors: list[BaseException | None] = [None] * size
        self.in_call = [False] * size
        self.frozen: set[int] = set()
        self.ended: set[int] = set()  # processes
        self.warnings: list[str] = []
        self.wires: dict[tuple[int, int], deque[Frame | None]] = {
            (one, other): deque() for one in range(size) for other in links(one, size)
        }
        self.num_frames = 0

    def do(self, rank: int, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                for other in links(rank, len(self.members)) if effect.to is None else effect.to:
                    self.wires[rank, other].append(effect.frame)
                    self.num_frames += 1
            elif effect is Signal.RELEASE:
                self.do(rank, self.members[rank].released())
            elif isinstance(effect, Warn):
                self.warnings.append(effect.text)

    def is_done(self, rank: int) -> bool:
        return rank in self.ended or self.errors[rank] is not None or not self.left_to_do[rank]

    def step(self, rank: int) -> None:
        """Let a rank's program go on: begin a call, or look whether it is complete."""
        one = self.members[rank]
        if self.is_done(rank) or rank in self.frozen:
            return
        try:
            if not self.in_call[rank]:
                one.check()
                self.in_call[rank] = True
                self.do(rank, one.begin_call(STEP, self.given[rank]))
            given = one.collected(STEP)
            if given is None:
                return
            assert given == self.given
            self.left_to_do[rank] -= 1
            one.activity.step += 1
        except CommError as error:
            self.errors[rank] = error
        self.in_call[rank] = False
        one.end_call(State.OUTSIDE)

    def deliver(self, src: int, dst: int) -> bool:
        wire = self.wires.get((src, dst))
        if not wire or dst in self.ended or dst in self.frozen:
            return False
        frame, one = wire.popleft(), self.members[dst]
        one.heard_from(src)
        self.do(dst, one.disconnected(src) if frame is None else one.receive(src, frame))
        return True

    def end(self, rank: int, *, says_so: bool) -> None:
        """End a rank's process, after a word to the others or without."""
        if rank in self.ended:
            return
        if says_so:
            self.do(rank, self.members[rank].leave())
        self.ended.add(rank)
        for other in links(rank, len(self.members)):
            self.wires[rank, other].append(None)

    def fail(self, rank: int) -> None:
        if not self.is_done(rank) and rank not in self.frozen:
            error = ValueError(f"boom on {rank}")
            self.do(rank, self.members[rank].raised(error, ""))
            if self.members[rank].original is error:
                self.errors[rank] = error

    def settle(self) -> None:
        """Let all that is under way arrive, and all programs go on as far as they can."""
        has_moved = True
        while has_moved:
            before = list(self.left_to_do), list(self.errors), list(self.in_call)
            has_moved = sum(self.deliver(*ends) for ends in self.wires) > 0  # all of them, not only up to the first
            for rank in range(len(self.members)):
                self.step(rank)
            has_moved = has_moved or before != (self.left_to_do, self.errors, self.in_call)

    def tick(self, now: float) -> None:
        for rank, one in enumerate(self.members):
            if rank not in self.ended and rank not in self.frozen:
                self.do(rank, one.tick(now))
        self.settle()


FAULTS = st.sampled_from(["raise", "kill", "leave", "freeze"])


@st.composite
def plays(draw: st.DrawFn, most_faults: int, sizes: Sequence[int] = (2, 3, 4, 7, 8, 12)) -> tuple[Ranks, list[tuple[str, int]]]:
    """Ranks in the middle of a play: they have run in some order, and some have met with a fault."""
    size = draw(st.sampled_from(sizes))
    ranks, numbers = Ranks(size, draw(st.integers(1, 4))), st.integers(0, size - 1)
    faults = [(kind, rank) for kind, rank in draw(st.lists(st.tuples(FAULTS, numbers), max_size=most_faults))]
    pending = list(faults)
    for move, one, other in draw(st.lists(st.tuples(st.integers(0, 9), numbers, numbers), max_size=60)):
        if move == 0 and pending:
            strike(ranks, *pending.pop())
        elif move < 5 and one != other:
            ranks.deliver(one, other)
        else:
            ranks.step(one)
    while pending:
        strike(ranks, *pending.pop())
    return ranks, faults


def strike(ranks: Ranks, kind: str, rank: int) -> None:
    if kind == "raise":
        ranks.fail(rank)
    elif kind == "freeze":
        ranks.frozen.add(rank)
    else:
        ranks.end(rank, says_so=kind == "leave")


def run_out(ranks: Ranks) -> None:
    """Let everything happen that will, and then let time pass until no rank may wait any longer."""
    ranks.settle()
    for quarter in range(4 * int(TIMEOUTS.timeout_s + 2 * ANSWERS_S)):
        if all(ranks.is_done(rank) or rank in ranks.frozen for rank in range(len(ranks.members))):
            return
        ranks.tick(quarter / 4)


@given(plays(most_faults=3))
@settings(max_examples=examples(300), deadline=None)
def test_whatever_happens_no_rank_waits_for_ever(play: tuple[Ranks, list[tuple[str, int]]]) -> None:
    """Each one makes all its calls, or raises; and what broke it is something that happened on the rank that it names."""
    ranks, faults = play
    run_out(ranks)
    for rank, one in enumerate(ranks.members):
        if rank in ranks.ended or rank in ranks.frozen:
            continue
        assert ranks.is_done(rank), (rank, faults)
        if one.failure is None:
            continue
        cause = {Cause.RAISED: "raise", Cause.LOST: "kill"}.get(one.failure.cause)
        assert (cause, one.failure.rank) in faults if cause else any(kind == "freeze" for kind, _ in faults), (one.failure, faults)


@given(plays(most_faults=1))
@settings(max_examples=examples(200), deadline=None)
def test_one_fault_is_the_same_first_failure_on_every_rank(play: tuple[Ranks, list[tuple[str, int]]]) -> None:
    ranks, faults = play
    run_out(ranks)
    there = [one for rank, one in enumerate(ranks.members) if rank not in ranks.ended | ranks.frozen]
    seen = {str(one.failure).partition(", step")[0].partition(" while rank")[0] for one in there}
    if not faults:
        assert seen == {"None"} and not any(ranks.left_to_do)
    elif faults[0][0] in ("raise", "kill"):
        assert len(seen) == 1 and not any(one.failure and not one.is_settled for one in there)
    elif faults[0][0] == "leave":
        assert seen == {"None"}
        assert all(isinstance(error, AgreementError | None) for error in ranks.errors)


@given(plays(most_faults=0))
@settings(max_examples=examples(50), deadline=None)
def test_without_a_fault_all_calls_complete(play: tuple[Ranks, list[tuple[str, int]]]) -> None:
    ranks, _ = play
    ranks.settle()
    assert not any(ranks.left_to_do) and ranks.errors == [None] * len(ranks.members) and not ranks.warnings


@pytest.mark.parametrize("num_calls, says", [(0, "no answer from rank 2, where not all"), (1, "rank 2 is frozen")])
def test_a_frozen_rank_is_named_in_time(num_calls: int, says: str) -> None:
    ranks = Ranks(3, 1)
    for one in ranks.members:
        one.activity.call = num_calls
    ranks.frozen.add(2)
    run_out(ranks)
    assert all(isinstance(error, TransferTimeoutError) and says in str(error) for error in ranks.errors[:2])
    assert [text.partition(" has waited")[0] for text in ranks.warnings] == ["rank 0"]


# Hundreds of ranks


@pytest.mark.parametrize("size", [7, 13, 32, 64, 512])
def test_a_call_like_the_one_before_is_a_few_short_messages(size: int) -> None:
    ranks = Ranks(size, 1)
    ranks.settle()
    ranks.num_frames, ranks.left_to_do = 0, [1] * size
    sent = sum(len(effect.frame.body) for effect in ranks.members[0].begin_call(STEP, ranks.given[0]) if isinstance(effect, Send))
    assert sent < 20
    ranks = Ranks(size, 3)
    ranks.settle()
    assert not any(ranks.left_to_do) and ranks.errors == [None] * size and not ranks.warnings
    assert ranks.num_frames == 3 * size * (size - 1).bit_length()


@pytest.mark.parametrize("size", [7, 20, 64])
@pytest.mark.parametrize("seed", range(6))
def test_calls_complete_in_any_order_and_what_changes_is_told(size: int, seed: int) -> None:
    ranks, draw = Ranks(size, 4), random.Random(seed)
    wires = list(ranks.wires)
    while any(ranks.left_to_do):
        if draw.random() < 0.1 and len(set(ranks.left_to_do)) == 1 and not any(ranks.in_call):
            ranks.given[draw.randrange(size)] += b"!"
        for ends in draw.sample(wires, size):
            ranks.deliver(*ends)
        for rank in draw.sample(range(size), size // 2):
            ranks.step(rank)
    assert ranks.errors == [None] * size


@pytest.mark.parametrize("kind", ["raise", "kill", "leave", "refuse", "trace"])
@pytest.mark.parametrize("size, num_away", [(7, 0), (16, 3), (64, 5), (512, 9)])
def test_one_rank_s_word_reaches_all_in_a_few_hops(size: int, num_away: int, kind: str) -> None:
    """All others wait in a call, but for a few that have not come, and do no more than to forward."""
    ranks, draw = Ranks(size, 2), random.Random(size)
    odd, *away = draw.sample(range(size), num_away + 1)
    for rank in set(range(size)) - {odd, *away}:
        ranks.step(rank)
    one = ranks.members[odd]
    if kind == "refuse":
        ranks.do(odd, one.refuse("no"))
    elif kind == "trace":
        ranks.do(odd, one.begin_call(TRACE, b""))
    else:
        strike(ranks, kind, odd)
    for _ in range((size - 1).bit_length() + 1):  # each round, what was sent in the one before arrives
        for (src, dst), number in {ends: len(wire) for ends, wire in ranks.wires.items()}.items():
            for _ in range(number):
                ranks.deliver(src, dst)
    for rank in set(range(size)) - {odd, *away}:
        ranks.step(rank)
    there = {rank: ranks.errors[rank] for rank in range(size) if rank != odd and rank not in away}
    says = {
        "raise": f"rank {odd} failed",
        "kill": f"rank {odd} was lost",
        "leave": f"rank {odd} closed this pipeline after 0 steps",
    }
    says |= {"refuse": f"rank {odd} cannot run this step: no", "trace": f"rank {odd} starts a trace while this one runs a step"}
    next_to_it = {(odd + step) % size for step in (1, -1)}
    if kind == "trace" and next_to_it <= set(away):  # only they could know
        return
    assert all(str(error).startswith(says[kind]) for error in there.values()), there
    if kind == "trace":
        with pytest.raises(AgreementError, match=r"rank \d+ runs a step while this one starts a trace"):
            one.collected(TRACE)


@pytest.mark.parametrize("size", [4, 7, 12, 64])
def test_a_late_rank_keeps_all_that_sound_ranks_give(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link hands on what up to half of the ranks give, each of them as much as it may."""
    monkeypatch.setitem(MAX_GIVEN, STEP, 1000)
    ranks = Ranks(size, 1, lambda rank: b"%04d" % rank * 250)
    ranks.left_to_do[0] = 0
    ranks.settle()
    assert ranks.members[0].failure is None
    ranks.left_to_do[0] = 1
    ranks.settle()
    assert ranks.left_to_do == [0] * size and ranks.errors == [None] * size


@pytest.mark.parametrize("size", [7, 64])
def test_late_and_frozen_ranks_are_named_among_many(size: int) -> None:
    ranks, late, frozen = Ranks(size, 1), {2, size - 1}, {4}
    for one in ranks.members:
        one.activity.call = 1  # they have met
    ranks.frozen |= frozen
    for rank in late:
        ranks.is_done = lambda rank, was=ranks.is_done: rank in late or was(rank)  # type: ignore[method-assign]
    for quarter in range(4 * int(TIMEOUTS.timeout_s + 2)):
        ranks.tick(quarter / 4)
    (text,) = {one.partition(" for ")[2].partition("\n")[0] for one in ranks.warnings}
    assert text.startswith(f"ranks 2, 4, {size - 1} to begin step 0; rank 4 is frozen: no answer in 1 s")
    errors = [error for rank, error in enumerate(ranks.errors) if rank not in late | frozen]
    assert all(isinstance(error, TransferTimeoutError) and f"for ranks 2, 4, {size - 1} to begin" in str(error) for error in errors)


@given(plays(most_faults=4, sizes=(7, 9, 16, 33, 64)))
@settings(max_examples=examples(300), deadline=None)
def test_whatever_happens_among_many_no_rank_waits_for_ever(play: tuple[Ranks, list[tuple[str, int]]]) -> None:
    test_whatever_happens_no_rank_waits_for_ever.hypothesis.inner_test(play)  # type: ignore[attr-defined]


def test_leaving_is_told_only_to_those_who_make_another_call() -> None:
    one = member(0, 16)
    assert one.receive(1, left(3, num_calls=1)) == []
    sent = one.begin_call(STEP, b"")
    assert not any(effect.frame.kind is Kind.REFUSAL for effect in sent if isinstance(effect, Send))  # rank 1 has made this call
    one.end_call(State.OUTSIDE)
    assert Send(Objection(1, HAS_LEFT, 3).frame(2), links(0, 16)) in one.begin_call(STEP, b"")
