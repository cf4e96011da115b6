"""Large pages for fresh memory on CPU: to fill 128 MiB of small ones takes the kernel five times as long as to copy them."""

from __future__ import annotations

import ctypes
import mmap
from functools import cache
from typing import Any

import torch

__all__: list[str] = []

LEAST_BYTES = 4 * 1024**2  # smaller memory is mostly not fresh


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask the kernel for large pages when a tensor's memory is first written. It may not have any, and nothing depends on it."""
    if tensor.nbytes >= LEAST_BYTES and tensor.device.type == "cpu" and (advise := _madvise()) is not None:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)


@cache
def _madvise() -> Any:
    """Return the C library's madvise, or None where there is none for large pages."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
