"""Cut microbatches into slices of their sequences."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from bpipe.errors import ConfigurationError, format_error
from bpipe.model.cutting import is_repeatable, name_of
from bpipe.model.pytree import inside
from bpipe.model.specs import DEFAULT, is_repeating, misfit, specs_of

__all__ = ["UpTo"]

SEQUENCE = 1  # the dimension of a sequence's positions, unless a spec names another one

# Of the slices: positions, or shares of a sequence; or a function that returns the positions, given those of the sequence.
Lengths = Sequence[float] | Callable[[int], Sequence[int]]


class UpTo:
    """A spec of a value of which a slice gets all up to its own end, because it tells of earlier positions too: a padding mask.

    Args:
        dim: the dimension of the sequence's positions.
        rows: of a mask of queries and keys, the dimension of the queries, of which a slice gets its own: `UpTo(3, rows=2)` of
            [batch, heads, queries, keys]. True, or a number that is not very low, says that a key is seen, and none may be seen
            that lies behind the slice's end.

    Example:
        A padding mask [batch, positions] of a schedule with slices:

        >>> kwargs_slice_spec = {"attention_mask": UpTo(1)}
    """

    def __init__(self, dim: int = SEQUENCE, *, rows: int | None = None) -> None:
        self.dim, self.rows = dim, rows

    def __repr__(self) -> str:
        return f"UpTo({self.dim})" if self.rows is None else f"UpTo({self.dim}, rows={self.rows})"


class SliceCutting:
    """Cut the values of one microbatch.

    Args:
        lengths_of: returns the lengths of the slices of a sequence of so many positions.
        num_slices: k.
        num_microbatches: m, into how many of them the batch was cut.
    """

    def __init__(self, lengths_of: Callable[[int], Sequence[int]], num_slices: int, num_microbatches: int = 1) -> None:
        self._lengths_of, self._k, self._m = lengths_of, num_slices, num_microbatches
        self._given_whole: list[tuple[str, int]] = []  # tensors of one dimension without a spec, and their sizes
        self._first: tuple[int, str] | None = None  # the number of positions, and the value that shows it
        self.lengths: Sequence[int] = ()

    def split(self, value: Any, spec: Any, name: str) -> list[Any]:
        """Cut everything in a pytree that has one entry for each position of the sequence.

        Args:
            value: of one microbatch.
            spec: None, or a pytree like `value` with a `TensorChunkSpec` for each value that is cut along a dimension, an `UpTo`,
                or None for each value that each slice gets whole. By default, tensors are cut along dimension 1, and those with
                fewer dimensions are given whole.

        Returns:
            k pytrees like `value`; tensors are views, not copies.

        Raises:
            ConfigurationError: a value does not fit to the sequence, or may be a mask.
        """
        return self._split(value, DEFAULT if spec is None else spec, name)

    def _split(self, value: Any, spec: Any, path: str) -> list[Any]:
        if spec is not DEFAULT and not isinstance(spec, UpTo) and is_repeating(spec):
            return [value] * self._k
        if isinstance(value, torch.Tensor):
            return self._tensor(value, spec, path)
        found = inside(value)
        if found is None:
            if spec is DEFAULT and is_repeatable(value):
                return [value] * self._k
            raise ConfigurationError(
                f"{path} is a {name_of(value)}, which cannot be cut along a sequence: give tensors, or the spec None for a "
                "value that each slice gets whole"
            )
        specs = specs_of(found, value, spec, path)
        columns = [self._split(part, specs[i], found.path(i, path)) for i, part in enumerate(found.parts)]
        return [found.make([column[i] for column in columns]) for i in range(self._k)]

    def _tensor(self, tensor: torch.Tensor, spec: Any, path: str) -> list[torch.Tensor]:
        if tensor.is_nested:
            raise ConfigurationError(
                f"{path} is a nested tensor, whose sequences cannot be cut at the same places: pad it, give each sequence as a "
                "microbatch of its own (arg_mbs, kwarg_mbs, target_mbs), or give the spec None if each slice gets it whole"
            )
        if spec is DEFAULT and tensor.ndim <= SEQUENCE:
            self._given_whole += [(path, size) for size in tensor.shape]
            return [tensor] * self._k
        if spec is DEFAULT and self._first is None and path.startswith("args") and tensor.ndim == 2 and tensor.is_floating_point():
            raise ConfigurationError(
                f"{path} has the shape {list(tensor.shape)}, which may be [batch, positions] or [batch, features]: give "
                "args_slice_spec, with TensorChunkSpec(1) to cut it along its positions, or None to give it to each slice whole"
            )
        dim = SEQUENCE if spec is DEFAULT else spec.dim if isinstance(spec, UpTo) else getattr(spec, "split_dim", None)
        if not isinstance(dim, int):
            raise misfit(path, tensor, spec)
        if not -tensor.ndim <= dim < tensor.ndim:
            raise ConfigurationError(f"{path} has the shape {list(tensor.shape)}, and no dimension {dim} of positions")
        ends = self._ends(tensor.shape[dim], path, is_default=spec is DEFAULT)
        if spec is DEFAULT and self._may_be_mask(tensor, path):
            raise ConfigurationError(
                f"{path} has the shape {list(tensor.shape)}: it may be a mask of queries and keys, which may look ahead. Slices "
                "attend to themselves and to the slices before them, so leave a causal mask out; or give a spec: "
                "bpipe.slices.UpTo(3, rows=2) for a mask [batch, heads, queries, keys] that does not look ahead"
            )
        if isinstance(spec, UpTo):
            return self._up_to(tensor, spec, path, ends)
        parts = [tensor.narrow(dim, start, end - start) for start, end in pairwise(ends)]
        # Words and labels are small, and losses usually view them as one row.
        return parts if tensor.is_floating_point() else [part.contiguous() for part in parts]

    def _may_be_mask(self, tensor: torch.Tensor, path: str) -> bool:
        """Return whether a tensor may have queries and keys; one of two dimensions may have been cut into microbatches."""
        if not path.startswith(("args", "kwargs")) or path == "args[0]":
            return False
        rows, columns = tensor.shape[-2:]
        is_cut = tensor.ndim == 2 and rows * self._m == columns and (tensor.is_floating_point() or tensor.dtype is torch.bool)
        return columns == tensor.shape[SEQUENCE] and (rows == columns or is_cut)

    def _up_to(self, tensor: torch.Tensor, spec: UpTo, path: str, ends: list[int]) -> list[torch.Tensor]:
        if spec.rows is None:
            return [tensor.narrow(spec.dim, 0, end) for end in ends[1:]]
        if not -tensor.ndim <= spec.rows < tensor.ndim or tensor.shape[spec.rows] != ends[-1]:
            raise ConfigurationError(
                f"{path} has the shape {list(tensor.shape)}, and no dimension {spec.rows} of {ends[-1]} queries"
            )
        parts = []
        for start, end in pairwise(ends):
            rows = tensor.narrow(spec.rows, start, end - start)
            if bool(_is_seen(rows.narrow(spec.dim, end, ends[-1] - end)).any()):
                raise ConfigurationError(
                    f"{path} shows queries of positions {start} to {end - 1} keys behind them, where a slice that ends there has "
                    "nothing: a mask may not look ahead (True, or a number that is not very low, says that a key is seen)"
                )
            parts.append(rows.narrow(spec.dim, 0, end))
        return parts

    def finish(self) -> None:
        """Raise a ConfigurationError if a value that each slice got whole may have an entry for each position."""
        size, first = self._first or (0, "")
        for path, own in self._given_whole:
            if size > 1 and not path.startswith("the target") and own in (size, size / self._m):
                name = "args" if path.startswith("args") else "kwargs"
                raise ConfigurationError(
                    f"{path} has {own} entries and one dimension, and {first} has {size} positions: it may have an entry for each. "
                    f"Give {name}_slice_spec: TensorChunkSpec(0) to cut it, None to give it to each slice whole"
                )

    def _ends(self, size: int, path: str, *, is_default: bool) -> list[int]:
        """Return where slices begin and end in a value of this size, which must be that of the sequence."""
        if self._first is None:
            self._first, self.lengths = (size, path), self._lengths_of(size)
        elif self._first[0] != size:
            first_size, first = self._first
            advice = "give a spec: None for a value that each slice gets whole" if is_default else "correct its spec"
            raise ConfigurationError(
                f"{path} has {size} positions and {first} has {first_size}: they may not belong together; {advice}"
            )
        return [0, *accumulate(self.lengths)]


def _is_seen(mask: torch.Tensor) -> torch.Tensor:
    """Return where a mask shows keys, as scaled_dot_product_attention and Transformers read it."""
    return mask > torch.finfo(mask.dtype).min / 2 if mask.is_floating_point() else mask.bool()


def rule_of(lengths: Lengths | None, num_slices: int) -> Callable[[int], list[int]]:
    """Return the function that returns the lengths of the slices of a sequence of so many positions.

    A ConfigurationError says that there are not k positive lengths; the function raises it for a sequence that cannot be cut so.
    """
    if lengths is None:
        return partial(_equal_lengths, num_slices)
    if callable(lengths):
        return partial(_returned_lengths, lengths, num_slices)
    numbers = numbers_of(lengths)
    if len(numbers) != num_slices or not all(number > 0 for number in numbers):
        raise ConfigurationError(
            f"slice_lengths={numbers or lengths}: give {num_slices} positive numbers, one for each slice: of positions, or shares "
            "of the sequence; or a function that returns them for a number of positions"
        )
    return partial(_given_lengths, numbers)


def numbers_of(lengths: Any) -> list[float]:
    """Return lengths as Python's numbers, whatever sequence, tensor or array they are in; none if they are no numbers."""
    try:
        return [_number(length) for length in lengths]
    except (AttributeError, TypeError, ValueError, RuntimeError):  # torch's for a tensor of several
        return []


def _number(length: Any) -> float:
    try:
        return operator.index(length)
    except TypeError:
        return float(length.__float__())  # which texts do not have


def _equal_lengths(num_slices: int, size: int) -> list[int]:
    """Return lengths of slices that differ by 1 at most, the longer ones first."""
    _check_size(size, num_slices)
    each, rest = divmod(size, num_slices)
    return [each + (i < rest) for i in range(num_slices)]


def _check_size(size: int, num_slices: int) -> None:
    if size < num_slices:
        raise ConfigurationError(f"a sequence of {size} positions cannot be cut into {num_slices} slices: give fewer slices")


def _returned_lengths(function: Callable[[int], Sequence[int]], num_slices: int, size: int) -> list[int]:
    """Return what the user's function returns for a sequence of so many positions, once it is checked."""
    _check_size(size, num_slices)
    try:
        returned = function(size)
    except Exception as error:
        raise ConfigurationError(
            f"slice_lengths({size}) raised {format_error(error)}. It is called with the number of positions of each microbatch"
        ) from error
    try:
        found = [operator.index(length) for length in returned]
    except TypeError:
        found = []
    if len(found) != num_slices or sum(found) != size or min(found) < 1:
        raise ConfigurationError(
            f"slice_lengths({size}) returned {returned}: return {num_slices} whole numbers of at least 1, the positions of each "
            f"slice, that add up to {size}, those of the microbatch"
        )
    return found


def _given_lengths(lengths: Sequence[float], size: int) -> list[int]:
    """Return given lengths in positions: shares of the sequence end at the nearest one."""
    if all(isinstance(length, int) for length in lengths):
        found = list(lengths)
    else:
        ends = [0, *(round(size * share) for share in accumulate(lengths))]
        found = [end - start for start, end in pairwise(ends)]
        if not math.isclose(math.fsum(lengths), 1.0, abs_tol=1e-6):
            raise ConfigurationError(f"slice_lengths={lengths}: shares of a sequence must add up to 1, not {math.fsum(lengths):g}")
    if sum(found) != size or min(found) < 1:
        raise ConfigurationError(
            f"slice_lengths={list(lengths)} makes slices of {found} positions, but the sequence has {size}: each slice needs at "
            "least one, and together they must have all. For sequences of several lengths, give shares, or a function of the length"
        )
    return [int(length) for length in found]
