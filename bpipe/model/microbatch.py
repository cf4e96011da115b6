"""Find the tensors in inputs and outputs of microbatches, and describe these inputs and outputs."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.comm.wire.message import PLAIN
from bpipe.model.pytree import Inside, inside, is_block_mask, leaves_of, mapped
from bpipe.torch_private.owners_and_versions import parts_of_sparse

__all__: list[str] = []

# These values may select a branch, and so other memory and messages; floats do not change shapes.
OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size)
SELECTING = (bool, int, str, bytes, type(None), type, range, slice, Enum, np.bool_, *OF_TORCH)
_PLAIN = frozenset(PLAIN)
_FEW = 32  # entries: a longer container is looked at as a whole first, and once if many microbatches share it
_LONG = 4096  # characters: a longer text is replaced by its digest


def detached(value: Any) -> Any:
    """Return a pytree like another one, with its tensors detached from the graph."""
    return mapped(torch.Tensor.detach, value)


def tensors_in(value: Any, seen: set[int] | None = None) -> list[torch.Tensor]:
    """Return the tensors in a pytree, except those in objects whose parts are unknown.

    Args:
        seen: the long containers that were searched, by identity: none of them is searched twice. None: all may be.
    """
    if isinstance(value, torch.Tensor):
        return [value]
    kind = type(value)
    if kind is not list and kind is not tuple and kind is not dict:
        return [] if kind in PLAIN else [leaf for leaf in leaves_of(value, objects_deep=0) if isinstance(leaf, torch.Tensor)]
    parts = value.values() if kind is dict else value
    if _PLAIN.issuperset(map(type, parts)):
        return []
    if seen is not None and len(parts) > _FEW:
        if id(value) in seen:
            return []
        seen.add(id(value))
    return [tensor for part in parts for tensor in tensors_in(part, seen)]


class Description(NamedTuple):
    """A description of a pytree: its shapes, dtypes and plain values, with # in place of whole numbers, stored separately."""

    form: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.form} {text_of(self.numbers)}" if self.numbers else self.form


def text_of(numbers: tuple[int | None, ...]) -> str:
    """Return numbers as a text that is never very long."""
    return _shortened(str(numbers))


Known = dict[int, tuple[Any, Description]]  # by identity: a container, which is kept alive, and its description


def describe(value: Any, known: Known | None = None) -> Description:
    """Describe a pytree by its shapes, dtypes and plain values: equal for two that need the same memory and messages.

    Args:
        known: the long containers that were described: none of them is described twice, and those of this value are added.
    """
    numbers: list[int] = []
    form = _form(value, numbers, {} if known is None else known)
    return Description(form, tuple(numbers))


def _form(value: Any, numbers: list[int], known: Known) -> str:
    """Describe a pytree without its whole numbers, and append these to `numbers`."""
    found = inside(value)
    if found is None and _is_number(value):
        numbers.append(int(value))
        return "#"
    if found is None:
        return _describe_leaf(value)
    if len(found.parts) <= _FEW:
        return _form_of(value, found, numbers, known)
    if id(value) not in known:
        own: list[int] = []
        form = _shortened(_form_of(value, found, own, known))
        known[id(value)] = value, Description(form, tuple(own))
    _, description = known[id(value)]
    numbers.extend(description.numbers)
    return description.form


def _form_of(value: Any, found: Inside, numbers: list[int], known: Known) -> str:
    kinds = set(map(type, found.parts)) if len(found.parts) > _FEW else set()
    if len(kinds) == 1 and kinds <= {int, float, str}:
        parts = f"{found.keys}={_form_of_all(kinds.pop(), found.parts, numbers)}"
    else:
        parts = ",".join([f"{key}={_form(part, numbers, known)}" for key, part in zip(found.keys, found.parts)])
    return f"{type(value).__qualname__}{found.context}({parts})"


def _form_of_all(kind: type, parts: Sequence[Any], numbers: list[int]) -> str:
    """Describe many plain values of one type, without looking at each."""
    if kind is int:
        numbers.extend(parts)
        return "#"
    return "float" if kind is float else repr(parts)


def _shortened(text: str) -> str:
    return text if len(text) <= _LONG else f"{text[:_FEW]}... {hashlib.sha256(text.encode()).hexdigest()}"


def _is_number(leaf: Any) -> bool:
    """Return whether a leaf is a whole number that may count something; True and members of an IntEnum select a branch."""
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
    """Describe a tensor that is not a plain one: a subclass, a nested or a sparse tensor."""
    name = f"{type(tensor).__qualname__}{tensor.dtype}{tensor.layout}{tensor.requires_grad}"
    if tensor.is_nested:
        return f"{name}{[tuple(part.shape) for part in tensor.unbind()]}"
    if tensor.layout is not torch.strided:
        values = parts_of_sparse(tensor)[1] if tensor.layout is torch.sparse_coo else tensor.values()
        return f"{name}{tuple(tensor.shape)}{len(values)}"
    sharding: Any = (tensor.placements, tensor.device_mesh) if is_dtensor(tensor) else ""  # type: ignore[attr-defined]
    return f"{name}{tuple(tensor.shape)}{tensor.stride()}{sharding}"


def _describe_object(value: Any) -> str:
    """Describe a value that is not a pytree: its type, and what we know to be in it."""
    name = type(value).__qualname__
    if isinstance(value, np.ndarray):
        return f"{name}{value.dtype}{value.shape}"
    if isinstance(value, PackedSequence):
        return f"{name}{[describe(part) for part in value]}{value.batch_sizes.tolist()}"
    if is_block_mask(value):
        return f"{name}{value.seq_lengths}{value.BLOCK_SIZE}{[describe(tensor) for tensor in tensors_in(value)]}"
    return name


def digest(descriptions: Sequence[str]) -> bytes:
    """Return 16 bytes that stand for some descriptions."""
    return hashlib.sha256("\n".join(descriptions).encode()).digest()[:16]
