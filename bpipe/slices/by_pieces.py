"""Attention to the pieces of a sequence, one after the other: the kernels, and their gradients.

Each piece's keys and values are attended to by themselves, and the results are put together by the logarithms of their sums of
exponentials, as flash attention does with blocks (Dao et al., arXiv 2205.14135) and ring attention with ranks (Liu et al., arXiv
2310.01889). So no joined tensor of keys or values is made, and only the pieces are saved, which the slices share: as they are
given, because what they are cast to would be a tensor of each slice's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.functional import scaled_dot_product_attention

from bpipe.memory.saved.joined import join
from bpipe.slices.masks import Ahead, Mask
from bpipe.torch_private.fakes import is_plain
from bpipe.torch_private.operators import flash_attention, flash_attention_backward

__all__: list[str] = []

CUDA_WIDTHS = 8  # flash attention on CUDA takes heads whose width is a multiple of this
Options = tuple[Any, ...]  # what CUDA's backward wants back from its forward
Gradients = tuple[torch.Tensor | None, ...]


def attend_by_pieces(q: torch.Tensor, mask: Mask, scale: float | None, dtype: torch.dtype, pieces: Sequence[torch.Tensor]) -> Any:
    """Attend to pieces of keys and values, cast to a type, of which only themselves are saved.

    Args:
        q: [batch, heads, n, width].
        mask: says which positions see which.
        pieces: keys and values in turns, [batch, heads of keys, positions, width]; the last ones are the slice's own.
    """
    if has_kernel(q, pieces[-2].to(dtype), pieces[-1].to(dtype), mask):
        return _Attention.apply(q.to(dtype), mask, scale, *mask.tensors, *pieces)  # type: ignore[no-untyped-call]
    is_grouped = pieces[-2].shape[1] != q.shape[1]
    if is_grouped or any(piece.dtype is not dtype for piece in pieces):
        return _Repeated.apply(q.to(dtype), mask, scale, *mask.tensors, *pieces)  # type: ignore[no-untyped-call]
    joined = join(pieces[::2], 2), join(pieces[1::2], 2)
    return scaled_dot_product_attention(q.to(dtype), *joined, attn_mask=mask.whole(), scale=scale)


def has_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> bool:
    """Return whether torch has a kernel that gives the logarithms, too."""
    if not is_plain(q) or q.shape[3] != v.shape[3]:
        return False
    if q.device.type == "cpu":
        return k.dtype.is_floating_point
    is_grouped = k.shape[1] != q.shape[1]
    fits = q.device.type == "cuda" and q.shape[3] % CUDA_WIDTHS == 0 and isinstance(mask, Ahead)
    return fits and can_use_flash_attention(SDPAParams(q.to(k.dtype), k, v, None, 0.0, True, is_grouped))


# A piece's keys and values, as the kernels need them; whether the kernel masks what is ahead; and what is added to the products,
# [batch or 1, heads or 1, n, positions]; None if nothing is.
Piece = tuple[torch.Tensor, torch.Tensor, bool, torch.Tensor | None]
# The output [batch, heads, n, width], and the logarithms of the sums of exponentials [batch, heads, n].
Attended = tuple[torch.Tensor, torch.Tensor]


def _with_mask(q: torch.Tensor, mask: Mask, pieces: Sequence[torch.Tensor]) -> Iterator[Piece]:
    """Yield the pieces with their parts of the mask, each made when it is asked for."""
    begin, is_causal = 0, isinstance(mask, Ahead)
    for place in range(0, len(pieces), 2):
        k, v = (_by_rows(piece.to(q.dtype)) for piece in pieces[place : place + 2])
        end = begin + k.shape[2]
        yield k, v, is_causal and place == len(pieces) - 2, None if is_causal else mask.bias(begin, end, q.dtype)
        begin = end


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose rows lie in one piece, as the kernels need it; the dispatcher that checks it is left out here."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _attend(q: torch.Tensor, piece: Piece, scale: float | None) -> tuple[torch.Tensor, torch.Tensor, Options]:
    attend, (k, v, is_causal, bias) = flash_attention(q.device.type), piece
    if q.device.type == "cpu":
        return *attend(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale), ()
    output, logs, *options, _ = attend(q, k, v, 0.0, is_causal, scale=scale)
    return output, logs, tuple(options)


def _gradients(
    gradient: torch.Tensor, q: torch.Tensor, piece: Piece, whole: Attended, options: Options, scale: float | None
) -> Sequence[torch.Tensor]:
    """Return the gradients of q, k and v by the attention to one piece, given the output and the logarithms of all pieces."""
    backward, (k, v, is_causal, bias), (output, logs) = flash_attention_backward(q.device.type), piece, whole
    if q.device.type == "cpu":
        found = backward(gradient, q, k, v, output, logs, 0.0, is_causal, attn_mask=bias, scale=scale)
    else:
        sums_q, sums_k, most_q, most_k, seed, offset = options
        found = backward(gradient, q, k, v, output, logs, sums_q, sums_k, most_q, most_k, 0.0, is_causal, seed, offset, scale=scale)
    return found  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, mask: Mask, scale: float | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.mask, ctx.num_own, ctx.options = scale, mask.of(), len(mask.tensors), []
        pieces, q = tensors[len(mask.tensors) :], _by_rows(q)
        output = logs = None
        for piece in _with_mask(q, mask, pieces):
            own, own_logs, options = _attend(q, piece, scale)
            ctx.options.append(options)
            # Of float64, too: before 2.13 torch's compiler takes its logarithms for float32.
            wide = own.to(torch.promote_types(q.dtype, own_logs.dtype))
            if output is None or logs is None:
                output, logs = wide, own_logs
            else:
                output = output - torch.sigmoid(own_logs - logs).unsqueeze(-1) * (output - wide)
                logs = torch.logaddexp(logs, own_logs)
        assert output is not None and logs is not None, "a slice attends to itself, too"
        output = mask.without_blind(output)
        if output.dtype is not q.dtype:  # torch 2.11's compiler gives wrong gradients after a cast that changes nothing
            output = output.to(q.dtype)
        ctx.save_for_backward(q, output, logs, *tensors)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        q, output, logs, *tensors = ctx.saved_tensors
        mask, pieces = ctx.mask.of(*tensors[: ctx.num_own]), tensors[ctx.num_own :]
        gradient, of_queries = _by_rows(mask.without_blind(gradient)), None
        of_pieces: list[torch.Tensor] = []
        for piece, options in zip(_with_mask(q, mask, pieces), ctx.options):
            of_q, *of_both = _gradients(gradient, q, piece, (output, logs), options, ctx.scale)
            of_queries = of_q if of_queries is None else of_queries + of_q
            of_pieces += of_both
        cast = [one.to(piece.dtype) for one, piece in zip(of_pieces, pieces)]
        return (of_queries, None, None, *[None] * ctx.num_own, *cast)


class _Repeated(torch.autograd.Function):
    """Attention to joined, repeated and cast keys and values, which are not saved, but made again in the backward."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, mask: Mask, scale: float | None, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.scale, ctx.mask, ctx.num_own = scale, mask.of(), len(mask.tensors)
        ctx.save_for_backward(q, *tensors)
        return _whole(q, mask, scale, tensors[len(mask.tensors) :])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Gradients:
        q, *tensors = ctx.saved_tensors
        again = [tensor.detach().requires_grad_() for tensor in (q, *tensors[ctx.num_own :])]
        with torch.enable_grad():
            output = _whole(again[0], ctx.mask.of(*tensors[: ctx.num_own]), ctx.scale, again[1:])
        of_queries, *of_pieces = torch.autograd.grad(output, again, gradient)
        return (of_queries, None, None, *[None] * ctx.num_own, *of_pieces)


def _whole(q: torch.Tensor, mask: Mask, scale: float | None, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    groups = q.shape[1] // pieces[0].shape[1]
    k, v = (torch.cat([piece.to(q.dtype) for piece in pieces[first::2]], 2) for first in (0, 1))
    if groups > 1:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    return scaled_dot_product_attention(q, k, v, attn_mask=mask.whole(), scale=scale)
