"""Versions and owners of tensors, and whether torch has all that it takes to follow what autograd saves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from bpipe.torch_private.names import ask, has

__all__: list[str] = []


# The number of in-place changes of a tensor's memory until now.
version_of: Callable[[torch.Tensor], int] = attrgetter("_version") if has(torch.Tensor, "_version") else lambda _: 0
# The identity of a storage, which none other has as long as anybody has a weak reference to it; Python's `id` may be reused then.
address_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata") if has(torch.UntypedStorage(0), "_cdata") else id
# num_references(address_of(storage)) is the number of references to a storage, with that of its Python object, or very many where
# torch does not tell. Both are torch's own functions, because they are called for each gradient of each backward.
COUNTS_OWNERS = has(torch._C, "_storage_Use_Count") and has(torch.UntypedStorage(0), "_cdata")
num_references: Callable[[int], int] = torch._C._storage_Use_Count if COUNTS_OWNERS else lambda _: sys.maxsize

# Without one of these a saved tensor could be emptied that others use, or be another one than the user's code expects.
_TO_FOLLOW = {
    "_storage_Use_Count": torch._C,
    "_cdata": torch.UntypedStorage(0),
    "_version": torch.Tensor,
    "_top_saved_tensors_default_hooks": torch._C._autograd,
    "_raw_saved_tensors": BackwardCFunction,
}
FOLLOWS = all(has(owner, name) for name, owner in _TO_FOLLOW.items())


def check_follows() -> None:
    """Raise an UnsupportedTorchError if saved tensors cannot be followed, and so not be evicted."""
    for name, owner in _TO_FOLLOW.items():
        ask(owner, name)


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another one is a view of; None if it is none, or torch does not tell."""
    return ask(tensor, "_base", None)


def hooks_on(tensor: torch.Tensor) -> tuple[Mapping[int, Any], Mapping[int, Any]]:
    """Return a leaf's hooks on its gradient, by their ids: those that run before it is added up, and after."""
    return ask(tensor, "_backward_hooks") or {}, ask(tensor, "_post_accumulate_grad_hooks") or {}


def storage_at(address: int, device: torch.device, num_bytes: int) -> torch.UntypedStorage:
    """Return a storage over memory that somebody else allocates and frees."""
    return ask(torch._C, "_construct_storage_from_data_pointer")(address, device, num_bytes)


def parts_of_sparse(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and the values of a sparse tensor [in COO layout], coalesced or not."""
    return ask(tensor, "_indices")(), ask(tensor, "_values")()


def ragged_dimension(tensor: torch.Tensor) -> int:
    """Return the dimension of a jagged tensor in which its parts differ."""
    return ask(tensor, "_ragged_idx")
