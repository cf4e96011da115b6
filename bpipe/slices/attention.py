"""Causal attention of a slice of a sequence to the slices before it and to itself, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention

from bpipe.errors import StageError
from bpipe.memory.saved.joined import cast
from bpipe.slices.by_pieces import attend_by_pieces
from bpipe.slices.flash import attend_with_flash, takes_flash
from bpipe.slices.masks import Ahead, Documents, Given, Mask

__all__ = ["causal_attention"]

Pair = tuple[torch.Tensor, torch.Tensor]


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    earlier: Sequence[Pair],
    *,
    scale: float | None = None,
    documents: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to all earlier slices of a sequence, and causally to the slice itself; without dropout.

    Args:
        q: [batch, heads, n, width], the queries of this slice's n positions.
        k: [batch, heads of keys, n, width], with as many heads as q, or fewer that groups of q's heads share.
        v: [batch, heads of keys, n, width of values].
        earlier: keys and values of the slices before this one, the first one first; their lengths may differ.
        scale: of the products of queries and keys; default 1 / sqrt(width).
        documents: [batch, positions from the sequence's first to this slice's last], whole numbers: of several short sequences
            that are packed into one, each position attends to those with its own number. Give it to `step` with the spec
            `UpTo(1)`. Default: the sequence is one document.

    Returns:
        [batch, heads, n, width of values].

    Raises:
        StageError: the shapes do not fit.

    Example:
        >>> first, second = (torch.randn(1, 2, 3, 8) for _ in range(2))  # two slices of three positions, with two heads
        >>> causal_attention(second, second, second, earlier=[(first, first)]).shape
        torch.Size([1, 2, 3, 8])
    """
    for place, (keys, values) in enumerate([*earlier, (k, v)]):
        if not _fit(q, keys, values, is_own=place == len(earlier)) or keys.shape[1] != k.shape[1]:
            raise StageError(
                f"causal_attention got queries {list(q.shape)}, keys {list(keys.shape)} and values {list(values.shape)}: give "
                "[batch, heads, positions, width], with as many keys as values, and as queries for the slice itself; the heads of "
                "the queries are a multiple of the heads of the keys"
            )
    k, v = cast(k, kept_dtype(q)), cast(v, kept_dtype(q))
    end = sum(keys.shape[2] for keys, _ in earlier) + k.shape[2]
    if documents is None:
        if not earlier:
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=k.shape[1] != q.shape[1])
        return _attended(q, k, v, earlier, scale, Ahead(queries=q.shape[2], positions=end))
    if documents.shape not in ((q.shape[0], end), (1, end)):
        raise StageError(
            f"causal_attention got documents {list(documents.shape)} for {q.shape[0]} sequences up to position {end}: give a "
            "number for each position from the first one to the slice's end, with args_slice_spec or kwargs_slice_spec UpTo(1)"
        )
    return _attended(q, k, v, earlier, scale, Documents(documents, queries=q.shape[2]))


def masked_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, earlier: Sequence[Pair], mask: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend to what a mask shows of earlier slices and of the slice itself; only the pieces are saved.

    Args:
        mask: [batch or 1, heads or 1, n, positions up to the slice's end]: True for what is seen, or numbers to be added.
    """
    if mask.requires_grad:
        raise StageError("attention over slices gives no gradient to its mask, which is learned here: train whole sequences")
    return _attended(q, k, v, earlier, scale, Given(mask))


def kept_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the type in which attention computes: autocast's, where that is on."""
    is_cast = torch.is_autocast_enabled(tensor.device.type)
    return torch.get_autocast_dtype(tensor.device.type) if is_cast and tensor.dtype is not torch.float64 else tensor.dtype


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, earlier: Sequence[Pair], scale: float | None, mask: Mask
) -> torch.Tensor:
    dtype, pieces = kept_dtype(q), [*earlier, (k, v)]
    if isinstance(mask, Ahead) and takes_flash(q, dtype):
        return attend_with_flash(q.to(dtype), [(keys.to(dtype), values.to(dtype)) for keys, values in pieces], scale)
    found: torch.Tensor = attend_by_pieces(q, mask, scale, dtype, [tensor for pair in pieces for tensor in pair])
    return found


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_own: bool) -> bool:
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or (is_own and k.shape[2] != q.shape[2]):
        return False
    return (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]) and q.shape[1] % k.shape[1] == 0
