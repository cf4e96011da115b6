"""Which positions a slice's queries see: those before them, those of their document, or those that a tensor says."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.torch_private.fakes import without_modes

__all__: list[str] = []


class Mask:
    """Says which of the positions up to a slice's end each of its queries sees.

    Attention is saved with the mask's tensors in autograd's care, and the mask itself without them.

    Args:
        tensors: of which it is made.
        queries: how many there are in the slice.
        positions: how many there are up to the slice's end.
    """

    def __init__(self, *tensors: torch.Tensor, queries: int = 0, positions: int = 0) -> None:
        self.tensors, self.queries, self.positions = tensors, queries, positions

    def of(self, *tensors: torch.Tensor) -> Mask:
        """Return the mask with other tensors in place of its own, or with none."""
        return type(self)(*tensors, queries=self.queries, positions=self.positions)

    def bias(self, begin: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return what is added to the products with some positions: [batch or 1, heads or 1, queries, positions], no infinity.

        Where a query sees nothing of a piece, the logarithm of its sum must still be a number.
        """
        seen = self.seen(begin, end)
        lowest = torch.finfo(dtype).min
        if seen.dtype is torch.bool:
            return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)
        return seen.to(dtype).clamp_(min=lowest) if seen.dtype is not dtype else seen.clamp(min=lowest)

    def seen(self, begin: int, end: int) -> torch.Tensor:
        """Return the mask of some positions, as scaled_dot_product_attention takes it."""
        raise NotImplementedError

    def whole(self) -> Any:
        """Return the mask of all positions, as scaled_dot_product_attention takes it."""
        return self.seen(0, self.tensors[0].shape[-1])

    def without_blind(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [batch, heads, queries, width] with zeros for queries that see nothing at all."""
        return rows


class Ahead(Mask):
    """Each query sees everything up to its own position."""

    def whole(self) -> Any:
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which most do not need

        with without_modes():  # a dry run's makes no tensor of this class
            return causal_lower_right(self.queries, self.positions)


class Given(Mask):
    """A mask [batch or 1, heads or 1, queries, positions]: True for what is seen, or numbers to be added to the products."""

    def seen(self, begin: int, end: int) -> torch.Tensor:
        return self.tensors[0][..., begin:end]

    def without_blind(self, rows: torch.Tensor) -> torch.Tensor:
        (mask,) = self.tensors
        seen = mask if mask.dtype is torch.bool else mask > -torch.inf
        return rows.masked_fill(~seen.any(-1, keepdim=True), 0)


class Documents(Mask):
    """Each query sees its own document up to its own position: a tensor [batch, positions] has a number for each document."""

    def seen(self, begin: int, end: int) -> torch.Tensor:
        (documents,) = self.tensors
        first = documents.shape[1] - self.queries
        places = torch.arange(documents.shape[1], device=documents.device)
        is_before = places[first:, None] >= places[begin:end]
        return (is_before & (documents[:, first:, None] == documents[:, None, begin:end])).unsqueeze(1)
