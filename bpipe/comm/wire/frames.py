"""Frames: the control messages of ranks, beside the transfers, in a fixed binary format. Nothing in them is executed.

bytes 0..7    b"bpctl\\0" and the version of this format (uint16)
bytes 8..23   kind, length of the body (uint32 each), number (uint64): of a call, or of steps
then the body
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from enum import IntEnum
from typing import NamedTuple

from bpipe.comm.wire.codec import MAX_BYTES
from bpipe.errors import CommError

__all__: list[str] = []

MAGIC, VERSION = b"bpctl\0", 2
HEAD = struct.Struct("<6sHIIQ")


class Kind(IntEnum):
    """The purpose of a frame."""

    CALL = 1  # this rank makes its next collective call, and tells what ranks give to it
    REFUSAL = 2  # a rank cannot make a call, or makes another one; the body says which and why
    FAILED = 3  # something failed, and the pipeline is broken
    LEFT = 4  # it closed the pipeline after this number of steps
    ASK = 5  # what are you doing? The body says who asks
    STATUS = 6  # the answer, and whose it is
    HELLO = 7  # who opens this connection
    PROOF = 8  # who opened this connection keeps it, and has the secret if there is one


MAX_BODY = 2**30  # of a call
SMALL_BODY = 4096
MAX_BODIES = dict.fromkeys(Kind, SMALL_BODY) | {Kind.CALL: MAX_BODY, Kind.FAILED: MAX_BYTES, Kind.STATUS: MAX_BYTES}
ONLY_HELLO = {Kind.HELLO: SMALL_BODY}  # from whom nothing else may come yet
ONLY_PROOF = {Kind.PROOF: SMALL_BODY}  # likewise, after the hellos


class Frame(NamedTuple):
    """One message to another rank."""

    kind: Kind
    number: int = 0
    body: bytes = b""

    def pack(self) -> bytes:
        """Return the frame as the bytes that are sent.

        Raises:
            CommError: it is too long.
        """
        if len(self.body) > (most := MAX_BODIES[self.kind]):
            raise CommError(f"{len(self.body)} bytes are more than a frame of kind {self.kind.name} can carry, which is {most}")
        return HEAD.pack(MAGIC, VERSION, self.kind, len(self.body), self.number) + self.body


class FrameReader:
    """Assembles frames from a stream of bytes.

    Args:
        max_bodies: the kinds that may come, and the most bytes of each one's body.
        most_of_call: likewise of a call that has more than a small body, by its number and the first byte of the body, now; None
            for any call.
    """

    def __init__(self, max_bodies: Mapping[Kind, int] = MAX_BODIES, most_of_call: Callable[[int, int], int] | None = None) -> None:
        self._max_bodies, self._most_of_call = max_bodies, most_of_call
        self._data = bytearray()

    @property
    def num_missing(self) -> int:
        """Return how many bytes at least the next frame still needs, so that a caller can read no byte behind it."""
        if len(self._data) < HEAD.size:
            return HEAD.size - len(self._data)
        _, _, _, length, _ = HEAD.unpack_from(self._data)
        return HEAD.size + int(length) - len(self._data)

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete.

        Raises:
            CommError: they are not frames of this version.
        """
        self._data += data
        while len(self._data) >= HEAD.size:
            magic, version, kind, length, number = HEAD.unpack_from(self._data)
            if magic != MAGIC or version != VERSION or length > self._max_bodies.get(kind, -1):
                raise CommError(f"not a bpipe frame of version {VERSION}: it starts {bytes(self._data[:8])!r}, kind {kind}")
            end = HEAD.size + length
            if kind == Kind.CALL and length > SMALL_BODY and len(self._data) > HEAD.size:
                self._check_call(number, self._data[HEAD.size], length)
            if len(self._data) < end:
                return
            frame = Frame(Kind(kind), number, bytes(self._data[HEAD.size : end]))
            del self._data[:end]
            yield frame

    def _check_call(self, number: int, call: int, length: int) -> None:
        """Refuse a call before its body has come, if the body is longer than such a call's can be."""
        if self._most_of_call is not None and length > (most := self._most_of_call(number, call)):
            raise CommError(f"a call of kind {call} with {length} bytes, which may have {most}")
