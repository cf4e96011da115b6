"""The part of a parameter, a gradient or a buffer that this process itself holds."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.recomputation.checksums import sum_of_bits

__all__: list[str] = []


def mesh_of(tensor: Any) -> Any:
    """Return the device mesh of a DTensor; None for any other tensor, because this process has all of it."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def local(tensor: Any) -> torch.Tensor:
    """Return this process's own part: a DTensor's shard, all of any other tensor. It is not a copy and has no graph."""
    own: torch.Tensor = tensor.detach() if mesh_of(tensor) is None else tensor.detach().to_local()
    return own


def checksum(tensor: torch.Tensor) -> int:
    """Compute a number from the bits of this process's part: equal for equal bits."""
    return int(sum_of_bits(local(tensor)))
