"""Cut a batch into microbatches, put outputs together again, and describe what came in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from bpipe.errors import ConfigurationError

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
    specs = [None] * len(leaves) if spec is None else tree_flatten(spec, is_leaf=_is_spec)[0]
    if len(specs) != len(leaves):
        raise ConfigurationError(f"{what}: a chunk spec of {len(specs)} entries for {len(leaves)} values")
    columns = [_cut(leaf, leaf_spec, spec is not None, num_microbatches, what) for leaf, leaf_spec in zip(leaves, specs)]
    return [tree_unflatten([column[i] for column in columns], tree) for i in range(num_microbatches)]


def _is_spec(value: Any) -> bool:
    return value is None or hasattr(value, "split_dim") or type(value).__name__ in ("_Replicate", "_CustomReducer")


def _cut(leaf: Any, spec: Any, is_specified: bool, m: int, what: str) -> Sequence[Any]:
    dim = getattr(spec, "split_dim", None if is_specified else 0)
    if not isinstance(leaf, torch.Tensor) or dim is None:
        return [leaf] * m
    if leaf.ndim == 0 or not -leaf.ndim <= dim < leaf.ndim:
        raise ConfigurationError(f"{what} of shape {list(leaf.shape)} has no dimension {dim} to cut: give a chunk spec that repeats it")
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
    values that are no tensors are those of the first microbatch.
    """
    flat = [tree_flatten(output) for output in outputs]
    tree = flat[0][1]
    specs = [None] * tree.num_leaves if spec is None else tree_flatten(spec, is_leaf=_is_spec)[0]
    if len(specs) != tree.num_leaves:
        raise ConfigurationError(f"output_merge_spec: {len(specs)} entries for {tree.num_leaves} outputs")
    return tree_unflatten([_join([leaves[i] for leaves, _ in flat], leaf_spec) for i, leaf_spec in enumerate(specs)], tree)


def _join(parts: list[Any], spec: Any) -> Any:
    if hasattr(spec, "reduce_fn"):
        value = spec.init_value
        for part in parts:
            value = spec.reduce_fn(value, part)
        return value
    if not isinstance(parts[0], torch.Tensor):
        return parts[0]
    return torch.stack(parts) if parts[0].ndim == 0 else torch.cat(parts, dim=getattr(spec, "split_dim", 0))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors of a nest."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def describe(value: Any) -> str:
    """The shapes, dtypes and plain values of a nest: equal for two that need the same memory and messages."""
    leaves, tree = tree_flatten(value)
    return "|".join([str(tree), *map(_describe_leaf, leaves)])


def _describe_leaf(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{leaf.dtype}{tuple(leaf.shape)}{leaf.requires_grad}"
    return repr(leaf) if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf).__qualname__


def digest(descriptions: Sequence[str]) -> bytes:
    """16 bytes that stand for some descriptions."""
    return hashlib.sha256("\n".join(descriptions).encode()).digest()[:16]
