"""Compare what all ranks are about to run before a step's first transfer: each rank sends one record."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import AgreementError, CommError

__all__: list[str] = []

MOST_STAGES = 64  # on one rank
UNKNOWN_CUT = bytes(16)  # of a module that was not cut from a model by bpipe, or that is inside a wrapper


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
    revision: int = 0  # how often this rank has asked to measure its microbatches again
    cut: bytes = UNKNOWN_CUT  # 16 bytes: how the model was cut into stages
    form: bytes = bytes(16)  # the signature without the plain numbers among the inputs that do not decide what is saved
    states: int = 0  # bytes of optimizer states on this rank
    peak: int = 0  # the most bytes that its device has held, where its plan has to show that this is less
    plain_peak: int = 0  # than this, which it would have held without evictions or recomputation
    inputs: bytes = bytes(16)  # 16 bytes, where replicas compare: what this rank's inputs look like, apart from its modules
    weights: tuple[int, ...] = ()  # where twins compare them: a checksum of the weights of each of its stages, at first with values
    kinds: tuple[int, ...] = ()  # where twins compare them: a checksum of what the modules of each of its stages are
    settings: tuple[int, ...] = ()  # likewise of what else may decide what they compute: the user's attributes, and hooks
    is_changed: bool = False  # where twins compare their weights: whether a module has changed since the step before
    largest_remote_bytes: int = 0  # of what it has evicted to other ranks so far, where buffers have to be as large
    idle: tuple[int, ...] = ()  # the stages that no microbatch of this step passes, and that need not be on a rank
    batch: tuple[bytes, bytes, bytes, bytes] = (b"", b"", b"", b"")  # a sample of it, in steps in which batches are compared
    slices: tuple[int, ...] = ()  # of all slices, in positions: 0 where this rank has nothing of a microbatch, () if it cuts none
    batch_size: int = 0  # of the batch that this rank has cut into microbatches, in samples; 0 if nothing shows it

    def pack(self, num_calls: int = 0) -> bytes:
        """Return the record as the bytes that are sent.

        Args:
            num_calls: how many collective calls there were. The number of the step is counted from there, so that the records of
                two steps in a row are the same bytes, which are sent only once.
        """
        return encode(self._replace(step=self.step - num_calls))

    @classmethod
    def unpack(cls, data: bytes, num_calls: int = 0) -> StepRecord:
        """Read what `pack` wrote, after the same number of calls.

        Raises:
            CommError: the bytes are not a record.
        """
        record = decode(cls, data, "agreement record of this version of bpipe")
        record = record._replace(step=record.step + num_calls)
        if len(record.stages) > MOST_STAGES or min(record.stages, default=0) < 0 or record.num_stages < 1:
            raise CommError(f"not a valid agreement record: {record.num_stages} stages, rank with {record.stages[:8]}")
        if record.largest_remote_bytes < 0:
            raise CommError(f"not a valid agreement record: evictions of {record.largest_remote_bytes} bytes")
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
    _check_cut(records)
    _check_batch_sizes(records)
    _check_slices(records)
    owner: dict[int, int] = {}
    for rank, record in enumerate(records):
        for stage in record.stages:
            if stage in owner:
                raise AgreementError(f"stage {stage} is on two ranks, {owner[stage]} and {rank}: give each its own stage_index")
            owner[stage] = rank
    _check_twins(records)
    idle = set(records[0].idle)
    missing = next((stage for stage in range(records[0].num_stages) if stage not in owner and stage not in idle), None)
    if missing is not None:
        held = ", ".join(f"rank {rank}: {list(record.stages)}" for rank, record in enumerate(records))
        raise AgreementError(f"no rank holds stage {missing} of {records[0].num_stages} ({held})")


def _check_cut(records: Sequence[StepRecord]) -> None:
    """Raise if two ranks have stages of a model that was cut differently, because layers would run twice, or not at all."""
    known = [(rank, record.cut) for rank, record in enumerate(records) if record.cut != UNKNOWN_CUT]
    other = next((rank for rank, cut in known if cut != known[0][1]), None)
    if other is not None:
        raise AgreementError(
            f"ranks {known[0][0]} and {other} have cut the model into different stages: choose the stages on one rank, because two "
            "measurements differ, and send the lists of names to the others (torch.distributed.broadcast_object_list)"
        )


def _check_batch_sizes(records: Sequence[StepRecord]) -> None:
    """Raise if two ranks have cut batches of different sizes, because parts of other samples may meet in a microbatch."""
    known = [(rank, record.batch_size) for rank, record in enumerate(records) if record.batch_size]
    for rank, size in known:
        first, expected = known[0]
        if size != expected:
            raise AgreementError(
                f"ranks {first} and {rank} have cut batches of {expected} and {size} samples into microbatches, which may not "
                "belong together. Give args_chunk_spec=, kwargs_chunk_spec= or Options(target_chunk_spec=) there for a value with "
                "samples along another dimension (Options(target_chunk_spec=TensorChunkSpec(1)) for a target [time, batch]) or "
                "that each microbatch gets whole (None), or cut it yourself: step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)"
            )


def unlike_twins(
    records: Sequence[StepRecord], compared: Callable[[StepRecord], tuple[int, ...]]
) -> tuple[int, int, int, int] | None:
    """Return the first two stages that are twins and differ, and their ranks; None if there are none."""
    sums = {stage: (one, rank) for rank, record in enumerate(records) for stage, one in zip(record.stages, compared(record))}
    depth = records[0].num_stages // 2
    pairs = ((stage, stage + depth) for stage in sorted(sums) if stage + depth in sums)
    return next(((a, b, sums[a][1], sums[b][1]) for a, b in pairs if sums[a][0] != sums[b][0]), None)


def _check_twins(records: Sequence[StepRecord]) -> None:
    """Raise if two stages that are twins do not have the same modules and weights."""
    if found := unlike_twins(records, lambda record: record.kinds):
        raise AgreementError(
            "stages {} and {} are twins, but their modules differ (on ranks {} and {}): give both the same classes and functions "
            "in the same order, with the same settings, as a rate of dropout, and the same mode, train() or eval()".format(*found)
        )
    if found := unlike_twins(records, lambda record: record.weights):
        raise AgreementError(
            "stages {} and {} are twins, but their weights differ (on ranks {} and {}): give both the same parameters in the same "
            "order, freeze the same of them, and load the same values before the first step".format(*found)
        )


def slices_of(records: Sequence[StepRecord]) -> tuple[int, ...]:
    """Return the positions of all slices of a step, on which the ranks agree; () if no rank cuts anything."""
    return tuple(map(max, zip(*{record.slices for record in records if record.slices}, strict=True)))


def _check_slices(records: Sequence[StepRecord]) -> None:
    """Raise if two ranks cut a microbatch of a step at different places, or if only some microbatches have positions."""
    known, m = [(rank, record.slices) for rank, record in enumerate(records) if record.slices], records[0].num_microbatches
    for rank, slices in known:
        if m < 1 or len(slices) % m or len(slices) != len(known[0][1]):
            raise AgreementError(
                f"ranks {known[0][0]} and {rank} cut the {m} microbatches of this step into {len(known[0][1])} and {len(slices)} "
                "slices: give all ranks the same number of slices"
            )
    agreed = slices_of(records)
    if all(slices == agreed for _, slices in known) and 0 not in agreed:
        return
    each = len(agreed) // m  # slices in a microbatch
    for number in range(m):
        _check_slices_of(number, [(rank, slices[number * each :][:each]) for rank, slices in known])


def _check_slices_of(microbatch: int, slices: Sequence[tuple[int, Sequence[int]]]) -> None:
    """Raise if two ranks cut a microbatch at different places, or if none has a sequence.

    Args:
        slices: ranks, and how long the slices are there: 0 where a rank has nothing of the microbatch.
    """
    known = [(rank, lengths) for rank, lengths in slices if any(lengths)]
    if not known:
        raise AgreementError(
            f"microbatch {microbatch} of this step has no sequence that could be cut into slices, and others have one: give it "
            "an input whose dimension 1 are the positions, or a slice spec that says which dimension they are"
        )
    first, expected = known[0]
    for rank, lengths in known:
        if lengths != expected:
            at = next(i for i, (one, other) in enumerate(zip(lengths, expected)) if one != other)
            raise AgreementError(
                f"ranks {first} and {rank} cut microbatch {microbatch} of this step at different places: their slices have "
                f"{_shown(expected, at)} and {_shown(lengths, at)} positions. Give all ranks the same slice_lengths, and inputs "
                "and targets of as many positions (or a slice spec for a value that is not along the sequence)"
            )


def _shown(lengths: Sequence[int], at: int) -> str:
    """Return a few of the lengths of slices, around one of them."""
    begin, end = max(0, at - 2), at + 6
    return f"{'... ' if begin else ''}{', '.join(map(str, lengths[begin:end]))}{' ...' if end < len(lengths) else ''}"
