"""The memory of a tensor, and whether two tensors share a byte."""

from __future__ import annotations

import numpy as np
import torch

from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

ANYWHERE = 1 << 40  # an address


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor says itself where its bytes are: no subclass, no lazy parameter, and strided."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided


class Span:
    """The memory of a tensor, without owning it; numpy compares such spans exactly, and reads nothing.

    Args:
        tensor: one that is not plain counts as one byte of its own.
        last_user: the last stage that has it, if that is known.

    Attributes:
        begin: the place of the first byte in the storage.
        end: that behind the last one.
    """

    def __init__(self, tensor: torch.Tensor, last_user: int = -1) -> None:
        self.storage, self.last_user, self.begin = id(tensor), last_user, 0
        shape, strides = [1], [1]
        if is_plain(tensor):
            size, self.storage = tensor.element_size(), address_of(tensor.untyped_storage())
            self.begin = size * int(tensor.storage_offset())
            # With a dimension for the bytes of an element.
            shape, strides = [*tensor.shape, size], [*(size * stride for stride in tensor.stride()), 1]
        self.end = self.begin + (1 + sum((number - 1) * stride for number, stride in zip(shape, strides)) if all(shape) else 0)
        self.__array_interface__ = {
            "data": (ANYWHERE + self.begin, True),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": "|u1",
            "version": 3,
        }

    def overlaps(self, other: Span) -> bool:
        """Return whether a byte belongs to both."""
        return self.storage == other.storage and bool(np.shares_memory(np.asarray(self), np.asarray(other)))
