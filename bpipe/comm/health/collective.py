"""The collective calls of a pipeline, which all ranks must make in the same order."""

from __future__ import annotations

from enum import IntEnum

from bpipe.comm.wire.codec import decode_text
from bpipe.comm.wire.frames import Frame, Kind
from bpipe.errors import AgreementError

__all__: list[str] = []


class Collective(IntEnum):
    """The purpose of a collective call, which must be the same on all ranks."""

    STEP = 1
    PLAN = 2
    TRACE = 3
    GATHER = 4
    CONNECT = 5


DOING = {
    Collective.STEP: "runs a step",
    Collective.PLAN: "makes a plan",
    Collective.TRACE: "starts a trace",
    Collective.GATHER: "gathers a trace",
    Collective.CONNECT: "opens channels",
}

CANNOT = {
    Collective.STEP: "run this step",
    Collective.PLAN: "make a plan",
    Collective.TRACE: "trace",
    Collective.GATHER: "gather a trace",
    Collective.CONNECT: "open channels",
}


def frame_of(call: Collective, number: int, data: bytes) -> Frame:
    """Return the frame that a rank sends to take part in a call."""
    return Frame(Kind.CALL, number, bytes([call]) + data)


def data_of(frame: Frame) -> bytes:
    """Return what a rank gives to a call."""
    return frame.body[1:]


def check_alike(rank: int, frame: Frame, call: Collective) -> None:
    """Raise unless another rank makes the same call as this one.

    Raises:
        AgreementError: it refuses the call, or makes a different one.
    """
    if frame.kind is Kind.REFUSAL:
        raise AgreementError(f"rank {rank} cannot {CANNOT[call]}: {decode_text(frame.body)}")
    theirs = frame.body[0] if frame.body else 0
    if theirs != call:
        doing = DOING[Collective(theirs)] if theirs in Collective.__members__.values() else "does something unknown"
        raise AgreementError(f"rank {rank} {doing} while this one {DOING[call]}: make the same calls on all ranks")
