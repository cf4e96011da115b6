"""Storages under tensors: who owns them, their bytes, and which of them may move."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any, NamedTuple

import torch

__all__: list[str] = []

Storage = torch.UntypedStorage


def storages_of(tensor: torch.Tensor) -> Sequence[Storage]:
    """Return the storages that hold a tensor's data, including those inside a wrapper subclass (such as DTensor)."""
    if type(tensor) is not torch.Tensor and hasattr(tensor, "__tensor_flatten__"):
        return [storage for part in _parts(tensor).values() for storage in storages_of(part)]
    return (tensor.untyped_storage(),) if tensor.layout is torch.strided else ()


def shares_parts(alias: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return whether a wrapper subclass and its alias hold the very same inner tensors, so that counting cannot tell owners."""
    return hasattr(tensor, "__tensor_flatten__") and any(getattr(alias, name) is part for name, part in _parts(tensor).items())


def settle(tensor: torch.Tensor) -> None:
    """Wait until a tensor's bytes are there, if a collective operation still writes and owns them (AsyncCollectiveTensor)."""
    if hasattr(tensor, "trigger_wait"):
        tensor.trigger_wait()
    elif hasattr(tensor, "__tensor_flatten__"):
        for part in _parts(tensor).values():
            settle(part)


def _parts(tensor: Any) -> dict[str, torch.Tensor]:
    """Return the tensors inside a wrapper subclass, which may have other parts, such as a DTensor's mesh."""
    parts = {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}
    return {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}


def keys_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the identities of the storages under some tensors."""
    return {storage._cdata for tensor in tensors for storage in storages_of(tensor)}


def as_bytes(storage: Storage, start: int = 0, length: int | None = None) -> torch.Tensor:
    """View part of a storage as uint8 [length], without a copy. Never `.numpy()` it: that pins the storage's size for good."""
    length = storage.nbytes() - start if length is None else length
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, start, (length,), (1,))


def owners(storage: Storage) -> int:
    """Return how many tensors own a storage; the Python object through which we ask does not count."""
    return int(torch._C._storage_Use_Count(storage._cdata)) - _WRAPPER


def _calibrate() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


_WRAPPER = _calibrate()
_ONE_OWNER = _WRAPPER + 1


def shared_among(tensors: Iterable[torch.Tensor | None], others: Container[int] = ()) -> list[int]:
    """Return the indices of the tensors that may share memory: all but plain ones that are the only owner of their storage.

    Usually there are none among many tensors, and finding that out costs two calls for each of them.

    Args:
        tensors: some may be None.
        others: the keys of storages that something else owns.
    """
    places = []
    for place, one in enumerate(tensors):
        if one is None:
            continue
        if type(one) is torch.Tensor and one.layout is torch.strided:
            storage = one.untyped_storage()
            if torch._C._storage_Use_Count(storage._cdata) == _ONE_OWNER and storage._cdata not in others:
                continue
        places.append(place)
    return places


class Held(NamedTuple):
    """A saved storage that cannot move, and why."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    reason: str
