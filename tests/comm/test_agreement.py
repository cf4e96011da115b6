"""What ranks must agree on: read back as written, and every difference named with both values and ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.api.measured_plans import MeasuredRecord
from bpipe.comm.health.agreement import COMPARED, MOST_STAGES, RoomRecord, StepRecord, check
from bpipe.comm.health.rooms import ROOMS
from bpipe.errors import AgreementError, BPipeError, CommError
from bpipe.model.cut import Cut
from bpipe.parallel.shared_weights import SharedRecord, SharedWeight
from bpipe.session.batches import BatchRecord, BatchSample
from bpipe.session.fullest import PeakRecord
from bpipe.slices.slicing import SliceLengths
from bpipe.twins.exchange import TwinRecord
from tests.tiers import examples


def some(limit: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, limit), max_size=9).map(tuple)


DIGESTS, BYTES = st.binary(min_size=16, max_size=16), st.integers(0, 2**64 - 1)
KEYS = st.lists(st.text("0123456789abcdef", min_size=1, max_size=2), min_size=1, max_size=2).map(tuple)
NAMES = st.text("abc.", max_size=8)
SHARED = st.builds(SharedWeight, st.integers(0, 3), KEYS, NAMES, NAMES, st.booleans(), st.booleans(), st.integers(0, 2**61 - 1))
OF_ROOMS = {
    Cut: st.builds(Cut, DIGESTS),
    BatchRecord: st.builds(BatchRecord, st.integers(1, 2**62), st.builds(BatchSample, DIGESTS, DIGESTS, DIGESTS, DIGESTS)),
    SliceLengths: st.builds(SliceLengths, some(2**32 - 1).filter(bool)),
    TwinRecord: st.builds(TwinRecord, some(2**61 - 1), some(2**32 - 1), some(2**32 - 1), st.just(True)),
    SharedRecord: st.builds(SharedRecord, st.lists(SHARED, min_size=1, max_size=3).map(tuple)),
    PeakRecord: st.builds(PeakRecord, st.integers(1, 2**64 - 1), BYTES, BYTES, st.none() | BYTES),
    MeasuredRecord: st.builds(MeasuredRecord, st.integers(0, 2**32 - 1), DIGESTS, BYTES, DIGESTS),
}
RECORDS = st.builds(
    StepRecord,
    version=st.text("0123456789.abcdev+", max_size=16),
    schedule=st.text("0123456789_abcdef", max_size=32),
    fingerprint=st.text("0123456789abcdef", min_size=32, max_size=32),
    is_training=st.booleans(),
    step=st.integers(0, 2**64 - 1),
    num_stages=st.integers(1, 2**32 - 1),
    num_ranks=st.integers(0, 2**32 - 1),
    num_microbatches=st.integers(0, 2**32 - 1),
    pipeline=st.integers(0, 2**32 - 1),
    signature=st.binary(min_size=16, max_size=16),
    stages=st.lists(st.integers(0, 2**32 - 1), max_size=MOST_STAGES).map(tuple),
    idle=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    largest_remote_bytes=st.integers(0, 2**62),
    rooms=st.sets(st.sampled_from([*OF_ROOMS])).flatmap(lambda kinds: st.tuples(*(OF_ROOMS[kind] for kind in kinds))),
)
BASE = StepRecord("1.0", "1f1b", "ab" * 16, True, 3, 3, 3, 8, 1, bytes(16), (0,))


def ranks(**changes: Any) -> list[StepRecord]:
    """Three ranks that agree, but for what the last one changes."""
    return [BASE, BASE._replace(stages=(1,)), BASE._replace(stages=(2,))._replace(**changes)]


@given(RECORDS)
@settings(max_examples=examples(100))
def test_round_trip(record: StepRecord) -> None:
    assert StepRecord.unpack(record.pack()) == record
    assert StepRecord.unpack(record.pack(7), 7) == record


def test_a_shared_weight_of_another_ranks_stage() -> None:
    weight = SharedWeight(0, ("a",), "head.weight", "[2] float32", True, False, 0)
    with pytest.raises(AgreementError, match=r"rank 2 describes 'head.weight' of stage 0, and holds the stages \(2,\)"):
        check(ranks(rooms=(SharedRecord((weight,)),)))


def test_every_room_is_tried() -> None:
    assert [kind.__name__ for kind in OF_ROOMS] == list(ROOMS)


@pytest.mark.parametrize("kind", OF_ROOMS)
def test_a_room_without_news_sends_nothing(kind: type[RoomRecord]) -> None:
    silent = BASE._replace(rooms=(kind(),))
    assert silent.pack() == BASE.pack()
    assert kind.of([StepRecord.unpack(silent.pack())]) == [kind()]


NO_ROOMS = [["os"], ["Cut"], ["Cut", "", 0], ["Cut", "0", 0, 1], ["Cut", "", 0, ""], [["Cut"], "", 0, 1], [], {}, 3, "Cut"]


@pytest.mark.parametrize("room", NO_ROOMS)
def test_a_room_that_does_not_exist(room: object) -> None:
    data = BASE.pack().removesuffix(b"[]]") + json.dumps([room]).encode() + b"]"
    with pytest.raises(CommError, match="are not a valid agreement record of this version"):
        StepRecord.unpack(data)


def test_two_steps_in_a_row_have_the_same_record() -> None:
    assert BASE.pack(5) == BASE._replace(step=BASE.step + 1).pack(6) != BASE.pack(6)


@given(st.binary(max_size=700) | st.binary(max_size=700).map(lambda data: b'["StepRecord",' + data + b"]"))
@settings(max_examples=examples(100))
def test_random_bytes(data: bytes) -> None:
    with pytest.raises(CommError):
        StepRecord.unpack(data)


@given(RECORDS, st.binary(min_size=1, max_size=9))
def test_a_record_with_more_behind_it(record: StepRecord, more: bytes) -> None:
    with pytest.raises(CommError, match="are not a valid agreement record of this version"):
        StepRecord.unpack(record.pack() + more)


@pytest.mark.parametrize("field", StepRecord._fields[: StepRecord._fields.index("signature")])
def test_what_all_ranks_have_alike(field: str) -> None:
    """Each field before the signature, so that ranks that agree in these need not be compared further."""
    value = getattr(BASE, field)
    other = not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else value[::-1]
    with pytest.raises(AgreementError, match=r"^the ranks disagree on"):
        check(ranks(**{field: other}))


@given(RECORDS, st.integers(0, 10**6), st.integers(1, 255), st.booleans())
@settings(max_examples=examples(200))
def test_damaged_records_are_records_or_errors(record: StepRecord, place: int, flip: int, is_cut: bool) -> None:
    data = bytearray(record.pack())
    place %= len(data)
    data[place] ^= flip
    if place < len('["StepRecord"') or is_cut:
        with pytest.raises(CommError):
            StepRecord.unpack(bytes(data[:place] if is_cut else data))
        return
    try:
        seen = StepRecord.unpack(bytes(data))
        check([seen])
    except BPipeError:
        return
    assert seen.stages


def test_a_record_of_another_version_of_bpipe() -> None:
    fewer = StepRecord.unpack(BASE.pack())[:-1]
    with pytest.raises(CommError, match="are not a valid agreement record of this version of bpipe"):
        StepRecord.unpack(json.dumps(["StepRecord", *fewer], default=bytes.hex).encode())


@pytest.mark.parametrize("changes", [{"largest_remote_bytes": -1}, {"stages": (-1,)}, {"num_stages": 0}])
def test_numbers_that_no_rank_has(changes: dict[str, Any]) -> None:
    with pytest.raises(CommError, match="not a valid agreement record"):
        StepRecord.unpack(BASE._replace(**changes).pack())


def test_ranks_that_agree() -> None:
    check(ranks())
    check(ranks(signature=b"x" * 16))  # each rank has inputs of its own
    check([BASE._replace(stages=(2, 0)), BASE._replace(stages=(1,))])


CHANGES: dict[str, tuple[dict[str, Any], str, str]] = {
    "bpipe's version": ({"version": "1.1"}, "1.0", "1.1"),
    "train or eval": ({"is_training": False}, "train", "eval"),
    "which of the group's pipelines this is": ({"pipeline": 2}, "1", "2"),
    "the schedule": ({"schedule": "gpipe"}, "1f1b", "gpipe"),
    "the number of stages": ({"num_stages": 4}, "3", "4"),
    "the number of stages on a rank": ({"num_ranks": 1}, "1", "3"),
    "the number of ranks": ({"num_ranks": 2}, "3", "2"),
    "the number of microbatches": ({"num_microbatches": 16}, "8", "16"),
    "the plan": ({"fingerprint": "cd" * 16}, "ab" * 16, "cd" * 16),
    "the number of the step": ({"step": 4}, "3", "4"),
}


def test_every_compared_field_is_tried() -> None:
    assert list(CHANGES) == list(COMPARED)


@pytest.mark.parametrize("what", CHANGES)
def test_differences_are_named(what: str) -> None:
    change, mine, theirs = CHANGES[what]
    message = f"^the ranks disagree on {what}: rank 0 has {mine}, rank 2 has {theirs}\\. Make the same"
    with pytest.raises(AgreementError, match=message):
        check(ranks(**change))


def test_the_difference_that_explains_the_others_comes_first() -> None:
    with pytest.raises(AgreementError, match="the number of microbatches"):
        check(ranks(num_microbatches=16, fingerprint="cd" * 16, step=9))


def test_models_that_were_cut_differently() -> None:
    """A rank whose module nobody has cut, or wrapped, has nothing to compare."""
    one, other = (Cut(b"x" * 16),), (Cut(b"y" * 16),)
    check(ranks(rooms=one))
    check([BASE._replace(rooms=one), BASE._replace(stages=(1,)), BASE._replace(stages=(2,), rooms=one)])
    with pytest.raises(AgreementError, match=r"^ranks 0 and 2 have cut the model into different stages: choose"):
        check([BASE._replace(rooms=one), BASE._replace(stages=(1,)), BASE._replace(stages=(2,), rooms=other)])


def test_rooms_are_checked_in_their_order() -> None:
    """Batches before slices, whatever the order in which they came; both before who holds a stage, which comes before twins."""
    first, second = ((SliceLengths((n,) * 8), BatchRecord(n), TwinRecord(kinds=(n,))) for n in (1, 2))
    records = [BASE._replace(num_stages=2, rooms=first), BASE._replace(num_stages=2, stages=(1,), rooms=second)]
    with pytest.raises(AgreementError, match="ranks 0 and 1 have cut batches of 1 and 2 samples"):
        check(records)
    with pytest.raises(AgreementError, match="ranks 0 and 1 cut microbatch 0 of this step at different places"):
        check([one._replace(rooms=one.rooms[::2]) for one in records])
    with pytest.raises(AgreementError, match="stage 0 is on two ranks"):
        check([one._replace(rooms=one.rooms[2:], stages=(0,)) for one in records])
    with pytest.raises(AgreementError, match=r"stages 0 and 1 are twins, but their modules differ \(on ranks 0 and 1\)"):
        check([one._replace(rooms=one.rooms[2:]) for one in records])
    check([one._replace(rooms=(TwinRecord((3,), (4,)),)) for one in records])


def test_ranks_with_different_numbers_of_slices() -> None:
    with pytest.raises(AgreementError, match="ranks 0 and 2 cut the 8 microbatches of this step into 16 and 8 slices"):
        check([BASE._replace(rooms=(SliceLengths((1,) * 16),)), *ranks(rooms=(SliceLengths((2,) * 8),))[1:]])


def test_duplicate_stage() -> None:
    with pytest.raises(AgreementError, match=r"^stage 1 is on two ranks, 1 and 2: give each its own stage_index$"):
        check(ranks(stages=(1,)))


def test_missing_stage() -> None:
    message = r"^no rank holds stage 2 of 3 \(rank 0: \[0\], rank 1: \[1\], rank 2: \[\]\)$"
    with pytest.raises(AgreementError, match=message):
        check(ranks(stages=()))


def test_a_stage_that_no_microbatch_passes_need_not_be_there() -> None:
    check([record._replace(idle=(2,)) for record in ranks()[:2]])
    with pytest.raises(AgreementError, match="no rank holds stage 2 of 3"):
        check([record._replace(idle=(1,)) for record in ranks()[:2]])


def test_a_record_of_four_billion_stages_costs_nothing() -> None:
    began = time.process_time()
    with pytest.raises(AgreementError, match="no rank holds stage 1 of 4294967295"):
        check([BASE._replace(num_stages=2**32 - 1)])
    assert time.process_time() - began < 1
