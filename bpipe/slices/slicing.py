"""How a schedule cuts microbatches into slices, and puts their outputs and losses together again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from bpipe.errors import ConfigurationError
from bpipe.model.call import CutBatch
from bpipe.model.chunks import check_joinable, join
from bpipe.model.merging import join_values, merge
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import flattened
from bpipe.model.specs import check_specs
from bpipe.slices.loss_check import IGNORED, Kind, LossCheck
from bpipe.slices.positions import SEQUENCE, Lengths, SliceCutting, UpTo, rule_of

__all__: list[str] = []

UNKNOWN = 0  # the length of a slice that this rank has nothing of


class Slicing:
    """Cut microbatches into k slices, by the lengths and the specs that `Options` describes."""

    def __init__(
        self,
        num_slices: int,
        lengths: Lengths | None = None,
        args_spec: Any = None,
        kwargs_spec: Any = None,
        target_spec: Any = None,
        output_spec: Any = None,
    ) -> None:
        for spec, name in ((args_spec, "args"), (kwargs_spec, "kwargs"), (target_spec, "target")):
            check_specs(spec, f"{name}_slice_spec", others=(UpTo,))
        check_specs(output_spec, "output_slice_spec", may_reduce=True)
        self.num_slices = num_slices
        self._lengths_of = rule_of(lengths, num_slices)
        self._specs, self._output_spec = (args_spec, kwargs_spec, target_spec), output_spec
        self._compared: set[tuple[Kind, Kind]] = set()  # how targets looked in slices whose losses were compared

    def loss_check(self, targets: Sequence[Any] | None, *, is_mean: bool) -> LossCheck:
        """Return what compares the losses of a step's slices with those of whole sequences, their mean or their sum."""
        dims = _dim_of(self._output_spec), _dim_of(self._specs[2])
        return LossCheck(self.num_slices, dims, _weights if is_mean else None, targets, self._compared)

    def cut(self, given: CutBatch) -> CutBatch:
        """Cut all microbatches of a call, each by its own number of positions; a ConfigurationError names the microbatch."""
        found = []
        for number in range(len(given.args)):
            try:
                found.append(self._cut(given, number))
            except ConfigurationError as error:
                raise ConfigurationError(f"microbatch {number}: {error}") from error
        args, kwargs, targets, weights, lengths = (list(chain.from_iterable(column)) for column in zip(*found))
        return CutBatch(
            args, kwargs, targets if given.targets is not None else None, False, weights or None, lengths if any(lengths) else None
        )

    def _cut(self, given: CutBatch, number: int) -> Sequence[Sequence[Any]]:
        """Return the args, kwargs, targets, weights in the loss, and lengths, of one microbatch's slices."""
        args_spec, kwargs_spec, target_spec = self._specs
        cutting = SliceCutting(self._lengths_of, self.num_slices, len(given.args))
        args = cutting.split(given.args[number], args_spec, "args")
        kwargs = cutting.split(given.kwargs[number], kwargs_spec, "kwargs")
        known, targets = cutting.lengths, list[Any]()
        if given.targets is not None:
            targets = cutting.split(given.targets[number], target_spec, "the target")
        cutting.finish()
        if targets and target_spec is None:
            if not cutting.has_cut("the target"):
                raise ConfigurationError(
                    "the target has no dimension of positions, so no slice can be compared with it: give one with an entry for "
                    "each position (-100 where there is nothing to learn), or train without slices"
                )
            known = cutting.lengths
        weights = _weights(targets, cutting.lengths) if targets else []
        return args, kwargs, targets, weights, known or [UNKNOWN] * self.num_slices

    def merged(self, outputs: Sequence[Any], lengths: Sequence[int] | None) -> list[Any]:
        """Return the outputs of the microbatches, given those of all slices, and the lengths of these where they are known."""
        if self.num_slices == 1:
            return list(outputs)
        found = []
        for begin in range(0, len(outputs), self.num_slices):
            end = begin + self.num_slices
            join = partial(_join, lengths=lengths[begin:end] if lengths else None)
            found.append(merge(outputs[begin:end], self._output_spec, join_leaves=join, option="output_slice_spec"))
        return found

    def expected(self, output: Any, lengths: Sequence[int] | None) -> list[Any]:
        """Return what the outputs of microbatches will look like, given the first slice's, and all lengths where they are known.

        That is one of them, or, if their sequences have different lengths, all; their tensors have shapes, but no content.
        """
        if self.num_slices == 1:
            return [output]
        merged = partial(merge, [output], self._output_spec, option="output_slice_spec")
        first = merged(join_leaves=partial(_join, lengths=lengths[:1] if lengths else None))
        sizes = [sum(lengths[i : i + self.num_slices]) for i in range(0, len(lengths), self.num_slices)] if lengths else []
        return [merged(join_leaves=partial(_outline, size=size)) for size in sizes] if len(set(sizes)) > 1 else [first]

    def losses(self, losses: Sequence[torch.Tensor], weights: Sequence[float] | None) -> list[torch.Tensor]:
        """Return the losses of the microbatches: the sums of their slices' losses, each times its weight."""
        found = torch.stack([loss.reshape(()) for loss in losses])
        if weights is not None:
            found = found * torch.tensor(weights, dtype=found.dtype, device=found.device)
        return list(found.reshape(-1, self.num_slices).sum(1))


def _outline(parts: Sequence[Any], spec: Any, *, size: int) -> Any:
    """Return what `_join` will make of the values at one place, for a sequence of so many positions."""
    joined = _join(parts, spec, lengths=None)
    if hasattr(spec, "reduce_fn") or not isinstance(joined, torch.Tensor):
        return joined
    shape = list(joined.shape)
    shape[getattr(spec, "split_dim", SEQUENCE)] = size
    return torch.empty(shape, dtype=joined.dtype, device="meta")


def _join(parts: Sequence[Any], spec: Any, *, lengths: Sequence[int] | None) -> Any:
    """Join the values at one place in the outputs of a sequence's slices."""
    if hasattr(spec, "reduce_fn") or not isinstance(parts[0], torch.Tensor):
        return join_values(parts, spec)
    dim = getattr(spec, "split_dim", SEQUENCE)
    shapes = [list(part.shape) for part in parts]
    if any(not -part.ndim <= dim < part.ndim for part in parts):
        raise TypeError(f"slices returned tensors of the shapes {shapes}, which have no dimension {dim} of positions")
    check_joinable(parts[0], dim)
    if lengths and [part.shape[dim] for part in parts] != list(lengths):
        raise TypeError(
            f"slices of {list(lengths)} positions returned tensors of the shapes {shapes}, not with these in dimension {dim}"
        )
    return join(parts, dim)


def _dim_of(spec: Any) -> int | None:
    """Return the dimension of positions that a spec says; None if it says several, or none for some values."""
    dims = {SEQUENCE if one is None and spec is None else getattr(one, "split_dim", None) for one in flattened(spec)}
    return dims.pop() if len(dims) == 1 else None


def _weights(targets: Sequence[Any], lengths: Sequence[int]) -> list[float]:
    """Return the part of each slice in the mean loss of its microbatch: the part of the positions that count.

    Args:
        targets: of the slices. If the target is one tensor of whole numbers, those entries count that are not -100.
        lengths: of the slices.
    """
    found = tensors_in(targets[0])
    if len(found) == 1 and not (found[0].is_floating_point() or found[0].is_complex()):
        counts = [int((tensors_in(target)[0] != IGNORED).sum()) for target in targets]
    elif lengths:
        counts = list(lengths)
    else:
        raise ConfigurationError(
            "nothing on the last stage's rank shows how long slices are, so their losses cannot be weighted: give step() the "
            "inputs there too, or a target that is cut"
        )
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
