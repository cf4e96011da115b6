"""Which positions a slice's queries see: those before them, those of their document, or those that a tensor says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__: list[str] = []


class Mask:
    """Says which of the positions up to a slice's end each of its queries sees.

    Attention is saved with the mask's tensors in autograd's care, and the mask itself without them: `empty`, `filled`.
    """

    tensors: tuple[torch.Tensor, ...] = ()

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
        raise NotImplementedError

    def without_blind(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows [batch, heads, queries, width] with zeros for queries that see nothing at all."""
        return rows

    def empty(self) -> Mask:
        """Return the mask without its tensors."""
        return self

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[Mask, int]:
        """Return the mask with its tensors, which are the first ones of those given, and how many these are."""
        return self, 0


class Ahead(Mask):
    """Each query sees everything up to its own position.

    Args:
        queries: how many there are.
        positions: how many there are up to the slice's end.
    """

    def __init__(self, queries: int, positions: int) -> None:
        self._queries, self._positions = queries, positions

    def whole(self) -> Any:
        from torch.nn.attention.bias import causal_lower_right  # loads torch's compiler, which most do not need

        return causal_lower_right(self._queries, self._positions)


class Given(Mask):
    """A mask [batch or 1, heads or 1, queries, positions]: True for what is seen, or numbers to be added to the products."""

    def __init__(self, mask: torch.Tensor | None) -> None:
        self.tensors = () if mask is None else (mask,)

    def seen(self, begin: int, end: int) -> torch.Tensor:
        return self.tensors[0][..., begin:end]

    def whole(self) -> Any:
        return self.tensors[0]

    def without_blind(self, rows: torch.Tensor) -> torch.Tensor:
        (mask,) = self.tensors
        seen = mask if mask.dtype is torch.bool else mask > -torch.inf
        return rows.masked_fill(~seen.any(-1, keepdim=True), 0)

    def empty(self) -> Mask:
        return Given(None)

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[Mask, int]:
        return Given(tensors[0]), 1


class Documents(Mask):
    """Each query sees its own document up to its own position.

    Args:
        documents: [batch, positions up to the slice's end], a number for each document; None where it is to be filled in.
        queries: how many there are.
    """

    def __init__(self, documents: torch.Tensor | None, queries: int) -> None:
        self.tensors, self._queries = () if documents is None else (documents,), queries

    def seen(self, begin: int, end: int) -> torch.Tensor:
        (documents,) = self.tensors
        first = documents.shape[1] - self._queries
        places = torch.arange(documents.shape[1], device=documents.device)
        is_before = places[first:, None] >= places[begin:end]
        return (is_before & (documents[:, first:, None] == documents[:, None, begin:end])).unsqueeze(1)

    def whole(self) -> Any:
        return self.seen(0, self.tensors[0].shape[1])

    def empty(self) -> Mask:
        return Documents(None, self._queries)

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[Mask, int]:
        return Documents(tensors[0], self._queries), 1
