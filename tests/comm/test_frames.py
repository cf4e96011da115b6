"""What ranks tell each other beside transfers: read back as written, in pieces of any size, and refused if it is anything else."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.health.activity import Activity, State, Status
from bpipe.comm.health.failure import MOST_DETAILS, MOST_TEXT, Cause, Failure
from bpipe.comm.wire.frames import HEAD, MAX_BODIES, MAX_BODY, ONLY_HELLO, VERSION, Frame, FrameReader, Kind
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError, TransferTimeoutError, printable
from tests.tiers import examples

SIZE = 4  # ranks
FRAMES = st.builds(Frame, st.sampled_from(Kind), st.integers(0, 2**64 - 1), st.binary(max_size=200))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60).map(printable)  # as it arrives
FAILURES = st.builds(Failure, st.sampled_from(Cause), st.integers(0, SIZE - 1), st.integers(-1, 2**40), TEXTS, TEXTS, TEXTS)
SERVING = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 2**60)), max_size=5).map(tuple)
STATUSES = st.builds(
    Status,
    st.sampled_from(State),
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**40),
    st.integers(-1, 2**40),
    st.floats(0, 1e8),
    SERVING,
    call=st.integers(0, 2**40),
    filling=TEXTS,
)


@given(st.lists(FRAMES, max_size=5), st.data())
@settings(max_examples=examples(200))
def test_frames_arrive_whatever_pieces_they_travel_in(frames: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(frame.pack() for frame in frames)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=6)))
    reader = FrameReader()
    pieces = [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)])]
    assert [frame for piece in pieces for frame in reader.feed(piece)] == frames


@given(FRAMES, st.binary(max_size=20))
def test_a_frame_can_be_read_without_a_byte_behind_it(frame: Frame, behind: bytes) -> None:
    """In as few pieces as can be: a head, and a body if there is one."""
    stream, reader, found, num_pieces = io.BytesIO(frame.pack() + behind), FrameReader(), [], 0
    while not found:
        found, num_pieces = list(reader.feed(stream.read(reader.num_missing))), num_pieces + 1
    assert found == [frame] and stream.read() == behind
    assert num_pieces == 1 + bool(frame.body)


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_its_own_most_bytes(kind: Kind) -> None:
    head = HEAD.pack(b"bpctl\0", VERSION, kind, MAX_BODIES[kind] + 1, 0)
    for reader in (FrameReader(), FrameReader(ONLY_HELLO)):
        with pytest.raises(CommError, match="not a bpipe frame"):
            list(reader.feed(head))
    with pytest.raises(CommError, match=f"more than a frame of kind {kind.name} can carry"):
        Frame(kind, 0, bytes(MAX_BODIES[kind] + 1) if MAX_BODIES[kind] < MAX_BODY else Huge()).pack()


class Huge(bytes):
    """More bytes than a test should allocate."""

    def __len__(self) -> int:
        return MAX_BODY + 1


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.HELLO])
def test_who_has_not_said_hello_can_say_nothing_else(kind: Kind) -> None:
    with pytest.raises(CommError, match="not a bpipe frame"):
        list(FrameReader(ONLY_HELLO).feed(Frame(kind).pack()))


@given(FRAMES, st.integers(0, HEAD.size - 9), st.integers(1, 255))
@settings(max_examples=examples(200))
def test_damaged_heads_are_frames_or_errors(frame: Frame, place: int, flip: int) -> None:
    damaged = bytearray(frame.pack())
    damaged[place] ^= flip
    try:
        seen = list(FrameReader().feed(bytes(damaged)))
    except CommError:
        return
    assert place >= 8  # the kind or the length: nothing but another frame, or one that is not complete
    assert all(len(one.body) <= MAX_BODY for one in seen)


@given(st.binary(min_size=HEAD.size, max_size=300))
def test_random_bytes_are_no_frames(data: bytes) -> None:
    with pytest.raises(CommError, match="not a bpipe frame of version"):
        list(FrameReader().feed(data))


def test_a_frame_that_claims_gigabytes_is_refused_at_once() -> None:
    head = HEAD.pack(b"bpctl\0", VERSION, Kind.CALL, MAX_BODY + 1, 0)
    with pytest.raises(CommError, match="not a bpipe frame"):
        list(FrameReader().feed(head))


@given(FAILURES)
def test_failures_survive_packing(failure: Failure) -> None:
    assert Failure.unpack(failure.pack(), SIZE) == failure


@given(STATUSES)
def test_statuses_survive_packing(status: Status) -> None:
    assert Status.unpack(status.pack()) == status


@given(st.binary(max_size=120))
@settings(max_examples=examples(300))
def test_random_bytes_are_errors_or_sound(data: bytes) -> None:
    for unpack in (lambda: Failure.unpack(data, SIZE), lambda: Status.unpack(data)):
        try:
            seen = unpack()
        except CommError:
            continue
        assert 0 <= seen.rank < 2**16


@given(FAILURES | STATUSES, st.data())
@settings(max_examples=examples(200))
def test_cut_or_damaged_bodies_are_sound_or_errors(told: Failure | Status, data: st.DataObject) -> None:
    whole = told.pack()
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(0, 255))
    try:
        seen = Failure.unpack(bytes(damaged), SIZE) if isinstance(told, Failure) else Status.unpack(bytes(damaged))
    except CommError:
        return
    assert type(seen) is type(told)


def test_long_texts_are_cut() -> None:
    failure = Failure(Cause.RAISED, 0, 0, "x" * MOST_TEXT, "y" * 2 * MOST_TEXT, "ä" * MOST_DETAILS)
    seen = Failure.unpack(failure.pack(), SIZE)
    assert seen.place == failure.place
    assert len(seen.error.encode()) <= MOST_TEXT
    assert seen.error.endswith("...")
    assert len(seen.details.encode(errors="replace")) <= MOST_DETAILS


PLACE = "stage 2, microbatch 3, action 2F3"


@pytest.mark.parametrize(
    "cause, kind",
    list(zip(Cause, [RankFailedError, RankLostError, TransferTimeoutError, AgreementError])),
    ids=lambda one: str(one),
)
def test_the_error_for_a_failure(cause: Cause, kind: type[CommError]) -> None:
    error = Failure(cause, 2, 5, PLACE, "ValueError: boom", "its traceback").as_error(
        0, "stage 0, microbatch 1, action 0WAIT_RECV_B1"
    )
    assert type(error) is kind
    assert "ValueError: boom" in str(error)
    assert "noticed on rank 0, stage 0, microbatch 1, action 0WAIT_RECV_B1" in error.__notes__[0]
    assert "its traceback" in error.__notes__[1]
    if isinstance(error, RankFailedError):
        assert (error.rank, error.step, error.action, error.error) == (2, 5, "2F3", "ValueError: boom")


def test_an_error_keeps_the_end_of_its_traceback() -> None:
    try:
        raise MemoryError("x" * 10)
    except MemoryError as error:
        failure = Failure.raised(error, 1, 7, PLACE)
    assert str(failure) == f"rank 1 failed in step 7, {PLACE}: MemoryError: xxxxxxxxxx"
    assert failure.details.rstrip().endswith("MemoryError: xxxxxxxxxx")


def test_nothing_runs_on_a_rank_that_has_not_begun() -> None:
    activity = Activity()
    assert activity.action() is None
    assert activity.place() == ""
    assert not activity.is_waiting()
