"""Notice that the first and the last stage are given different batches: then outputs are compared with targets of other inputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch

from bpipe.comm.health.agreement import RoomRecord, StepRecord, unlike
from bpipe.errors import AgreementError, format_error
from bpipe.logs import LOG
from bpipe.model import microbatch as mb
from bpipe.model.call import Call

__all__: list[str] = []

NUM_TENSORS, NUM_VALUES = 8, 61  # the most that are compared, and of each the most values: a prime, for values of many columns
COMPARED = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


class BatchSample(NamedTuple):
    """Hashes of what a rank's inputs and targets look like, and of some of their values; b"" where there is nothing to compare."""

    inputs: bytes = b""
    input_values: bytes = b""
    targets: bytes = b""
    target_values: bytes = b""

    @classmethod
    def of(cls, call: Call) -> BatchSample:
        try:
            return cls(*_sample([call.args, call.arg_mbs]), *_sample([call.target, call.target_mbs]))
        except Exception as error:  # of a mode in which values cannot be read: the step itself may work
            LOG.debug("the batches of this step are not compared: %s", format_error(error))
            return cls()

    def difference(self, other: BatchSample) -> str:
        """Return "inputs" or "targets" if these look alike and have other values; empty if neither does."""
        for what, one, another in (("inputs", self[:2], other[:2]), ("targets", self[2:], other[2:])):
            if one[0] == another[0] and one[1] != another[1]:
                return what
        return ""


NOTHING = BatchSample()


@dataclass(frozen=True, slots=True)
class BatchRecord(RoomRecord):
    """The batch that a rank is given.

    Args:
        size: in samples, of what it has cut into microbatches; 0 if nothing shows it.
        sample: of the batch, in steps in which batches are compared.
    """

    size: int = 0
    sample: BatchSample = NOTHING

    @classmethod
    def check(cls, records: Sequence[StepRecord]) -> None:
        if found := unlike([one.size for one in cls.of(records)]):  # parts of other samples may meet in a microbatch
            raise AgreementError(
                "ranks {} and {} have cut batches of {} and {} samples into microbatches, which may not belong together. Give "
                "args_chunk_spec=, kwargs_chunk_spec= or Options(target_chunk_spec=) there for a value with samples along another "
                "dimension (Options(target_chunk_spec=TensorChunkSpec(1)) for a target [time, batch]) or that each microbatch gets "
                "whole (None), or cut it yourself: step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)".format(*found)
            )

    @classmethod
    def doubts(cls, records: Sequence[StepRecord], depth: int) -> Iterator[str]:
        """Yield that the first and the last stage are given different batches, as far as is known."""
        samples = [one.sample for one in cls.of(records)]
        owner = {stage: rank for rank, record in enumerate(records) for stage in record.stages}
        ends = ((owner.get(stage), owner.get(stage + depth - 1)) for stage in range(0, records[0].num_stages, depth))
        for first, last in ends:  # None if no microbatch passes it
            if first is not None and last is not None and (what := samples[first].difference(samples[last])):
                yield (
                    f"rank {first}, which has the first stage, and rank {last}, which has the last one, were given different "
                    f"{what} in step {records[0].step}. Give both the same batches, else outputs are compared with targets of "
                    "other inputs: let the loader draw from a torch.Generator of its own, with one seed for all ranks of a "
                    "pipeline, because stages may draw from the global one; a DistributedSampler takes the data-parallel rank. If "
                    f"one of them is only a placeholder, give no {what} there"
                )
                return


def _sample(given: list[Any]) -> tuple[bytes, bytes]:
    tensors = enumerate(mb.tensors_in(given, set())[:NUM_TENSORS])
    values = {f"{i} {list(one.shape)} {one.dtype}": _some_of(one) for i, one in tensors if _can_be_compared(one)}
    values = {form: some for form, some in values.items() if len(set(some)) > 1}  # the others may be placeholders, such as zeros
    return (mb.digest(list(values)), mb.digest([*chain(*values.values())])) if values else (b"", b"")


def _can_be_compared(tensor: torch.Tensor) -> bool:
    """Return whether values can be read at once: not on a device, for which the host would have to wait."""
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and tensor.device.type == "cpu" and tensor.dtype in COMPARED and tensor.numel() > 0


def _some_of(tensor: torch.Tensor) -> list[str]:
    size = tensor.numel()
    number = min(size, NUM_VALUES)
    at = torch.tensor([i * size // number for i in range(number)], device="cpu")
    return [repr(value) for value in torch.take(tensor.detach(), at).tolist()]
