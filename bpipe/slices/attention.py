"""Causal attention of a slice of a sequence to the slices before it and to itself, piece by piece.

Each slice's keys and values are attended to by themselves, and the results are put together by the logarithms of their sums of
exponentials, as flash attention does with blocks (Dao et al., arXiv 2205.14135) and ring attention with ranks (Liu et al., arXiv
2310.01889). So no joined tensor of keys or values is made, and only the pieces are saved, which the slices share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import logsigmoid, scaled_dot_product_attention, sigmoid

from bpipe.errors import StageError
from bpipe.memory.saved.joined import join

__all__ = ["causal_attention"]

CUDA_WIDTHS = 8  # flash attention on CUDA takes heads whose width is a multiple of this
Options = tuple[Any, ...]  # what CUDA's backward wants back from its forward


def causal_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    earlier: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """Attend to all earlier slices of a sequence, and causally to the slice itself; without dropout.

    Args:
        q: [batch, heads, n, width], the queries of this slice's n positions.
        k: [batch, heads of keys, n, width], with as many heads as q, or fewer that groups of q's heads share.
        v: [batch, heads of keys, n, width of values].
        earlier: keys and values of the slices before this one, the first one first; their lengths may differ.
        scale: of the products of queries and keys; default 1 / sqrt(width).

    Returns:
        [batch, heads, n, width of values].

    Raises:
        StageError: the shapes do not fit.
    """
    for place, (keys, values) in enumerate([*earlier, (k, v)]):
        if not _fit(q, keys, values, is_own=place == len(earlier)) or keys.shape[1] != k.shape[1]:
            raise StageError(
                f"causal_attention got queries {list(q.shape)}, keys {list(keys.shape)} and values {list(values.shape)}: give "
                "[batch, heads, positions, width], with as many keys as values, and as queries for the slice itself; the heads of "
                "the queries are a multiple of the heads of the keys"
            )
    is_grouped = k.shape[1] != q.shape[1]
    if not earlier:
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=is_grouped)
    is_cast = torch.is_autocast_enabled(q.device.type)
    dtype = torch.get_autocast_dtype(q.device.type) if is_cast and q.dtype is not torch.float64 else q.dtype
    q, *pieces = [tensor.to(dtype) for tensor in (q, *(tensor for pair in earlier for tensor in pair), k, v)]
    if _has_kernel(q, pieces[-2], pieces[-1]):
        return _Attention.apply(q, scale, *pieces)  # type: ignore[no-untyped-call, no-any-return]
    joined = join(pieces[::2], 2), join(pieces[1::2], 2)
    mask: Any = causal_lower_right(q.shape[2], joined[0].shape[2])
    return scaled_dot_product_attention(q, *joined, attn_mask=mask, scale=scale, enable_gqa=is_grouped)


def _fit(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_own: bool) -> bool:
    if not q.ndim == k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or (is_own and k.shape[2] != q.shape[2]):
        return False
    return (q.shape[0], q.shape[3]) == (k.shape[0], k.shape[3]) and q.shape[1] % k.shape[1] == 0


def _has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether torch has a kernel that gives the logarithms, too."""
    if type(q) is not torch.Tensor or q.shape[3] != v.shape[3]:
        return False
    if q.device.type == "cpu":
        return q.dtype.is_floating_point
    is_grouped = k.shape[1] != q.shape[1]
    fits = q.device.type == "cuda" and q.shape[3] % CUDA_WIDTHS == 0
    return fits and can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, is_grouped))


class _Piece(NamedTuple):
    """The attention to one piece.

    Args:
        output: [batch, heads, n, width].
        logs: [batch, heads, n], the logarithms of the sums of exponentials.
        options: for the backward.
    """

    output: torch.Tensor
    logs: torch.Tensor
    options: Options = ()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *, is_causal: bool) -> _Piece:
    aten = torch.ops.aten
    if q.device.type == "cpu":
        return _Piece(*aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale))
    output, logs, *options, _ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    return _Piece(output, logs, tuple(options))


def _gradients(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    whole: _Piece,
    scale: float | None,
    *,
    is_causal: bool,
) -> Sequence[torch.Tensor]:
    """Return the gradients of q, k and v by the attention to one piece, given the output and the logarithms of all pieces."""
    aten, (output, logs, options) = torch.ops.aten, whole
    if q.device.type == "cpu":
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return backward(gradient, q, k, v, output, logs, 0.0, is_causal, scale=scale)  # type: ignore[no-any-return]
    sums_q, sums_k, most_q, most_k, seed, offset = options
    backward = aten._scaled_dot_product_flash_attention_backward
    found = backward(gradient, q, k, v, output, logs, sums_q, sums_k, most_q, most_k, 0.0, is_causal, seed, offset, scale=scale)
    return found  # type: ignore[no-any-return]


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows lie in one piece, as the kernels need it; the dispatcher that checks it is left out here."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, scale: float | None, *given: torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.options = scale, []
        q, *pieces = map(_by_rows, (q, *given))
        output = logs = None
        for place in range(0, len(pieces), 2):
            piece = _attend(q, pieces[place], pieces[place + 1], scale, is_causal=place == len(pieces) - 2)
            ctx.options.append(piece.options)
            wide = piece.output.to(piece.logs.dtype)
            if output is None or logs is None:
                output, logs = wide, piece.logs
            else:
                output = output - sigmoid(piece.logs - logs).unsqueeze(-1) * (output - wide)
                logs = logs - logsigmoid(logs - piece.logs)
        assert output is not None and logs is not None, "a slice attends to itself, too"
        output = output.to(q.dtype)
        ctx.save_for_backward(q, output, logs, *pieces)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = _by_rows(gradient)
        q, output, logs, *pieces = ctx.saved_tensors
        of_queries, of_pieces = None, []
        for place in range(0, len(pieces), 2):
            k, v = pieces[place : place + 2]
            whole = _Piece(output, logs, ctx.options[place // 2])
            of_q, *of_both = _gradients(gradient, q, k, v, whole, ctx.scale, is_causal=place == len(pieces) - 2)
            of_queries = of_q if of_queries is None else of_queries + of_q
            of_pieces += of_both
        return (of_queries, None, *of_pieces)
