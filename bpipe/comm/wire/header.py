"""Headers on the wire: a fixed binary format, checked before anything in it is trusted. Nothing is unpickled.

bytes  0..7    b"bpipe\\0" and the version of this format (uint16)
bytes  8..15   kind, number of tensors (uint16 each), length of the body (uint32)
bytes 16..31   step (uint64), stage, microbatch (uint32 each)
bytes 32..35   CRC-32 of everything else
then the body: kind 1, a layout: for each tensor its dtype, whether it needs a gradient (1) or may need one later
(2), its number of dimensions, shape and strides; then the pytree as UTF-8. Kind 2, an eviction: the part of the microbatch that
moves, 0 for all, then the size of each message, as int64.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch

from bpipe.comm.wire.message import MessageSpec, TensorMeta
from bpipe.errors import CommError

__all__: list[str] = []

MAGIC, VERSION = b"bpipe\0", 3
FIXED = struct.Struct("<6sHHHIQIII")
MAX_BODY = 16 * 1024**2
MOST_BYTES = FIXED.size + MAX_BODY
MAX_DIMS = 64
SPEC, EVICTION = 1, 2
ABSENT = 255
NO_GRADIENT, GRADIENT, MAYBE_LATER = range(3)

DTYPES: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name)
    for name in [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "complex64",
        "complex128",
        "complex32",
        "uint8",
        "int8",
        "int16",
        "int32",
        "int64",
        "bool",
        "uint16",
        "uint32",
        "uint64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    ]
    if hasattr(torch, name)
)
CODES = {dtype: code for code, dtype in enumerate(DTYPES)}


class Subject(NamedTuple):
    """The message that a header describes; the receiver expects exactly this one."""

    step: int
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"step {self.step}, stage {self.stage}, microbatch {self.microbatch}"


def pack_spec(subject: Subject, spec: MessageSpec) -> bytes:
    """Pack a layout into a header."""
    parts = []
    for meta in spec.tensors:
        if meta is None:
            parts.append(struct.pack("<BBB", ABSENT, 0, 0))
            continue
        if meta.dtype not in CODES:
            raise CommError(f"{subject}: a tensor of {meta.dtype} cannot be sent; cast it in the stage")
        needs = GRADIENT if meta.requires_grad else MAYBE_LATER if spec.is_open and meta.is_differentiable else NO_GRADIENT
        parts.append(struct.pack("<BBB", CODES[meta.dtype], needs, len(meta.shape)))
        parts.append(struct.pack(f"<{2 * len(meta.shape)}q", *meta.shape, *meta.stride))
    return _pack(SPEC, subject, len(spec.tensors), b"".join(parts) + spec.tree.encode())


def unpack_spec(data: bytes, expected: Subject) -> MessageSpec:
    """Unpack the layout that `pack_spec` packed.

    Raises:
        CommError: the bytes are not a layout header, are damaged, or are about something other than expected.
    """
    count, body = _unpack(data, SPEC, expected)
    metas: list[TensorMeta | None] = []
    try:
        offset, is_open = 0, False
        for _ in range(count):
            code, needs, dims = struct.unpack_from("<BBB", body, offset)
            if dims > MAX_DIMS or needs > MAYBE_LATER:
                raise ValueError(f"{dims} dimensions, gradient flag {needs}")
            numbers = struct.unpack_from(f"<{2 * dims}q", body, offset + 3)
            metas.append(
                None if code == ABSENT else _checked(TensorMeta(numbers[:dims], numbers[dims:], DTYPES[code], needs == GRADIENT))
            )
            is_open = is_open or needs == MAYBE_LATER
            offset += 3 + 16 * dims
        return MessageSpec(body[offset:].decode(), tuple(metas), is_open)
    except (struct.error, IndexError, ValueError) as error:
        raise CommError(f"{expected}: a header does not hold a layout of tensors: {error}") from error


def _checked(meta: TensorMeta) -> TensorMeta:
    most_bytes = math.prod(size or 1 for size in meta.shape) * meta.dtype.itemsize  # torch multiplies before it sees a zero
    if min(meta.shape + meta.stride, default=0) < 0 or most_bytes > 2**48:
        raise ValueError(f"shape {meta.shape}, strides {meta.stride}")
    spans = sorted((stride, size) for size, stride in zip(meta.shape, meta.stride) if size != 1)
    expected = 1
    for stride, size in spans if 0 not in meta.shape else ():
        if stride != expected:
            raise ValueError(f"shape {meta.shape} with strides {meta.stride} has gaps or overlaps")
        expected *= size
    return meta


def pack_eviction(subject: Subject, part: int, sizes: Sequence[int]) -> bytes:
    """Pack the part that an eviction moves, 0 for all, and the sizes in bytes of its messages into a header."""
    return _pack(EVICTION, subject, len(sizes), struct.pack(f"<{1 + len(sizes)}q", part, *sizes))


def unpack_eviction(data: bytes, expected: Subject, expected_part: int) -> list[int]:
    """Unpack the sizes of the messages that `pack_eviction` packed.

    Raises:
        CommError: the bytes are not an eviction header, are damaged, or are about something other than expected.
    """
    count, body = _unpack(data, EVICTION, expected)
    if len(body) != 8 * (1 + count):
        raise CommError(f"{expected}: an eviction header of {count} messages has {len(body)} bytes")
    part, *sizes = struct.unpack(f"<{1 + count}q", body)
    if part != expected_part:
        raise CommError(f"{expected}: an eviction of part {part} arrived, expected part {expected_part}")
    if min(sizes, default=0) < 0 or sum(sizes) > 2**48:
        raise CommError(f"{expected}: an eviction header has impossible sizes {sizes[:8]}")
    return sizes


def size_of(data: bytes, expected: Subject) -> int:
    """Return the size in bytes of the header at the start of the data.

    Raises:
        CommError: the data is too short for a header.
    """
    if len(data) < FIXED.size:
        raise CommError(f"{expected}: {len(data)} bytes are not a header")
    _, _, _, _, length, *_ = FIXED.unpack_from(data)
    return FIXED.size + int(length)


def _pack(kind: int, subject: Subject, count: int, body: bytes) -> bytes:
    if len(body) > MAX_BODY or count > 0xFFFF:
        raise CommError(f"{subject}: {count} tensors, described in {len(body)} bytes, are more than a message can carry")
    fields = (MAGIC, VERSION, kind, count, len(body), *subject)
    crc = zlib.crc32(FIXED.pack(*fields, 0) + body)
    return FIXED.pack(*fields, crc) + body


def _unpack(data: bytes, kind: int, expected: Subject) -> tuple[int, bytes]:
    if len(data) < FIXED.size:
        raise CommError(f"{expected}: {len(data)} bytes are not a header")
    magic, version, _, _, length, *_ = FIXED.unpack_from(data)
    if magic != MAGIC or version != VERSION:
        raise CommError(f"{expected}: not a bpipe header of version {VERSION}: it starts {data[:8]!r}")
    if len(data) != FIXED.size + length:
        raise CommError(f"{expected}: a header of {FIXED.size + length} bytes has {len(data)}")
    *fields, crc = FIXED.unpack_from(data)
    body = data[FIXED.size :]
    if crc != zlib.crc32(FIXED.pack(*fields, 0) + body):
        raise CommError(f"{expected}: a header is damaged, its checksum is wrong")
    _, _, seen_kind, count, _, *subject = fields
    if seen_kind != kind or Subject(*subject) != expected:
        raise CommError(f"expected a header of kind {kind} for {expected}, got kind {seen_kind} for {Subject(*subject)}")
    return count, body
