"""The points at which a forward and a backward that run side by side change over: a module sets them where it communicates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from bpipe.overlap.turns import change_over

__all__ = ["all_to_all", "yield_here"]


def yield_here(*tensors: torch.Tensor) -> Any:
    """Let the other half of a pair run here: in the forward, and in the backward where the gradients of these tensors pass.

    Call it between the start of a communication and the wait for it. Outside a pair, and in a region of `torch.compile`, it does
    nothing. The points of both halves should take turns: for as many as one has, the other should have about as many.

    What it returns are views, by which the gradients pass the point: an operation in place on one needs a clone first.

    Args:
        tensors: of any shapes and dtypes; without any, only the forward changes over.

    Returns:
        Views of the same values: one tensor, or a tuple of several; None without any.

    Raises:
        StageError: the other half has failed.

    Example:
        >>> import torch
        >>> from bpipe.overlap import yield_here
        >>> yield_here(torch.ones(2))
        tensor([1., 1.])
    """
    is_point = not torch.compiler.is_compiling()
    if not tensors:
        if is_point:
            change_over()
        return None
    passed = _Point.apply(*tensors) if is_point else tensors  # type: ignore[no-untyped-call]
    return passed[0] if len(passed) == 1 else passed


def all_to_all(
    tensor: torch.Tensor,
    group: Any = None,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> torch.Tensor:
    """Exchange rows with all ranks of a group, as torch's `all_to_all_single` does; the other half of a pair runs meanwhile.

    Its gradient is exchanged back in the same way. Collective over the group.

    Args:
        tensor: shape (n, ...): the rows for each rank, one rank's behind the other's.
        group: the process group, such as that of the experts' ranks; default: all ranks.
        output_splits: how many rows come from each rank; default: as many from each.
        input_splits: how many rows go to each rank; default: as many to each.

    Returns:
        shape (sum of `output_splits`, ...): the rows from each rank, in the order of the ranks.

    Raises:
        StageError: the other half has failed.

    Example:
        In a module that sends rows of `x` to experts on the ranks of `group`::

            def forward(self, x):
                here = all_to_all(x, group)
                return all_to_all(self.experts(here), group)
    """
    exchanged: torch.Tensor = _AllToAll.apply(tensor, group, output_splits, input_splits)  # type: ignore[no-untyped-call]
    return exchanged


class _Point(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        change_over()
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        change_over()
        return gradients


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any, output_splits: Any, input_splits: Any) -> torch.Tensor:
        ctx.group, ctx.splits = group, (output_splits, input_splits)
        return _exchanged(tensor, group, output_splits, input_splits)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        output_splits, input_splits = ctx.splits
        return _exchanged(gradient, ctx.group, input_splits, output_splits), None, None, None


def _exchanged(tensor: torch.Tensor, group: Any, output_splits: Any, input_splits: Any) -> torch.Tensor:
    """Start an exchange, let the other half run, and wait for the exchange."""
    given = tensor.contiguous()
    out, into = (None if rows is None else list(rows) for rows in (output_splits, input_splits))
    taken = given.new_empty((len(given) if out is None else sum(out), *given.shape[1:]))
    work = dist.all_to_all_single(taken, given, out, into, group=group, async_op=True)
    change_over()
    work.wait()
    return taken
