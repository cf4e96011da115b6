"""The package flash-attn, where it is installed: one kernel for all pieces. It is imported on the first use."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import Any

import torch

from bpipe.memory.saved.joined import join
from bpipe.torch_private.fakes import is_plain

__all__: list[str] = []

WIDEST = 256  # head that its kernels take
DEVICE = "cuda"


def takes_flash(q: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether flash-attn is there and takes such queries [batch, heads, n, width]."""
    fits = is_plain(q) and q.device.type == DEVICE and dtype in (torch.float16, torch.bfloat16)
    return fits and q.shape[3] <= WIDEST and _flash_attn() is not None


@cache
def _flash_attn() -> Any:
    try:
        return import_module("flash_attn").flash_attn_func
    except (ImportError, AttributeError, OSError):  # it is compiled, and may not fit to the torch that is there
        return None


def attend_with_flash(q: torch.Tensor, pieces: Sequence[tuple[torch.Tensor, torch.Tensor]], scale: float | None) -> torch.Tensor:
    """Attend to joined pieces; its mask is aligned at the lower right, and it saves views of what was joined, so that pieces are.

    Args:
        q: [batch, heads, n, width].
        pieces: keys and values [batch, heads of keys, positions, width].
    """
    k, v = (join([pair[place] for pair in pieces], 2) for place in (0, 1))
    output: torch.Tensor = _flash_attn()(*(one.transpose(1, 2) for one in (q, k, v)), softmax_scale=scale, causal=True)
    return output.transpose(1, 2)
