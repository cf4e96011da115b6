"""What the inputs and outputs of microbatches hold, and what they look like."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from bpipe.comm.dtensor import is_dtensor
from bpipe.comm.message import PLAIN
from bpipe.nest import inside, is_block_mask, leaves_of, mapped

__all__: list[str] = []

# What may select a branch, and so other memory and messages; floats shape nothing.
SELECTING = (
    *(bool, int, str, bytes, type(None), type, range, slice, Enum, np.bool_),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)


def detached(value: Any) -> Any:
    """A nest like another one, its tensors without graph."""
    return mapped(torch.Tensor.detach, value)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest; not those of objects whose parts are unknown."""
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)
    if kind is list or kind is tuple:
        return [tensor for part in value for tensor in tensors_in(part)]
    if kind is dict:
        return [tensor for part in value.values() for tensor in tensors_in(part)]
    return [] if kind in PLAIN else [leaf for leaf in leaves_of(value, objects_deep=0) if isinstance(leaf, torch.Tensor)]


class Description(NamedTuple):
    """What a nest looks like: its shapes, dtypes and plain values, with # in place of whole numbers, and those beside it."""

    form: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.form} {self.numbers}" if self.numbers else self.form


def describe(value: Any) -> Description:
    """The shapes, dtypes and plain values of a nest: equal for two that need the same memory and messages."""
    numbers: list[int] = []
    form = _form(value, numbers)
    return Description(form, tuple(numbers))


def _form(value: Any, numbers: list[int]) -> str:
    """Describe a nest without its whole numbers, which are appended."""
    found = inside(value)
    if found is None and _is_number(value):
        numbers.append(int(value))
        return "#"
    if found is None:
        return _describe_leaf(value)
    parts = ",".join([f"{key}={_form(part, numbers)}" for key, part in zip(found.keys, found.parts)])
    return f"{type(value).__qualname__}{found.context}({parts})"


def _is_number(leaf: Any) -> bool:
    """Whether it is a whole number that may count something: True and members of an IntEnum select something."""
    return type(leaf) is int or isinstance(leaf, np.integer)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        if type(leaf) is not torch.Tensor or leaf.layout is not torch.strided or leaf.is_nested:
            return _describe_special(leaf)
        return f"{leaf.dtype}{tuple(leaf.shape)}{leaf.stride()}{leaf.requires_grad}"
    if isinstance(leaf, SELECTING):
        return repr(leaf)
    if isinstance(leaf, types.FunctionType):
        return leaf.__qualname__
    return _describe_object(leaf)


def _describe_special(tensor: torch.Tensor) -> str:
    """What a tensor that is no plain one looks like: a subclass, a nested or sparse one."""
    name = f"{type(tensor).__qualname__}{tensor.dtype}{tensor.layout}{tensor.requires_grad}"
    if tensor.is_nested:
        return f"{name}{[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.layout is not torch.strided:
        return f"{name}{tuple(tensor.shape)}{tensor._nnz()}"
    sharding: Any = (tensor.placements, tensor.device_mesh) if is_dtensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{name}{tuple(tensor.shape)}{tensor.stride()}{sharding}"


def _describe_object(value: Any) -> str:
    """What something that is no nest looks like: its type, and what we know to be in it."""
    name = type(value).__qualname__
    if isinstance(value, np.ndarray):
        return f"{name}{value.dtype}{value.shape}"
    if isinstance(value, PackedSequence):
        return f"{name}{[describe(part) for part in value]}{value.batch_sizes.tolist()}"
    if is_block_mask(value):
        return f"{name}{value.seq_lengths}{value.BLOCK_SIZE}{[describe(tensor) for tensor in tensors_in(value)]}"
    return name


def digest(descriptions: Sequence[str]) -> bytes:
    """16 bytes that stand for some descriptions."""
    return hashlib.sha256("\n".join(descriptions).encode()).digest()[:16]
