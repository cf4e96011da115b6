"""What ranks must agree on: read back as written, and every difference named with both values and ranks."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bpipe.comm.health.agreement import COMPARED, MOST_STAGES, StepRecord, check
from bpipe.errors import AgreementError, BPipeError, CommError
from tests.tiers import examples

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
    slices=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    weights=st.lists(st.integers(0, 2**61 - 1), max_size=9).map(tuple),
    kinds=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    settings=st.lists(st.integers(0, 2**32 - 1), max_size=9).map(tuple),
    revision=st.integers(0, 2**32 - 1),
    batch_size=st.integers(0, 2**62),
    cut=st.binary(min_size=16, max_size=16),
    form=st.binary(min_size=16, max_size=16),
    states=st.integers(0, 2**64 - 1),
    peak=st.integers(0, 2**64 - 1),
    plain_peak=st.integers(0, 2**64 - 1),
    largest_remote_bytes=st.integers(0, 2**62),
    inputs=st.binary(min_size=16, max_size=16),
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
    check(ranks(cut=b"x" * 16))
    one, other = b"x" * 16, b"y" * 16
    check([BASE._replace(cut=one), BASE._replace(stages=(1,)), BASE._replace(stages=(2,), cut=one)])
    with pytest.raises(AgreementError, match=r"^ranks 0 and 2 have cut the model into different stages: choose"):
        check([BASE._replace(cut=one), BASE._replace(stages=(1,)), BASE._replace(stages=(2,), cut=other)])


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
