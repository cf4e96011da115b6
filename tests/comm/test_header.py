"""Headers: what is packed is read again, and whatever else arrives is a CommError, never anything worse."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bpipe.comm.wire import header
from bpipe.comm.wire.header import (
    EVICTION,
    FIXED,
    MAGIC,
    MAX_BODY,
    MOST_BYTES,
    SPEC,
    VERSION,
    Subject,
    pack_eviction,
    pack_spec,
    unpack_eviction,
    unpack_spec,
)
from bpipe.comm.wire.message import MessageSpec, TensorMeta, dense, flatten_message, meta_of
from bpipe.errors import CommError
from tests.comm.strategies import NESTS, WILD_LAYOUTS
from tests.tiers import examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

SUBJECT = Subject(step=5, stage=2, microbatch=7)
UNPACK: list[Callable[[bytes, Subject], Any]] = [unpack_spec, lambda data, subject: unpack_eviction(data, subject, 2)]
LARGEST = st.integers(0, 2**32 - 1)


def layout_of(value: Any) -> MessageSpec:
    tree, tensors = flatten_message(value, "stage 2")
    return MessageSpec(tree, tuple(meta_of(dense(tensor), requires_grad=tensor.requires_grad) for tensor in tensors))


EXAMPLE = layout_of({"a": [torch.zeros(3, 4).t(), None, 2.5], "b": torch.zeros(2, dtype=torch.int64)})


@given(NESTS, st.builds(Subject, st.integers(0, 2**64 - 1), LARGEST, LARGEST))
@settings(max_examples=examples(100))
def test_layouts_round_trip(value: Any, subject: Subject) -> None:
    spec = layout_of(value)
    data = pack_spec(subject, spec)
    assert unpack_spec(data, subject) == spec
    assert len(data) <= MOST_BYTES


def test_absent_tensors_round_trip() -> None:
    spec = MessageSpec("", (None, TensorMeta((), (), torch.bfloat16, False), None))
    assert unpack_spec(pack_spec(SUBJECT, spec), SUBJECT) == spec


@given(st.lists(st.integers(0, 2**40), max_size=200))
@settings(max_examples=examples(50))
def test_evictions_round_trip(sizes: list[int]) -> None:
    assert unpack_eviction(pack_eviction(SUBJECT, 2, sizes), SUBJECT, 2) == sizes


# What arrives damaged

SAMPLES = {SPEC: pack_spec(SUBJECT, EXAMPLE), EVICTION: pack_eviction(SUBJECT, 2, [4096, 0, 17])}


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_flipped_bit_is_noticed(kind: int) -> None:
    data = SAMPLES[kind]
    for bit in range(8 * len(data)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CommError):
            UNPACK[kind - 1](bytes(damaged), SUBJECT)


@given(st.sampled_from(sorted(SAMPLES)), st.integers(0, 10**6), st.integers(1, 255), st.binary(max_size=20))
@settings(max_examples=examples(200))
def test_every_flipped_byte_is_noticed(kind: int, place: int, flip: int, more: bytes) -> None:
    damaged = bytearray(SAMPLES[kind])
    damaged[place % len(damaged)] ^= flip
    with pytest.raises(CommError):
        UNPACK[kind - 1](bytes(damaged) + more, SUBJECT)


@pytest.mark.parametrize("kind", SAMPLES)
def test_every_truncation_is_noticed(kind: int) -> None:
    for length in range(len(SAMPLES[kind])):
        with pytest.raises(
            CommError, match=f"bytes has {length}$" if length >= FIXED.size else f": {length} bytes are not a header"
        ):
            UNPACK[kind - 1](SAMPLES[kind][:length], SUBJECT)


@given(st.sampled_from(UNPACK), st.binary(max_size=600) | st.binary(max_size=600).map(lambda data: MAGIC + data))
@settings(max_examples=examples(100))
def test_random_bytes(unpack: Callable[[bytes, Subject], Any], data: bytes) -> None:
    with pytest.raises(CommError):
        unpack(data, SUBJECT)


def test_other_versions() -> None:
    data = bytearray(SAMPLES[SPEC])
    struct.pack_into("<H", data, len(MAGIC), VERSION + 1)
    with pytest.raises(CommError, match=f"not a bpipe header of version {VERSION}: it starts"):
        unpack_spec(bytes(data), SUBJECT)


# What is sound, and not what was expected


@pytest.mark.parametrize("other", [SUBJECT._replace(step=4), SUBJECT._replace(stage=3), SUBJECT._replace(microbatch=8)])
def test_other_subjects(other: Subject) -> None:
    for kind, data in SAMPLES.items():
        with pytest.raises(CommError, match=rf"^expected a header of kind {kind} for {other}, got kind {kind} for {SUBJECT}$"):
            UNPACK[kind - 1](data, other)


@pytest.mark.parametrize("kind", SAMPLES)
def test_other_kinds(kind: int) -> None:
    with pytest.raises(CommError, match=f"expected a header of kind {3 - kind} for {SUBJECT}, got kind {kind}"):
        UNPACK[2 - kind](SAMPLES[kind], SUBJECT)


# What a malicious peer could write, checksum included


@given(WILD_LAYOUTS)
@example(MessageSpec('"T"', (TensorMeta((2**62, 4), (4, 1), torch.float32, False),)))
@example(MessageSpec('"T"', (TensorMeta((2, 2), (2, 2), torch.float32, False),)))
@example(MessageSpec('"T"', (TensorMeta((0, 2**62), (2**62, 1), torch.float32, False),)))
@example(MessageSpec('"T"', (TensorMeta((1,), (2**63 - 1,), torch.float32, False),)))
@example(MessageSpec('"T"', (TensorMeta((2**31, 2**33, 0), (0, 0, 1), torch.float32, False),)))
@settings(max_examples=examples(150))
def test_an_accepted_layout_is_one_that_can_be_made(spec: MessageSpec) -> None:
    try:
        accepted = unpack_spec(pack_spec(SUBJECT, spec), SUBJECT)
    except CommError:
        return
    assert accepted == spec
    for meta in accepted.tensors:
        if meta is not None:
            tensor = meta.new(torch.device("meta"))
            assert torch.ops.aten.is_non_overlapping_and_dense(tensor)
            assert tensor.numel() * tensor.element_size() == meta.num_bytes <= 2**48


@given(st.sampled_from(sorted(SAMPLES)), st.integers(0, 5), st.binary(max_size=60) | st.lists(st.integers(0, 8)).map(bytes))
@example(SPEC, 1, bytes([254, 0, 0]))  # a dtype that there is not
@settings(max_examples=examples(300))
def test_any_body(kind: int, count: int, body: bytes) -> None:
    data = header._pack(kind, SUBJECT, count, body)
    try:
        result = UNPACK[kind - 1](data, SUBJECT)
    except CommError:
        return
    assert len(result.tensors if kind == SPEC else result) == count


@pytest.mark.parametrize("sizes", [[-1], [5, -3], [2**48, 1], [2**63 - 1, 2**63 - 1]])
def test_impossible_sizes(sizes: list[int]) -> None:
    with pytest.raises(CommError, match="impossible sizes"):
        unpack_eviction(pack_eviction(SUBJECT, 0, sizes), SUBJECT, 0)


# What cannot be packed


def test_too_much_to_pack() -> None:
    with pytest.raises(CommError, match=f"^{SUBJECT}: 65536 tensors"):
        pack_eviction(SUBJECT, 0, [0] * 65536)
    with pytest.raises(CommError, match="more than a message can carry"):
        pack_spec(SUBJECT, MessageSpec("x" * (MAX_BODY + 1), ()))


def test_unknown_dtype() -> None:
    with pytest.raises(CommError, match=r"step 5, stage 2, microbatch 7: a tensor of torch.quint8 cannot be sent"):
        pack_spec(SUBJECT, MessageSpec('"T"', (TensorMeta((1,), (1,), torch.quint8, False),)))
