"""Records on the wire: what is encoded is decoded again, and whatever else arrives is a CommError, soon."""

from __future__ import annotations

import json
import math
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpipe.comm.wire.codec import MAX_BYTES, decode, decode_text, encode
from bpipe.errors import CommError, ConfigurationError, printable
from tests.tiers import examples


class Color(IntEnum):
    RED = 1
    BLUE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """What is in a record, and refuses some values itself."""

    text: str
    number: int = 0

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ConfigurationError("a negative number")


class Everything(NamedTuple):
    """A field of each type that records have."""

    flag: bool
    number: int
    seconds: float
    text: str
    data: bytes
    color: Color
    indices: tuple[int, ...]
    pairs: tuple[tuple[int, str], ...]
    maybe: int | None = None
    by_number: Mapping[int, tuple[Inner, ...]] = {}
    by_name: Mapping[str, bool] = {}
    times: array[float] = array("d")
    counts: array[int] = array("q")


INTS = st.integers(-(2**63), 2**64 - 1)
SHOWN = st.text(st.characters(codec="utf-8"), max_size=30).map(printable)
SOUND = st.builds(
    Everything,
    st.booleans(),
    INTS,
    st.floats(allow_nan=False, allow_infinity=False),
    SHOWN,
    st.binary(max_size=30),
    st.sampled_from(Color),
    st.lists(INTS, max_size=4).map(tuple),
    st.lists(st.tuples(INTS, SHOWN), max_size=4).map(tuple),
    st.none() | INTS,
    st.dictionaries(INTS, st.lists(st.builds(Inner, text=SHOWN, number=st.integers(0, 9)), max_size=3).map(tuple), max_size=2),
    st.dictionaries(SHOWN, st.booleans(), max_size=2),
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4).map(partial(array, "d")),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(partial(array, "q")),
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(["00ff", 1, 4, 2**64])
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2))
EXAMPLE = Everything(True, -1, 0.5, "one", b"two", Color.BLUE, (1, 2), ((3, "x"),))


@given(SOUND)
@settings(max_examples=examples(100))
def test_records_round_trip(record: Everything) -> None:
    seen = decode(Everything, encode(record), "record")
    assert seen == record
    assert [type(value) for value in seen] == [type(value) for value in record]


def test_an_array_may_have_unknown_numbers_and_no_others_than_it_holds() -> None:
    data = encode(EXAMPLE._replace(times=array("d", [math.nan, 1.5])))
    assert b"NaN" not in data
    unknown, known = decode(Everything, data, "record").times
    assert math.isnan(unknown) and known == 1.5
    sound = encode(EXAMPLE._replace(counts=array("q", [7])))
    for wrong in (b"[9223372036854775808]", b"[7.0]", b"[Infinity]", b"7"):
        with pytest.raises(CommError, match="are not a valid record"):
            decode(Everything, sound.removesuffix(b"[7]]") + wrong + b"]", "record")


def test_text_of_a_peer_cannot_control_a_terminal() -> None:
    text = "\x1b[31m\x9b2J\u202eevil\r\x7f\ttab\nline"
    seen = decode(Everything, encode(EXAMPLE._replace(text=text, pairs=((1, text),))), "record")
    assert seen.text == seen.pairs[0][1] == r"\x1b[31m\x9b2J\u202eevil\r\x7f" + "\ttab\nline"
    assert decode_text(text.encode() + b"\xff") == seen.text + "\N{REPLACEMENT CHARACTER}"


@given(SOUND, st.integers(0, 10), JSON)
@settings(max_examples=examples(300))
@example(EXAMPLE, 0, 1)
@example(EXAMPLE, 1, True)
@example(EXAMPLE, 1, 2**64)
@example(EXAMPLE, 2, float("nan"))
@example(EXAMPLE, 2, 10**400)
@example(EXAMPLE, 3, "\ud800")
@example(EXAMPLE, 4, "0g")
@example(EXAMPLE, 5, 2)
@example(EXAMPLE, 6, {"1": 2})
@example(EXAMPLE, 7, ["1x"])
@example(EXAMPLE, 7, [[1, "x", 2]])
@example(EXAMPLE, 8, "1")
@example(EXAMPLE, 9, {"x": [["a", 1]]})
@example(EXAMPLE, 9, {"1": [["a", -1]]})
@example(EXAMPLE, 9, {"1": [["a"]]})
@example(EXAMPLE, 9, {"1": [["a", True]]})
@example(EXAMPLE, 9, [[1, [["a", 1]]]])
@example(EXAMPLE, 10, {"x": 1})
def test_a_field_of_another_type_is_refused(record: Everything, field: int, value: Any) -> None:
    """Or it is of the type after all, and comes back as that."""
    fields = json.loads(encode(record))[1:]
    fields[field] = value
    try:
        seen = decode(Everything, json.dumps(["Everything", *fields]).encode(), "record")
    except CommError:
        return
    assert decode(Everything, encode(seen), "record") == seen
    assert type(seen[field]) is type(record[field]) or field == 8


@given(
    st.binary(max_size=300)
    | st.binary(max_size=300).map(lambda data: b"[" + data + b"]")
    | JSON.map(lambda v: json.dumps(v).encode())
)
@settings(max_examples=examples(300))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CommError):
        decode(Everything, data, "record")


HOSTILE = {
    "nothing": b"",
    "an empty array": b"[]",
    "a deep pytree": b"[" * 100_000 + b"]" * 100_000,
    "too many bytes": encode(EXAMPLE._replace(text="x" * MAX_BYTES)),
    "a number of many digits": b'["Everything",' + b"9" * 200_000 + b"]",
    "another encoding": encode(EXAMPLE).decode().encode("utf-16"),
    "no utf-8": encode(EXAMPLE).replace(b"one", b"\xff\xfe"),
    "more behind it": encode(EXAMPLE) + b"\n",
    "another record": encode(EXAMPLE).replace(b"Everything", b"Nothing"),
    "a field too few": b'["Everything",true]',
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_bytes_are_refused_soon(what: str) -> None:
    began = time.process_time()
    with pytest.raises(CommError, match="are not a valid record"):
        decode(Everything, HOSTILE[what], "record")
    assert time.process_time() - began < 1


def test_half_a_character_is_sent_as_a_question_mark() -> None:
    assert decode(Everything, encode(EXAMPLE._replace(text="a\ud800")), "record").text == "a?"
