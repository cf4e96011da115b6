"""Find out whether a sequence's loss is what its slices' losses make up: their mean, or with `scale_grads=False` their sum.

A sum in place of a mean, or the root of a mean, would train on something else without a word; so would a mean that leaves out
padding, or a mask, which shows only where one slice has more of it than another. So two neighbouring slices of a sequence are
compared with both of them together, at a few positions of each: the first ones, and others whenever targets look new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from math import isfinite
from typing import Any, NamedTuple

import torch

from bpipe.errors import StageError
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped

__all__: list[str] = []

POSITIONS = 4  # of a slice that are compared beside those that may count in another way, with one of the slice before it
IGNORED = -100  # a target that cross_entropy leaves out
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-5}  # of relative differences, by the loss's precision
ROUGH = 0.05  # in half precision
Loss = Callable[[Any, Any], Any]
Weigh = Callable[[Sequence[Any], Sequence[int]], Sequence[float]]


Dims = tuple[int | None, int | None]  # that of positions in outputs, and in targets; None where specs say more than one
Kind = tuple[Any, ...]  # how a slice's target looks: dimensions, and whether there is something that may not count


class _Part(NamedTuple):
    """Some positions of a slice."""

    pair: tuple[Any, Any]  # of its output and its target
    length: int


class LossCheck:
    """Compares the losses of neighbouring slices of a step, one pair for each way in which targets look that was not seen before.

    Args:
        slices: into how many slices each sequence is cut.
        dims: where positions are.
        weigh: returns the weights of slices in the mean, given their targets and lengths; None if losses are added up.
        targets: of all slices; None on ranks without a loss.
        seen: what was compared in earlier steps; what this one compares is added.
    """

    def __init__(
        self, slices: int, dims: Dims, weigh: Weigh | None, targets: Sequence[Any] | None, seen: set[tuple[Kind, Kind]]
    ) -> None:
        self._dims, self._weigh, self._seen = dims, weigh, seen
        self._before: dict[int, _Part | None] = {}  # of a pair, by the number of its second slice
        self._due: dict[int, tuple[Kind, Kind]] = {}  # by the number of the second slice of each pair
        if targets is None or slices == 1 or None in dims:
            return
        kinds, new = _kinds(targets, dims[1] or 0), set(seen)
        for unit, pair in enumerate(pairwise(kinds), 1):
            if unit % slices and pair not in new:
                new.add(pair)
                self._due[unit] = pair

    def look(self, unit: int, output: Any, target: Any, length: int, loss: Loss, name: str) -> None:
        """Compare a slice with the one before it, if due; raise a StageError if the loss of both is not what theirs make up."""
        if unit + 1 in self._due and length:
            self._before[unit + 1] = self._part(output, target, length, at_end=True)
        before = self._before.pop(unit, None)
        if before is None or not length:
            return
        kinds = self._due.pop(unit)
        part = self._part(output, target, length, at_end=False)
        losses = None if part is None else self._losses(before, part, loss)
        if losses is None:
            return
        expected, found, limit = losses
        self._seen.add(kinds)
        if not abs(found - expected) <= limit * max(abs(expected), abs(found)):  # NaN, too
            raise _differs(name, expected, found, is_mean=self._weigh is not None)

    def _part(self, output: Any, target: Any, length: int, *, at_end: bool) -> _Part | None:
        """Return a few positions of a slice; None if a tensor has none."""
        both = [(value, dim or 0) for value, dim in zip((output, target), self._dims)]
        if any(not tensors_in(value) or not _have_positions(value, dim, length) for value, dim in both):
            return None
        places = sorted({length - 1, *(() if at_end else range(min(POSITIONS, length))), *_odd_places(*both[1])})
        first, second = (mapped(partial(_some, dim=dim, places=places), value) for value, dim in both)
        return _Part((first, second), len(places))

    def _losses(self, one: _Part, other: _Part, loss: Loss) -> tuple[float, float, float] | None:
        """Return what two losses make up, the loss of both together, and how far they may be apart; None if nothing shows."""
        pairs = [one.pair, other.pair, [_joined(*values) for values in zip(one.pair, other.pair, self._dims)]]
        weights = [1.0, 1.0] if self._weigh is None else self._weigh([one.pair[1], other.pair[1]], [one.length, other.length])
        for widens in (True, False) if any(weights) else ():
            try:
                given = mapped(_widened, pairs) if widens else pairs
                with torch.no_grad():  # a slice in which nothing counts has no loss
                    losses = [loss(*pair) if weight else 0.0 for pair, weight in zip(given, (*weights, 1))]
                first, second, whole = map(float, losses)
            except Exception:  # it may know one precision only
                continue
            precision: Any = getattr(losses[2], "dtype", None)
            limit = LIMITS.get(precision, ROUGH)
            return (weights[0] * first + weights[1] * second, whole, limit) if isfinite(whole) else None
        return None


def _have_positions(value: Any, dim: int, length: int) -> bool:
    return all(
        type(tensor) is torch.Tensor and -tensor.ndim <= dim < tensor.ndim and tensor.shape[dim] == length
        for tensor in tensors_in(value)
    )


def _kinds(targets: Sequence[Any], dim: int) -> list[Kind]:
    """Return how the slices' targets look. Sizes do not count: else each new length of sequences would be compared, too."""
    of_slices = [tensors_in(target) for target in targets]
    odd = [_oddities(tensor, dim) for tensors in of_slices for tensor in tensors]
    found = iter(torch.stack([one.to(odd[0].device) for one in odd]).tolist() if odd else ())  # the host waits for the device once
    return [tuple((tensor.ndim, tensor.dtype, bool(tensor.numel()), *next(found)) for tensor in tensors) for tensors in of_slices]


def _oddities(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return whether a target has what may be padding or a mask: entries of -100, entries of 0, and equal ones at the end."""
    if type(tensor) is not torch.Tensor or not tensor.numel():
        return torch.zeros(3, dtype=torch.bool)
    ends = tensor.narrow(dim, tensor.shape[dim] - 1, 1) if -tensor.ndim <= dim < tensor.ndim else tensor
    next_to = tensor.narrow(dim, max(0, tensor.shape[dim] - 2), 1) if ends is not tensor else tensor
    return torch.stack([(tensor == IGNORED).any(), (tensor == 0).any(), (ends == next_to).any()])


def _odd_places(target: Any, dim: int) -> set[int]:
    """Return the first and the last position where an entry of a target may not count."""
    places: set[int] = set()
    for tensor in tensors_in(target):
        is_odd = ((tensor == IGNORED) | (tensor == 0)).movedim(dim, 0).reshape(tensor.shape[dim], -1)
        found = is_odd.any(1).nonzero().flatten().tolist()
        places.update(found[:1], found[-1:])
    return places


def _some(tensor: torch.Tensor, *, dim: int, places: Sequence[int]) -> torch.Tensor:
    return tensor.detach().index_select(dim, torch.tensor(places, device=tensor.device))


def _joined(one: Any, other: Any, dim: int | None) -> Any:
    rest = iter(tensors_in(other))
    return mapped(lambda tensor: torch.cat([tensor, next(rest)], dim or 0), one)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


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
