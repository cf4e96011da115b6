"""The collective calls of a pipeline, which all ranks must make in the same order, and why one cannot be completed."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from bpipe.comm.wire.codec import decode_text
from bpipe.comm.wire.frames import SMALL_BODY, Frame, Kind
from bpipe.errors import AgreementError, CommError

__all__: list[str] = []

HEAD = struct.Struct("<IBQ")  # of an objection: rank, what it does, number of steps; a text follows
MAX_TEXT = SMALL_BODY - HEAD.size
REFUSES, HAS_LEFT = 0, 255  # what a rank does instead of a collective call


class Collective(IntEnum):
    """The purpose of a collective call, which must be the same on all ranks."""

    STEP = 1
    PLAN = 2
    TRACE = 3
    GATHER = 4
    CONNECT = 5
    RESULT = 6


KNOWN = frozenset({REFUSES, HAS_LEFT, *Collective})  # what an objection may tell of: each once, so that they are few

DOING = {
    Collective.STEP: "runs a step",
    Collective.PLAN: "makes a plan",
    Collective.TRACE: "starts a trace",
    Collective.GATHER: "gathers a trace",
    Collective.CONNECT: "opens channels",
    Collective.RESULT: "ends a step",
}

CANNOT = {
    Collective.STEP: "run this step",
    Collective.PLAN: "make a plan",
    Collective.TRACE: "trace",
    Collective.GATHER: "gather a trace",
    Collective.CONNECT: "open channels",
    Collective.RESULT: "end a step",
}


class RankLeftError(AgreementError):
    """A rank has closed the pipeline, and others have not."""

    def __init__(self, message: str, rank: int = -1) -> None:  # which pickle leaves out, and sets behind it
        super().__init__(message)
        self.rank = rank


class Objection(NamedTuple):
    """Why a call cannot be completed, which every rank that makes it has to know.

    Args:
        rank: of two ranks that make different calls either one, or the one that makes none.
        doing: the call that it makes, or `REFUSES` or `HAS_LEFT`.
        num_steps: the steps after which it closed the pipeline.
        text: why it refuses.
    """

    rank: int
    doing: int
    num_steps: int = 0
    text: str = ""

    def frame(self, number: int) -> Frame:
        """Return the frame that tells of it, for the call of this number."""
        text = self.text.encode(errors="replace")[:MAX_TEXT]
        return Frame(Kind.REFUSAL, number, HEAD.pack(self.rank, self.doing, self.num_steps) + text)

    @classmethod
    def unpack(cls, body: bytes, size: int) -> Objection:
        """Read the body of a frame, in a pipeline of `size` ranks.

        Raises:
            CommError: the bytes are not an objection.
        """
        rank, doing, num_steps = HEAD.unpack_from(body) if len(body) >= HEAD.size else (size, 0, 0)
        if rank >= size or doing not in KNOWN:
            raise CommError(f"{len(body)} bytes are not a refusal of a rank in a pipeline of {size}")
        return cls(rank, doing, num_steps, decode_text(body[HEAD.size :]))

    def check(self, call: Collective, own_rank: int) -> None:
        """Raise, unless the rank makes the same call as this one; then there is another objection, to the others' call.

        Raises:
            AgreementError: the rank refuses the call, makes a different one, or has closed the pipeline.
        """
        if self.doing == REFUSES:
            raise AgreementError(f"rank {self.rank} cannot {CANNOT[call]}: {self.text}")
        if self.doing == HAS_LEFT:
            raise RankLeftError(
                f"rank {self.rank} closed this pipeline after {self.num_steps} steps, but rank {own_rank} makes another call: "
                "make the same calls on all ranks",
                self.rank,
            )
        if self.doing != call:
            doing = DOING[Collective(self.doing)]
            raise AgreementError(f"rank {self.rank} {doing} while this one {DOING[call]}: make the same calls on all ranks")
