"""Cut a batch into microbatches, put outputs together again, and describe what came in."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_unflatten

from bpipe.comm.message import PLAIN
from bpipe.errors import ConfigurationError, StageError

__all__: list[str] = []


def split(value: Any, spec: Any, num_microbatches: int, what: str) -> list[Any]:
    """Cut every tensor in a nest along the dimension that its spec names (0 by default); everything else is repeated.

    Args:
        value: a nest of tensors and anything else.
        spec: None, or a nest like `value` with a `TensorChunkSpec` (anything with a `split_dim`) for a tensor to cut, and
            anything else, such as torch's `_Replicate`, for one to repeat.
        num_microbatches: m.
        what: the argument's name, for messages.

    Returns:
        m nests like `value`; views, no copies.

    Raises:
        ConfigurationError: a tensor's size along its dimension is no positive multiple of m, or the spec does not fit.
    """
    leaves, tree = tree_flatten(value)
    specs = [None] * len(leaves) if spec is None else list(_specs_for(value, spec, what))
    columns = [_cut(leaf, leaf_spec, spec is not None, num_microbatches, what) for leaf, leaf_spec in zip(leaves, specs)]
    return [tree_unflatten([column[i] for column in columns], tree) for i in range(num_microbatches)]


def _specs_for(value: Any, spec: Any, what: str) -> Iterator[Any]:
    """Yield the spec of each leaf of a nest: by key in dicts, whatever their order, and by place in tuples and lists."""
    if isinstance(value, dict) and isinstance(spec, dict) and value.keys() == spec.keys():
        for key, part in value.items():
            yield from _specs_for(part, spec[key], what)
    elif isinstance(value, (tuple, list)) and isinstance(spec, (tuple, list)) and len(value) == len(spec):
        for part, part_spec in zip(value, spec):
            yield from _specs_for(part, part_spec, what)
    elif tree_is_leaf(value) and not isinstance(spec, (tuple, list, dict)):
        yield spec
    else:
        raise ConfigurationError(f"{what}: {_outline(value)} has the spec {_outline(spec)}: give one for each value, nested alike")


def _outline(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: ...' for key in value)}}}"
    return f"{type(value).__qualname__} of {len(value)}" if isinstance(value, (tuple, list)) else type(value).__qualname__


def _cut(leaf: Any, spec: Any, is_specified: bool, m: int, what: str) -> Sequence[Any]:
    dim = getattr(spec, "split_dim", None if is_specified else 0)
    if not isinstance(leaf, torch.Tensor) or dim is None:
        return [leaf] * m
    if leaf.ndim == 0 or not -leaf.ndim <= dim < leaf.ndim:
        raise ConfigurationError(f"{what} of shape {list(leaf.shape)} has no dimension {dim} to cut: give a spec that repeats it")
    size = leaf.shape[dim]
    if size < m or size % m:
        raise ConfigurationError(
            f"{what} of shape {list(leaf.shape)}: {size} along dimension {dim} does not divide into {m} microbatches. "
            "Drop the last batch (DataLoader(drop_last=True)), or cut it yourself: step(arg_mbs=..., kwarg_mbs=..., target_mbs=...)"
        )
    return leaf.tensor_split(m, dim=dim)


def merge(outputs: Sequence[Any], spec: Any = None) -> Any:
    """Put the outputs of the microbatches together: tensors along the dimension that the spec names (0 by default).

    Tensors without dimensions are stacked. A spec with `reduce_fn` and `init_value` (torch's reducers) folds instead;
    plain values (None, bool, int, float, str) are those of the first microbatch.

    Raises:
        ConfigurationError: the spec does not fit.
        StageError: the outputs do not fit together.
    """
    flat, trees = zip(*map(tree_flatten, outputs))
    specs = [None] * len(flat[0]) if spec is None else list(_specs_for(outputs[0], spec, "the output"))
    try:
        other = next((output for output, tree in zip(outputs, trees) if tree != trees[0]), None)
        if other is not None:
            raise TypeError(f"one is {_outline(outputs[0])}, another {_outline(other)}")
        return tree_unflatten([_join(column, leaf_spec) for column, leaf_spec in zip(zip(*flat), specs)], trees[0])
    except (TypeError, IndexError, RuntimeError) as error:
        raise StageError(
            f"the outputs of the microbatches do not fit together: {error}. "
            "Make them alike, give an output_merge_spec, or pass return_outputs=False and use them in loss_fn"
        ) from error


def _join(parts: tuple[Any, ...], spec: Any) -> Any:
    if hasattr(spec, "reduce_fn"):
        value = spec.init_value
        for part in parts:
            value = spec.reduce_fn(value, part)
        return value
    if not isinstance(parts[0], torch.Tensor):
        if type(parts[0]) not in PLAIN:
            raise TypeError(f"a {type(parts[0]).__qualname__} cannot be put together")
        return parts[0]
    return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, dim=getattr(spec, "split_dim", 0))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest."""
    if isinstance(value, torch.Tensor):
        return [value]
    if type(value) in (list, tuple):  # as a tree would, and much faster
        return [tensor for part in value for tensor in tensors_in(part)]
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


class Description(NamedTuple):
    """What a nest looks like: its shapes, dtypes and plain values, with # in place of whole numbers, and those beside it."""

    form: str
    numbers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.form} {self.numbers}" if self.numbers else self.form


def describe(value: Any) -> Description:
    """The shapes, dtypes and plain values of a nest: equal for two that need the same memory and messages."""
    leaves, tree = tree_flatten(value)
    numbers = tuple([int(leaf) for leaf in leaves if _is_number(leaf)])
    return Description("|".join([str(tree), *("#" if _is_number(leaf) else _describe_leaf(leaf) for leaf in leaves)]), numbers)


def _is_number(leaf: Any) -> bool:
    """Whether it is a whole number that may count something: True and members of an IntEnum select something."""
    return type(leaf) is int or isinstance(leaf, np.integer)


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        layout = leaf.stride() if leaf.layout is torch.strided else leaf.layout
        return f"{leaf.dtype}{tuple(leaf.shape)}{layout}{leaf.requires_grad}"
    return repr(leaf) if isinstance(leaf, (bool, int, str, type(None))) else type(leaf).__qualname__  # floats shape nothing


def digest(descriptions: Sequence[str]) -> bytes:
    """16 bytes that stand for some descriptions."""
    return hashlib.sha256("\n".join(descriptions).encode()).digest()[:16]
