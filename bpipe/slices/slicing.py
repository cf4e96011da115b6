"""How a schedule cuts microbatches into slices, and puts their outputs and losses together again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from bpipe.errors import ConfigurationError
from bpipe.model.call import CutBatch
from bpipe.model.chunks import cannot_join, join
from bpipe.model.merging import join_values, merge
from bpipe.model.microbatch import tensors_in
from bpipe.model.specs import check_specs
from bpipe.slices.positions import SEQUENCE, SliceCutting, UpTo, equal_lengths, given_lengths

__all__: list[str] = []

IGNORED = -100  # a target that cross_entropy leaves out


class Slicing:
    """Cut microbatches into k slices.

    Args:
        num_slices: k.
        lengths: of the slices, in positions or as shares of the sequence that add up to 1; default: equal ones.
        args_spec: how positional arguments are cut along the sequence, nested as they are: see `SliceCutting.split`.
        kwargs_spec: likewise for keyword arguments.
        target_spec: likewise for the target.
        output_spec: how the outputs of slices are merged, as `merge` says; default: tensors are concatenated along dimension 1.

    Raises:
        ConfigurationError: there are not k lengths, or they are not positive.
    """

    def __init__(
        self,
        num_slices: int,
        lengths: Sequence[float] | None = None,
        args_spec: Any = None,
        kwargs_spec: Any = None,
        target_spec: Any = None,
        output_spec: Any = None,
    ) -> None:
        if lengths is not None and (len(lengths) != num_slices or not all(length > 0 for length in lengths)):
            raise ConfigurationError(
                f"slice_lengths={list(lengths)}: give {num_slices} positive numbers, one for each slice: of positions, or "
                "shares of the sequence"
            )
        for spec, name in ((args_spec, "args"), (kwargs_spec, "kwargs"), (target_spec, "target")):
            check_specs(spec, f"{name}_slice_spec", others=(UpTo,))
        check_specs(output_spec, "output_slice_spec", may_reduce=True)
        self.num_slices = num_slices
        self._lengths_of = partial(equal_lengths, num_slices=num_slices) if lengths is None else partial(given_lengths, lengths)
        self._specs, self._output_spec = (args_spec, kwargs_spec, target_spec), output_spec

    def cut(self, given: CutBatch) -> CutBatch:
        """Cut all microbatches of a call.

        Raises:
            ConfigurationError: a value does not fit to the sequence, or may be a mask.
        """
        args_spec, kwargs_spec, target_spec = self._specs
        args: list[tuple[Any, ...]] = []
        kwargs: list[dict[str, Any]] = []
        targets: list[Any] = []
        weights: list[float] = []
        lengths: list[int] = []
        for number, (one_args, one_kwargs) in enumerate(zip(given.args, given.kwargs)):
            cutting = SliceCutting(self._lengths_of)
            args += cutting.split(one_args, args_spec, "args", self.num_slices)
            kwargs += cutting.split(one_kwargs, kwargs_spec, "kwargs", self.num_slices)
            known = cutting.lengths
            if given.targets is not None:
                cut = cutting.split(given.targets[number], target_spec, "the target", self.num_slices)
                if target_spec is None and not cutting.has_cut("the target"):
                    raise ConfigurationError(
                        "the target has no dimension of positions, so no slice can be compared with it: give one with an entry for "
                        "each position (-100 where there is nothing to learn), or train without slices"
                    )
                if target_spec is None:
                    known = cutting.lengths
                targets += cut
                weights += _weights(cut, cutting.lengths)
            lengths += known
        return CutBatch(args, kwargs, targets if given.targets is not None else None, False, weights or None, lengths or None)

    def merged(self, outputs: Sequence[Any], lengths: Sequence[int] | None) -> list[Any]:
        """Return the outputs of the microbatches, given those of their slices.

        Args:
            outputs: of all slices.
            lengths: of all slices, where they are known.

        Raises:
            StageError: outputs do not fit together, or do not have the positions of their slices.
        """
        if self.num_slices == 1:
            return list(outputs)
        found = []
        for begin in range(0, len(outputs), self.num_slices):
            end = begin + self.num_slices
            join = partial(_join, lengths=lengths[begin:end] if lengths else None)
            found.append(merge(outputs[begin:end], self._output_spec, join_leaves=join, option="output_slice_spec"))
        return found

    def check_output(self, output: Any, lengths: Sequence[int] | None) -> None:
        """Check that `merged` can merge outputs like this one, of the first slice.

        Raises:
            StageError: it does not have the positions of its slice.
        """
        if self.num_slices > 1:
            join = partial(_join, lengths=lengths[:1] if lengths else None)
            merge([output], self._output_spec, join_leaves=join, option="output_slice_spec")

    def losses(self, losses: Sequence[torch.Tensor], weights: Sequence[float] | None) -> list[torch.Tensor]:
        """Return the losses of the microbatches: the sums of their slices' losses, each times its weight."""
        found = torch.stack([loss.reshape(()) for loss in losses])
        if weights is not None:
            found = found * torch.tensor(weights, dtype=found.dtype, device=found.device)
        return list(found.reshape(-1, self.num_slices).sum(1))


def _join(parts: Sequence[Any], spec: Any, *, lengths: Sequence[int] | None) -> Any:
    """Join the values at one place in the outputs of a sequence's slices."""
    if hasattr(spec, "reduce_fn") or not isinstance(parts[0], torch.Tensor):
        return join_values(parts, spec)
    dim = getattr(spec, "split_dim", SEQUENCE)
    shapes = [list(part.shape) for part in parts]
    if any(not -part.ndim <= dim < part.ndim for part in parts):
        raise TypeError(f"slices returned tensors of the shapes {shapes}, which have no dimension {dim} of positions")
    reason = cannot_join(parts[0], dim)
    if reason is not None:
        raise TypeError(reason)
    if lengths and [part.shape[dim] for part in parts] != list(lengths):
        raise TypeError(
            f"slices of {list(lengths)} positions returned tensors of the shapes {shapes}, not with these in dimension {dim}"
        )
    return join(parts, dim)


def _weights(targets: Sequence[Any], lengths: Sequence[int]) -> list[float]:
    """Return the part of each slice in the mean loss of its microbatch: the part of the positions that count.

    Args:
        targets: of the slices. If the target is one tensor of whole numbers, those entries count that are not -100.
        lengths: of the slices.
    """
    found = tensors_in(targets[0])
    if len(found) == 1 and not (found[0].is_floating_point() or found[0].is_complex()):
        counts = [int((tensors_in(target)[0] != IGNORED).sum()) for target in targets]
    else:
        counts = list(lengths)
    total = sum(counts)
    return [count / total if total else 0.0 for count in counts]
