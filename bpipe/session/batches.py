"""Notice ranks that are given different batches: then the last stage has the targets of other inputs than the first stage."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from bpipe.model import microbatch as mb
from bpipe.model.call import Call

__all__: list[str] = []

# The step in which it is looked at, the second: in the first one, ranks with the same seed still draw the same batch. A stage that
# draws too, such as for Dropout, does so after that.
LOOKED_AT = 1
NUM_TENSORS, NUM_VALUES = 8, 64  # the most that are looked at, and of each the most values
READABLE = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    }
)


class Drawn(NamedTuple):
    """What the inputs and targets of a rank look like, and some of their values: a hash of each, or b"" if there is none."""

    inputs: bytes = b""
    values: bytes = b""
    targets: bytes = b""
    target_values: bytes = b""

    @classmethod
    def of(cls, call: Call) -> Drawn:
        return cls(*_drawn([call.args, call.arg_mbs]), *_drawn([call.target, call.target_mbs]))


def _drawn(given: list[Any]) -> tuple[bytes, bytes]:
    tensors = [tensor for tensor in mb.tensors_in(given) if _is_readable(tensor)][:NUM_TENSORS]
    values = [_some_of(tensor) for tensor in tensors]
    if not any(len(set(of_one)) > 1 for of_one in values):  # a placeholder, such as zeros
        return b"", b""
    return _hash([(tensor.shape, tensor.dtype) for tensor in tensors]), _hash(values)


def _is_readable(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
    return is_plain and tensor.dtype in READABLE and tensor.numel() > 0


def _some_of(tensor: torch.Tensor) -> list[Any]:
    """Return values of a tensor, as far apart as there are many."""
    at = range(0, tensor.numel(), max(tensor.numel() // NUM_VALUES, 1))[:NUM_VALUES]
    found: list[Any] = torch.take(tensor.detach(), torch.tensor(at, device=tensor.device)).tolist()
    return found


def _hash(values: list[Any]) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()[:8]


def difference(drawn: Sequence[Drawn]) -> str:
    """Return in words what two ranks were given that looks alike and is not; empty if there is no such thing.

    Args:
        drawn: what each rank was given.
    """
    for what, place in (("inputs", 0), ("targets", 2)):
        first: dict[bytes, tuple[int, bytes]] = {}  # a rank whose tensors look so, and their values
        for rank, one in enumerate(drawn):
            form, values = one[place : place + 2]
            other, expected = first.setdefault(form, (rank, values))
            if values != expected:
                return (
                    f"ranks {other} and {rank} were given different {what} in step {LOOKED_AT}. The first stage takes the inputs "
                    "of its rank's batch and the last stage the targets of its own, so give all ranks the same: let the loader "
                    "draw from a torch.Generator of its own with the same seed on all ranks, because stages may draw from the "
                    "global one. If other ranks' inputs and targets are only placeholders, pass none there"
                )
    return ""
