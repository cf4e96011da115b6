"""Compare what all ranks are about to run before a step's first transfer: each rank sends one record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, Self

from bpipe.comm.health.rooms import ROOMS
from bpipe.comm.wire.codec import decode, encode, read_record
from bpipe.errors import AgreementError, CommError

__all__: list[str] = []

MOST_STAGES = 64  # on one rank


class RoomRecord:
    """What one feature has the ranks of a step compare, or tell each other.

    It is a frozen dataclass in the feature's room, which `ROOMS` names. Each field has a default, and a record without any news is
    not sent.

    Attributes:
        is_by_stage: whether it describes the modules of each stage, so that a rank with other stages has another one.
    """

    is_by_stage = False

    @classmethod
    def read(cls, values: Any) -> Any:
        """Return the record of any room, given the name of its type and its fields as they travel."""
        name, *given = values
        return read_record(getattr(import_module(ROOMS[name]), name), given)

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> list[Self]:
        """Return what each rank has said about this feature."""
        return [next((one for one in record.rooms if isinstance(one, cls)), None) or cls() for record in records]

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        """Raise an AgreementError if the ranks cannot run the step together, given the records of all."""

    @classmethod
    def doubts(cls, records: Sequence[StepRecord], depth: int) -> Iterable[str]:
        """Return what may be wrong with a step that the ranks can run, for warnings.

        Args:
            records: those of all ranks.
            depth: the number of stages that a microbatch passes.
        """
        return ()


class StepRecord(NamedTuple):
    """The step that one rank is about to run."""

    version: str
    schedule: str
    fingerprint: str  # of the plan: 32 hexadecimal digits
    is_training: bool
    step: int
    num_stages: int
    num_ranks: int
    num_microbatches: int
    pipeline: int  # which of the group's pipelines, as this rank counts them
    signature: bytes  # 16 bytes: a hash of the shapes and dtypes of this rank's inputs
    stages: tuple[int, ...]  # that this rank holds
    largest_remote_bytes: int = 0  # of what it has evicted to other ranks so far, where buffers have to be as large
    idle: tuple[int, ...] = ()  # the stages that no microbatch of this step passes, and that need not be on a rank
    rooms: tuple[RoomRecord, ...] = ()  # at most one of each type

    def pack(self, num_calls: int = 0) -> bytes:
        """Return the record as the bytes that are sent.

        Args:
            num_calls: how many collective calls there were. The number of the step is counted from there, so that the records of
                two steps in a row are the same bytes, which are sent only once.
        """
        rooms = tuple(one for one in self.rooms if one != type(one)())
        return encode(self._replace(step=self.step - num_calls, rooms=rooms))

    @classmethod
    def unpack(cls, data: bytes, num_calls: int = 0) -> StepRecord:
        """Read what `pack` wrote, after the same number of calls.

        Raises:
            CommError: the bytes are not a record.
        """
        record = decode(cls, data, "agreement record of this version of bpipe")
        record = record._replace(step=record.step + num_calls)
        counts = record.largest_remote_bytes, *record.stages
        if len(record.stages) > MOST_STAGES or min(counts) < 0 or record.num_stages < 1:
            raise CommError(f"not a valid agreement record: {record.num_stages} stages, rank with bytes and stages {counts[:8]}")
        return record


ALIKE = StepRecord._fields.index("signature")  # the number of leading fields that are alike on all ranks


# The fields to compare, in this order because a difference in one field explains differences in later ones.
COMPARED: dict[str, Callable[[StepRecord], object]] = {
    "bpipe's version": lambda record: record.version,
    "train or eval": lambda record: "train" if record.is_training else "eval",
    "which of the group's pipelines this is": lambda record: record.pipeline,
    "the schedule": lambda record: record.schedule,
    "the number of stages": lambda record: record.num_stages,
    "the number of stages on a rank": lambda record: record.num_stages // max(record.num_ranks, 1),
    "the number of ranks": lambda record: record.num_ranks,
    "the number of microbatches": lambda record: record.num_microbatches,
    "the plan": lambda record: record.fingerprint,
    "the number of the step": lambda record: record.step,
}


def check(records: Sequence[StepRecord]) -> None:
    """Raise unless all ranks are about to run the same step, and together hold each stage that they need exactly once.

    Raises:
        AgreementError: they differ; it names what differs, both values and both ranks, and all ranks raise the same.
    """
    are_alike = len({record[:ALIKE] for record in records}) == 1
    for what, value in () if are_alike else COMPARED.items():
        for rank, record in enumerate(records):
            if value(record) != value(records[0]):
                raise AgreementError(
                    f"the ranks disagree on {what}: rank 0 has {value(records[0])}, rank {rank} has {value(record)}. "
                    "Make the same schedules, and call their steps in the same order, on all ranks."
                )
    for kind in rooms_of(records):
        kind.check(records)
    owner: dict[int, int] = {}
    for rank, record in enumerate(records):
        for stage in record.stages:
            if stage in owner:
                raise AgreementError(f"stage {stage} is on two ranks, {owner[stage]} and {rank}: give each its own stage_index")
            owner[stage] = rank
    idle = set(records[0].idle)
    missing = next((stage for stage in range(records[0].num_stages) if stage not in owner and stage not in idle), None)
    if missing is not None:
        held = ", ".join(f"rank {rank}: {list(record.stages)}" for rank, record in enumerate(records))
        raise AgreementError(f"no rank holds stage {missing} of {records[0].num_stages} ({held})")


def rooms_of(records: Sequence[StepRecord]) -> list[type[RoomRecord]]:
    """Return the types of what ranks have said about features, in the order of `ROOMS`."""
    return sorted({type(one) for record in records for one in record.rooms}, key=lambda kind: [*ROOMS].index(kind.__name__))


def unlike(values: Sequence[Any]) -> tuple[int, int, Any, Any] | None:
    """Return the first two ranks that differ, and their values, given those of all; None if none do. Empty ones do not count."""
    known = [(rank, value) for rank, value in enumerate(values) if value]
    return next(((known[0][0], rank, known[0][1], value) for rank, value in known if value != known[0][1]), None)
