"""Cut the batches of a call into microbatches; refuse values that may hold samples and cannot be cut."""

from __future__ import annotations

import os
import types
from collections import deque
from collections.abc import Sequence
from enum import Enum
from functools import partial
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch

from bpipe.comm.wire.dtensor import is_dtensor
from bpipe.comm.wire.message import PLAIN
from bpipe.errors import ConfigurationError
from bpipe.model.chunks import CannotCutError, Offsets, cutter_of
from bpipe.model.microbatch import OF_TORCH
from bpipe.model.pytree import flattened, inside, leaves_of
from bpipe.model.specs import DEFAULT, is_repeating, misfit, specs_of

__all__: list[str] = []

INPUTS = ("args", "kwargs", "the target")  # as errors name them

# These hold no samples, so every microbatch gets the same.
REPEATED = (
    *PLAIN,
    Number,
    bytes,
    Enum,
    range,
    slice,
    type,
    type(...),
    types.ModuleType,
    types.BuiltinFunctionType,
    os.PathLike,
    np.generic,
    np.dtype,
    np.ufunc,
    *OF_TORCH,
    torch.Generator,
    torch.nn.Module,
)


class Cutting:
    """Cuts the batches of one call into microbatches: tensors and everything else that holds samples; the rest is repeated.

    Args:
        num_microbatches: m.
        args_spec: of the first stage's positional arguments; they come first, and say how many samples the batch has.
    """

    def __init__(self, num_microbatches: int, args_spec: Any = None) -> None:
        self.are_alike = True  # whether the microbatches need the same memory
        self._m = num_microbatches
        # of the first argument's samples, as its spec says, which is known on ranks that do not get the argument, too
        self._dim = next((spec.split_dim for spec in flattened(args_spec) if hasattr(spec, "split_dim")), 0)
        self._offsets: Offsets = {}
        self._rows: list[_Rows] = []
        # Lists and tuples without specs: their names, they themselves, and what was cut in them.
        self._lists: list[tuple[str, Sequence[Any], Sequence[_Rows]]] = []
        self._sharding: dict[Any, tuple[tuple[int, ...], str]] = {}  # by mesh: its dims that shard a batch, and the value's name

    def split(self, value: Any, spec: Any, name: str) -> list[Any]:
        """Cut everything in a pytree that holds samples, along the dimension that its spec names.

        Without a spec that is dimension 0, or the dimension of the first argument's samples if the sizes leave no other reading.

        Args:
            spec: None, or a pytree like `value` with a `TensorChunkSpec` (anything with a `split_dim`) for each value that is cut,
                and None or torch's `_Replicate` for each value that is repeated, of any type.

        Returns:
            m pytrees like `value`; strided tensors are views, not copies.

        Raises:
            ConfigurationError: a size that is not a positive multiple of m, a spec that does not fit, a value that may hold
                samples and cannot be cut, or one without a spec that may have them along one dimension or another.
        """
        try:
            return self._split(value, DEFAULT if spec is None else spec, name)
        except RecursionError:
            raise self._refusal(name, " holds itself, or is nested deeper than Python can follow") from None

    def _split(self, value: Any, spec: Any, path: str) -> list[Any]:
        if spec is not DEFAULT and is_repeating(spec):
            return [value] * self._m
        found = inside(value)
        if found is None:
            return list(self._leaf(value, spec, path))
        specs = [DEFAULT] * found.num_own if spec is DEFAULT else specs_of(found, value, spec, path)
        before = len(self._rows)
        columns = [self._split(part, specs[i], found.path(i, path)) for i, part in enumerate(found.parts[: found.num_own])]
        rows = self._rows[before:]
        if spec is DEFAULT and isinstance(value, (tuple, list, deque)) and not (found.are_fields or path == "args"):
            self._lists.append((path, value, rows))
        for i in range(found.num_own, len(found.parts)):
            columns.append(self._beside(found.parts[i], rows, found.path(i, path)))
        try:
            return [found.make([column[i] for column in columns]) for i in range(self._m)]
        except TypeError as error:
            raise self._refusal(path, f" is a {name_of(value)}, and {error}") from error

    def _leaf(self, leaf: Any, spec: Any, path: str) -> Sequence[Any]:
        if spec is not DEFAULT and not hasattr(spec, "split_dim"):
            raise misfit(path, leaf, spec)
        cutter = cutter_of(leaf, self._offsets)
        if spec is DEFAULT and getattr(leaf, "ndim", None) == 0:  # it holds no samples
            return [leaf] * self._m
        if cutter is None:
            if callable(getattr(leaf, "get_seq_length", None)):
                raise ConfigurationError(
                    f"{path} is a {name_of(leaf)}, which all microbatches would share: leave it out (use_cache=False), because a "
                    f"pipeline trains without a cache. To evaluate with one, give each microbatch its own: {_by_microbatch(path)}"
                )
            if not is_repeatable(leaf):
                kind = f" is a {name_of(leaf)}, which bpipe does not know how to cut"
                raise self._refusal(
                    path, f"{kind} (if the class is yours, make it a dataclass, or register it with torch.utils._pytree)"
                )
            return [leaf] * self._m
        dim = self._default_dim(leaf, path) if spec is DEFAULT else spec.split_dim
        try:
            cut = cutter(leaf, self._m, dim)
        except CannotCutError as error:
            raise self._refusal(path, str(error)) from None
        self.are_alike = self.are_alike and cut.are_alike
        if cut.rows is not None:
            self._rows.append(_Rows(cut.rows, path, spec is DEFAULT, dim % max(getattr(leaf, "ndim", 1), 1)))
        if cut.sharding is not None:
            self._check_sharding(*cut.sharding, path)
        return cut.parts

    def _default_dim(self, leaf: Any, path: str) -> int:
        """Return the dimension along which a value without a spec is cut: 0, or that of the inputs if it alone has their size."""
        batch = self._batch()
        dim = self._dim if batch is None else batch.dim
        if self._m == 1 or not dim or not isinstance(leaf, (torch.Tensor, np.ndarray)) or getattr(leaf, "is_nested", False):
            return 0
        own: Any = leaf
        shape = list((own.to_local() if is_dtensor(own) else own).shape)
        others = range(1, len(shape)) if dim < 0 else [dim] if dim < len(shape) else []
        size = shape[0] if batch is None else batch.size
        fitting = [i for i in (0, *others) if shape[i] == size]
        if len(fitting) > 1:
            raise self._refusal(
                path,
                f" of shape {shape} may have its samples along dimension {' or '.join(map(str, fitting))}, because those of "
                f"{'the first argument' if batch is None else batch.path} are along dimension {dim}, and nothing says which",
            )
        return fitting[0] if fitting else 0

    def _batch(self) -> _Rows | None:
        """Return the value that says how many samples the batch has: the first argument, or else the first value without a spec."""
        known = (rows for rows in self._rows if rows.is_unspecified or rows.path.startswith("args"))
        return next(known, self._rows[0] if self._rows else None)

    def _beside(self, value: Any, rows: Sequence[_Rows], path: str) -> list[Any]:
        """Repeat an object's content besides its parts, in a new container each time; cut the encodings of a BatchEncoding."""
        if path.endswith("._encodings") and isinstance(value, (list, tuple)):
            if not rows:
                return [value] * self._m
            size, rest = divmod(len(value), self._m)
            if rest or not size:
                raise self._refusal(path, f" of {len(value)} entries does not divide into {self._m} microbatches")
            self._rows.append(_Rows(len(value), path, True, 0))
            return [value[i * size : (i + 1) * size] for i in range(self._m)]
        before = len(self._rows)
        copies = self._split(value, DEFAULT, path)
        if len(self._rows) > before:
            raise self._refusal(self._rows[before].path, " is a tensor or an array in an attribute that is not part of the batch")
        return copies

    def _check_sharding(self, mesh: Any, dims: tuple[int, ...], path: str) -> None:
        known, other = self._sharding.setdefault(mesh, (dims, path))
        if known != dims:
            raise self._refusal(
                path, f" and {other} are DTensors with different placements of the batch: a microbatch would get different samples"
            )

    def check(self) -> None:
        """Raise a ConfigurationError if batches have different sizes, or a list may be one of samples, once all are cut."""
        if self._m == 1:
            return
        sizes = {rows.size for rows in self._rows}
        for path, value, inner in self._lists:
            if len(value) in sizes and {one.size for one in inner} != {len(value)} and any(entry is not None for entry in value):
                raise self._refusal(
                    path, f" is a {name_of(value)} of {len(value)} entries, and may have one for each sample or be the same for all"
                )
        first = self._batch()
        for rows in (one for one in self._rows if one.is_unspecified):
            if first is not None and rows.size != first.size:
                raise self._refusal(
                    rows.path,
                    f" has {rows.size} rows but {first.path} has {first.size}: a microbatch would get {rows.size // self._m} and "
                    f"{first.size // self._m} of them, which may not belong together",
                )

    def size_of(self, name: str) -> int:
        """Return how many samples a value has, as many as those of other ranks must have; 0 if that is unknown.

        It is if nothing in it was cut, if it has a spec and is no argument, or if the shards of a batch lie on several ranks.
        """
        own = (rows.size for rows in self._rows if rows.path.startswith(name) and (rows.is_unspecified or name == "args"))
        return 0 if self._m == 1 or self._sharding else next(own, 0)

    def _refusal(self, path: str, reason: str) -> ConfigurationError:
        advice = _way_out(path)
        if "does not divide" in reason:
            advice = f"drop the last batch (DataLoader(drop_last=True)), or {advice}"
        return ConfigurationError(f"{path}{reason}. {advice[0].upper()}{advice[1:]}")


class _Rows(NamedTuple):
    """A value that was cut: its size along the dimension, its name, whether no spec names that dimension, and the dimension."""

    size: int
    path: str
    is_unspecified: bool
    dim: int


def _way_out(path: str) -> str:
    """Return advice about a value that cannot be cut, or not in the given form."""
    value = next((name for name in INPUTS if path.startswith(name)), INPUTS[-1])
    spec = f"{value}_chunk_spec=" if value in INPUTS[:-1] else "Options(target_chunk_spec=)"
    return (
        f"give {spec}, nested like {value} (None for a value that each microbatch gets whole, such as position ids "
        "or a mask with one row for all; TensorChunkSpec(dim) for a value to cut), or cut it yourself: "
        f"{_by_microbatch(path)}"
    )


def _by_microbatch(path: str) -> str:
    """Return how to give a value by microbatch."""
    return next((f"step({name[:-1]}_mbs=...)" for name in ("args", "kwargs") if path.startswith(name)), "step(target_mbs=...)")


def is_repeatable(value: Any) -> bool:
    """Return whether a value certainly holds no samples: numbers, names and the like, and functions that hold no tensor."""
    if isinstance(value, (set, frozenset)):
        return all(type(entry) in PLAIN for entry in value)
    if isinstance(value, types.MethodType):
        return isinstance(value.__self__, REPEATED)
    if isinstance(value, (types.FunctionType, partial)):
        return not any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in leaves_of(value))
    return isinstance(value, REPEATED)


def name_of(value: Any) -> str:
    """Return the name of a value's type, with its module."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
