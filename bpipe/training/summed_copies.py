"""Track a tied weight's gradient from its sum to the clipping: whether it was summed, and which rank counts it."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bpipe.comm.wire.dtensor import local
from bpipe.model.ties import SUMS
from bpipe.torch_private.owners_and_versions import version_of
from bpipe.training.pipeline_ranks import Ranks

__all__: list[str] = []


class SummedWeight:
    """One weight of TiedWeights, on a rank that has a copy.

    Args:
        counted_by: the rank, in the default group, that counts its gradient when gradients are clipped.
        is_copy: whether that is another rank.
    """

    def __init__(self, name: str, weight: torch.Tensor, *, counted_by: int, is_copy: bool) -> None:
        self.name, self.counted_by, self.is_copy = name, counted_by, is_copy
        self._weight, self._versions = weight, (0, 0)
        self._summed: Callable[[], Any] = lambda: None
        setattr(weight, SUMS, _Mark(self))

    def remember_sum(self) -> None:
        """Remember that the gradient that the weight has now is a sum."""
        self._summed, self._versions = weakref.ref(self._weight.grad), self._versions_now()

    def is_summed(self) -> bool:
        """Return whether the weight's gradient is the very tensor that a sum was put in."""
        return self._weight.grad is not None and self._summed() is self._weight.grad

    def may_have_sum(self) -> bool:
        """Return whether a sum may still be in the weight's gradient, because backwards add to the tensor that is there.

        It is unknown whether that tensor was set to zero in place. This is assumed only for a gradient in a bucket of
        DistributedDataParallel, which gives the same tensor again, once both it and the weight have changed.
        """
        if not self.is_summed():
            return False
        have_changed = all(now != then for now, then in zip(self._versions_now(), self._versions))
        return not (have_changed and _is_in_bucket(self._weight.grad))

    def _versions_now(self) -> tuple[int, int]:
        return version_of(local(self._weight.grad)), version_of(local(self._weight))


class _Mark:
    """What TiedWeights know of a parameter, as long as they are alive. A pickled or copied mark says nothing."""

    def __init__(self, weight: SummedWeight) -> None:
        self.weight = weakref.ref(weight)

    def __reduce__(self) -> tuple[type[OrderedDict[str, Any]], tuple[()]]:
        return OrderedDict, ()  # which torch.load takes without knowing bpipe


def problem_with_sums(parameters: Sequence[torch.Tensor], elsewhere: set[int], ranks: Ranks) -> str:
    """Return what is wrong if the gradient of a tied weight would be counted on several ranks, or before it was summed.

    Args:
        elsewhere: the ids of those that the user says other ranks count.
    """
    for parameter in parameters:
        mark = getattr(parameter, SUMS, None)
        weight = mark.weight() if isinstance(mark, _Mark) else None
        if weight is None or weight.counted_by not in ranks.global_ranks:
            continue
        if weight.is_copy and id(parameter) not in elsewhere:
            return (
                f"rank {weight.counted_by} counts {weight.name!r}, and this rank has a copy: give copies=tied.copies, of "
                "TiedWeights"
            )
        if not weight.is_summed():
            return (
                f"the gradient of {weight.name!r}, a weight of several stages, is not the tensor that sum_grads() of TiedWeights "
                "made: call sum_grads() once, after the last backward, and change the gradient in place from then on"
            )
    return ""


def _is_in_bucket(gradient: Any) -> bool:
    """Return whether DistributedDataParallel(gradient_as_bucket_view=True) may have made a gradient: a part of a vector."""
    return gradient._base is not None and gradient._base.dim() == 1
