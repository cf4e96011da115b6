"""Find out whether a sequence's loss is what its slices' losses make up: their mean, or with `scale_grads=False` their sum.

A sum in place of a mean, or the root of a mean, would train on something else without a word. So two neighbouring slices of a
sequence are compared with both of them together, at a few positions of each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_map_only

from bpipe.errors import StageError
from bpipe.model.microbatch import tensors_in
from bpipe.slices.positions import SEQUENCE

__all__: list[str] = []

POSITIONS = 4  # of a slice that are compared, with one of the slice before it
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}  # of relative differences, by the loss's precision
ROUGH = 0.05  # in half precision
Loss = Callable[[Any, Any], Any]
Weigh = Callable[[Sequence[Any], Sequence[int]], Sequence[float]]


class Dims(NamedTuple):
    """The dimension of positions in outputs and in targets; None where specs say more than one."""

    output: int | None = SEQUENCE
    target: int | None = SEQUENCE


class _Part(NamedTuple):
    """Some positions of a slice."""

    unit: int
    output: Any
    target: Any
    length: int


class LossCheck:
    """Compares the losses of the first two neighbouring slices that have something in common.

    Args:
        slices: into how many slices each sequence is cut.
        dims: where positions are.
        weigh: returns the weights of slices in the mean, given their targets and lengths; None if losses are added up.
    """

    def __init__(self, slices: int, dims: Dims, weigh: Weigh | None) -> None:
        self._slices, self._dims, self._weigh = slices, dims, weigh
        self._before: _Part | None = None
        self._is_done = slices == 1 or None in dims

    def look(self, unit: int, output: Any, target: Any, length: int, loss: Loss, name: str) -> None:
        """Compare a slice with the one before it, once.

        Raises:
            StageError: the loss of both is not what their losses make up.
        """
        if self._is_done or not length:
            return
        before, is_first = self._before, unit % self._slices == 0
        part = self._part(unit, output, target, length, at_end=is_first)
        self._before = self._part(unit, output, target, length, at_end=True) if not is_first else part
        if before is None or part is None or before.unit != unit - 1 or is_first:
            return
        expected, found, limit = self._losses(before, part, loss)
        if expected is None or found is None:
            return
        self._is_done, self._before = True, None
        if not abs(found - expected) <= limit * max(abs(expected), abs(found)):  # NaN, too
            raise _differs(name, expected, found, is_mean=self._weigh is not None)

    def _part(self, unit: int, output: Any, target: Any, length: int, *, at_end: bool) -> _Part | None:
        """Return a few positions of a slice; None if a tensor has none."""
        count = 1 if at_end else min(POSITIONS, length)
        start = length - count if at_end else 0
        cut = []
        for value, dim in zip((output, target), self._dims):
            assert dim is not None
            tensors = tensors_in(value)
            if not tensors or not all(_has_positions(tensor, dim, length) for tensor in tensors):
                return None
            cut.append(tree_map_only(torch.Tensor, partial(_some, dim=dim, start=start, count=count), value))
        return _Part(unit, cut[0], cut[1], count)

    def _losses(self, one: _Part, other: _Part, loss: Loss) -> tuple[float | None, float | None, float]:
        """Return what two losses make up, the loss of both together, and how far they may be apart."""
        both = [_joined(pair, dim) for pair, dim in zip(((one.output, other.output), (one.target, other.target)), self._dims)]
        pairs = [(one.output, one.target), (other.output, other.target), both]
        weights = [1.0, 1.0] if self._weigh is None else self._weigh([one.target, other.target], [one.length, other.length])
        if not all(weights):
            return None, None, 0.0
        for widen in (_widened, _as_it_is):
            try:
                with torch.no_grad():
                    losses = [loss(widen(output), widen(target)) for output, target in pairs]
                first, second, whole = map(float, losses)
            except Exception:  # it may know one precision only
                continue
            limit = LIMITS.get(losses[2].dtype, ROUGH)
            return (weights[0] * first + weights[1] * second, whole, limit) if isfinite(whole) else (None, None, 0.0)
        return None, None, 0.0


def _has_positions(tensor: torch.Tensor, dim: int, length: int) -> bool:
    return type(tensor) is torch.Tensor and -tensor.ndim <= dim < tensor.ndim and tensor.shape[dim] == length


def _some(tensor: torch.Tensor, *, dim: int, start: int, count: int) -> torch.Tensor:
    return tensor.detach().narrow(dim, start, count).clone()


def _joined(values: tuple[Any, Any], dim: int | None) -> Any:
    one, other = values
    rest = iter(tensors_in(other))
    return tree_map_only(torch.Tensor, lambda tensor: torch.cat([tensor, next(rest)], dim or 0), one)


def _widened(value: Any) -> Any:
    return tree_map_only(torch.Tensor, lambda one: one.double() if one.is_floating_point() else one, value)


def _as_it_is(value: Any) -> Any:
    return value


def _differs(name: str, expected: float, found: float, *, is_mean: bool) -> StageError:
    make_up = "mean" if is_mean else "sum"
    way_out = (
        "Return a mean over the positions that count (a target of -100 does not), or, with scale_grads=False, a part of a sum"
        if is_mean
        else "With scale_grads=False losses are added up: return a slice's part of a sum, or leave scale_grads out for a mean"
    )
    return StageError(
        f"{name}: loss_fn gives {found:.6g} for some positions of two slices together, and the {make_up} of its losses of each is "
        f"{expected:.6g}: gradients would not be those of whole sequences. {way_out}"
    )
