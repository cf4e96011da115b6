"""Notice that the first and the last stage are given different batches: then outputs are compared with targets of other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from bpipe.comm.health.agreement import StepRecord
from bpipe.errors import format_error
from bpipe.logs import LOG
from bpipe.model import microbatch as mb
from bpipe.model.call import Call
from bpipe.plan.plan import Plan

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


def is_compared(step: int) -> bool:
    """Return whether batches are compared in a step: in steps 1, 2, 4, 8 and so on.

    In step 0, ranks with the same seed still draw the same batch; a shuffled loader draws another order in its second epoch.
    """
    return step > 0 and step & (step - 1) == 0


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


def difference(records: Sequence[StepRecord], plan: Plan) -> str:
    """Return in words that the first and the last stage are given different batches; empty if they are not, as far as is known."""
    if plan.flow.arguments("local") is not None:  # each stage has a loss of its own
        return ""
    owner = {stage: rank for rank, record in enumerate(records) for stage in record.stages}
    depth = plan.depth
    ends = [(owner.get(stage), owner.get(stage + depth - 1)) for stage in range(0, plan.num_stages, depth)]
    for first, last in ends:
        if first is None or last is None:  # no microbatch passes it
            continue
        if what := BatchSample(*records[first].batch).difference(BatchSample(*records[last].batch)):
            return (
                f"rank {first}, which has the first stage, and rank {last}, which has the last one, were given different {what} in "
                f"step {records[0].step}. Give both the same batches, else outputs are compared with targets of other inputs: "
                "let the loader draw from a torch.Generator of its own, with one seed for all ranks of a pipeline, because stages "
                "may draw from the global one; a DistributedSampler takes the data-parallel rank. If one of them is only a "
                f"placeholder, give no {what} there"
            )
    return ""
