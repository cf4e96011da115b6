"""The part of a parameter, a gradient or a buffer that this process itself holds."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.comm.wire.dtensor import is_dtensor

__all__: list[str] = []

BLOCK = 1 << 20  # elements that are summed at once, which bounds the memory for it
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def mesh_of(tensor: Any) -> Any:
    """Return the device mesh of a DTensor; None for any other tensor, because this process has all of it."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def local(tensor: Any) -> torch.Tensor:
    """Return this process's own part: a DTensor's shard, all of any other tensor. It is not a copy and has no graph."""
    own: torch.Tensor = tensor.detach() if mesh_of(tensor) is None else tensor.detach().to_local()
    return own


def checksum(tensor: torch.Tensor) -> int:
    """Sum up the bits of this process's part, as integers times an odd number for their place: equal for equal bits."""
    own = local(tensor)
    own = torch.view_as_real(own) if own.is_complex() else own
    bits = own.contiguous().view(INTEGERS[own.element_size()]).flatten()
    weights = torch.arange(1, 2 * min(len(bits), BLOCK), 2, device=own.device)
    total = torch.zeros((), dtype=torch.int64, device=own.device)
    for block in bits.split(BLOCK):
        total = 31 * total + (block * weights[: len(block)]).sum()
    return int(total)
