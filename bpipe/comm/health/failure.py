"""The failure that broke a pipeline, as ranks report it to each other: where it happened, why, and which error each rank raises."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from bpipe.cleanup import concise_traceback
from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import AgreementError, CommError, RankFailedError, RankLostError, TransferTimeoutError, format_error

__all__: list[str] = []

MOST_TEXT, MOST_DETAILS = 4096, 16384  # bytes


class Cause(IntEnum):
    """The cause of a failure."""

    RAISED = 1  # an error on a rank
    LOST = 2  # a rank's process ended, or its machine
    TIMED_OUT = 3
    DISAGREED = 4


class Failure(NamedTuple):
    """The first failure that a rank knows of.

    Args:
        cause: its kind.
        rank: the rank of the pipeline's group where it happened.
        step: the number of the step there; -1 if unknown.
        place: the stage, microbatch and action; empty outside a step.
        error: the type and text of the error.
        details: its traceback, or what every rank was doing.
    """

    cause: Cause
    rank: int
    step: int
    place: str
    error: str
    details: str = ""

    @classmethod
    def raised(cls, error: BaseException, rank: int, step: int, place: str) -> Failure:
        """Make the failure of an error on this rank, with the end of its traceback."""
        return cls(Cause.RAISED, rank, step, place, format_error(error), _end_of_traceback(error))

    @property
    def action(self) -> str:
        """The action in the place, such as 1F2; empty if it names none."""
        return self.place.rpartition("action ")[2]

    def __str__(self) -> str:
        step = f" in step {self.step}" if self.step >= 0 else ""
        if self.cause is Cause.RAISED:
            return f"rank {self.rank} failed{step}{f', {self.place}' if self.place else ''}: {self.error}"
        return self.error

    def pack(self) -> bytes:
        place, error, details = _cut(self.place, MOST_TEXT), _cut(self.error, MOST_TEXT), _cut(self.details, MOST_DETAILS)
        return encode(self._replace(place=place, error=error, details=details))

    @classmethod
    def unpack(cls, data: bytes, size: int) -> Failure:
        """Read what `pack` wrote, in a pipeline of `size` ranks.

        Raises:
            CommError: the bytes are not a failure.
        """
        failure = decode(cls, data, "failure")
        if not 0 <= failure.rank < size:
            raise CommError(f"not a valid failure of a pipeline of {size} ranks: rank {failure.rank}")
        return failure

    def as_error(self, own_rank: int, place: str) -> CommError:
        """Return the error to raise on another rank.

        Args:
            own_rank: the rank that raises it.
            place: where that rank is; empty outside a step.
        """
        error: CommError
        if self.cause is Cause.TIMED_OUT:
            error = TransferTimeoutError(str(self))
        elif self.cause is Cause.DISAGREED:
            error = AgreementError(str(self))
        else:
            kind = RankFailedError if self.cause is Cause.RAISED else RankLostError
            error = kind(str(self), rank=self.rank, step=self.step, action=self.action, error=self.error)
        if place:
            error.add_note(f"bpipe: noticed on rank {own_rank}, {place}")
        if self.details:
            error.add_note(f"bpipe: on rank {self.rank}:\n{self.details}" if self.cause is Cause.RAISED else self.details)
        return error


def _end_of_traceback(error: BaseException) -> str:
    """Return the end of an error's traceback; nothing if only bpipe's own code raised it, because its text says it all."""
    try:
        return concise_traceback(error)[-MOST_DETAILS // 4 :]
    except BaseException as failure:  # a class that only looks like an exception
        return f"its traceback cannot be made, {type(failure).__name__}"


def _cut(text: str, most_bytes: int) -> str:
    data = text.encode(errors="replace")
    return text if len(data) <= most_bytes else data[: most_bytes - 3].decode(errors="ignore") + "..."
