"""What ranks tell each other beside the transfers: frames of a fixed binary format. Nothing in them is executed.

bytes 0..7    b"bpctl\\0" and the version of this format (uint16)
bytes 8..23   kind, length of the body (uint32 each), number (uint64): of a call, or of steps
then the body
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from bpipe.errors import CommError

__all__: list[str] = []

MAGIC, VERSION = b"bpctl\0", 1
HEAD = struct.Struct("<6sHIIQ")
MAX_BODY = 2**30


class Kind(IntEnum):
    """What a frame says."""

    CALL = 1  # this rank makes its next collective call
    REFUSAL = 2  # it cannot make that call; the body says why
    FAILED = 3  # something failed, and the pipeline is broken
    LEFT = 4  # it closed the pipeline after this number of steps
    ASK = 5  # what are you doing?
    STATUS = 6  # the answer


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
        if len(self.body) > MAX_BODY:
            raise CommError(f"{len(self.body)} bytes are more than one call can exchange, which is {MAX_BODY}")
        return HEAD.pack(MAGIC, VERSION, self.kind, len(self.body), self.number) + self.body


class FrameReader:
    """Assembles frames from a stream of bytes."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield the frames that these bytes complete.

        Raises:
            CommError: they are not frames of this version.
        """
        self._data += data
        while len(self._data) >= HEAD.size:
            magic, version, kind, length, number = HEAD.unpack_from(self._data)
            if magic != MAGIC or version != VERSION or kind not in Kind.__members__.values() or length > MAX_BODY:
                raise CommError(f"no bpipe frame of version {VERSION}: it starts {bytes(self._data[:8])!r}, kind {kind}")
            end = HEAD.size + length
            if len(self._data) < end:
                return
            frame = Frame(Kind(kind), number, bytes(self._data[HEAD.size : end]))
            del self._data[:end]
            yield frame
