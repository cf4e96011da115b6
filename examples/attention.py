"""Causal attention by the fastest available kernel: flash-attn's if it imports and can run, else PyTorch's own.

`pip install '.[flash]'` in a checkout installs flash-attn. PyTorch's scaled_dot_product_attention has its own flash
kernels for CPU and CUDA, and needs no installation. Both save their log-sum-exp, and their random state for dropout, beside
queries, keys, values and output: bpipe evicts them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

import bpipe.slices

__all__ = ["causal_attention", "flash_kernel"]

HOMES = ("flash_attn", "flash_attn.cute")  # of versions 2 and 3, and of version 4
HALF = (torch.float16, torch.bfloat16)


def causal_attention(query: Tensor, key: Tensor, value: Tensor, earlier: Sequence[tuple[Tensor, Tensor]] = ()) -> Tensor:
    """Attend to earlier positions: (batch, heads, sequence, head width) each, and so is the result.

    Args:
        query, key, value: of a sequence, or of a slice of one; groups of queries may share a head of keys and values.
        earlier: keys and values of the slices before this one.
    """
    if earlier:
        return bpipe.slices.causal_attention(query, key, value, earlier)
    flash = flash_kernel()
    if flash is None or not query.is_cuda or query.dtype not in HALF:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped)
    attended = flash(*(x.transpose(1, 2) for x in (query, key, value)), causal=True)
    mixed: Tensor = attended[0] if isinstance(attended, tuple) else attended  # version 4 gives the log-sum-exp too
    return mixed.transpose(1, 2)


@cache
def flash_kernel() -> Callable[..., Tensor | tuple[Tensor, ...]] | None:
    """Return flash-attn's function, or None. The package may be there without it: version 4 leaves `flash_attn` empty."""
    for home in HOMES:
        try:
            return getattr(import_module(home), "flash_attn_func")  # noqa: B009
        except (ImportError, AttributeError):
            continue
    return None
