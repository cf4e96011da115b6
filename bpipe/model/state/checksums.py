"""Reduce a forward's result to a few numbers, which are equal for two forwards that returned the same bits."""

from __future__ import annotations

from math import isqrt
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from bpipe.comm.wire.dtensor import local
from bpipe.comm.wire.message import PLAIN
from bpipe.memory.saved.storages import as_bytes
from bpipe.model.pytree import inside
from bpipe.torch_private.owners_and_versions import parts_of_sparse

__all__: list[str] = []

Sum = int | torch.Tensor  # on a device a tensor, so that the host does not wait for it
_FEW = 16  # words, which are weighted one by one


class Checksum(NamedTuple):
    """The checksum of a pytree of tensors and plain values."""

    outline: list[str]  # its structure, shapes, dtypes, and plain values
    sums: list[Sum]  # of the tensors' bits, so that NaNs equal themselves


def checksum_of(value: Any) -> Checksum:
    """Compute the checksum of a pytree; it depends on each bit of each tensor, and on the bit's position."""
    found = Checksum([], [])
    _read(value, found)
    return found


def _read(value: Any, found: Checksum) -> None:
    parts = inside(value)
    if parts is None:
        found.outline.append(_outline(value))
        if isinstance(value, torch.Tensor):
            found.sums.extend(_sums(value.detach()))
        return
    found.outline.append(f"{type(value).__qualname__}{parts.context}{list(parts.keys)}")
    for part in parts.parts:
        _read(part, found)


def _outline(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{type(leaf).__qualname__} {leaf.dtype} {tuple(leaf.shape)} {leaf.requires_grad}"
    if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
        return f"array {leaf.dtype} {leaf.shape} {hash(leaf.tobytes())}"
    return repr(leaf) if isinstance(leaf, PLAIN) else type(leaf).__qualname__


def _sums(tensor: torch.Tensor) -> list[Sum]:
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_nested:
        return [sum_of_bits(tensor)]
    if hasattr(tensor, "trigger_wait"):  # a collective operation still writes it
        return _sums(tensor.trigger_wait())
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return [sums for part in parts if isinstance(part, torch.Tensor) for sums in _sums(part)]
    if tensor.layout is torch.sparse_coo:
        return [sums for part in parts_of_sparse(tensor) for sums in _sums(part)]
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return []
    return [sum_of_bits((tensor.values() if tensor.is_nested else tensor).as_subclass(torch.Tensor))]


def sum_of_bits(tensor: torch.Tensor) -> Sum:
    """Compute one number from the bits of a strided tensor; swapping two values changes it, too.

    The words are added in rows and in columns of a square, and both with weights.
    """
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    flat = flat.clone() if flat.storage_offset() * flat.element_size() % 8 else flat
    return _number(_sum(flat.view(torch.uint8)))


def own_checksum(tensor: torch.Tensor) -> int:
    """Compute a number from the bits of this process's part of a tensor: equal for equal bits."""
    return int(sum_of_bits(local(tensor)))


def sum_of_memory(tensor: torch.Tensor) -> Sum:
    """Compute one number from a strided tensor's memory, never copied: all of its storage unless it is contiguous and aligned."""
    if tensor.is_contiguous() and int(tensor.storage_offset()) * tensor.element_size() % 8 == 0:
        return sum_of_bits(tensor)
    return _number(_sum(as_bytes(tensor.untyped_storage())))


def is_awaited(device: torch.device) -> bool:
    """Return whether the host waits for a device when it reads a value."""
    return device.type != "cpu"


def _number(total: torch.Tensor) -> Sum:
    return total if is_awaited(total.device) else int(total)


def _sum(of_bytes: torch.Tensor) -> torch.Tensor:
    """Add 32-bit words in 64 bits: with odd weights, none of their bits is shifted out."""
    num_bytes = of_bytes.numel()
    num_words = num_bytes // 4
    width = isqrt(num_words)
    in_square = width * (num_words // width) if num_words > _FEW else 0
    totals = [_weighted(of_bytes[in_square * 4 : num_words * 4].view(torch.int32))] if in_square < num_words else []
    if num_bytes % 4:
        last_word = pad(of_bytes[num_words * 4 :], (0, 4 - num_bytes % 4)).view(torch.int32)
        totals.append(5 * _weighted(last_word))  # a weight that the neighbouring words do not have
    if in_square:
        square = of_bytes[: in_square * 4].view(torch.int32).view(-1, width)
        totals += [_weighted(square.sum(1)), 3 * _weighted(square.sum(0))]
    return sum(totals[1:], totals[0]) if totals else torch.zeros((), dtype=torch.int64, device=of_bytes.device)


def _weighted(words: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1, 2 * words.numel(), 2, device=words.device).pow(3)
    return words.long().dot(weights) if words.device.type == "cpu" else (words * weights).sum()
