"""Storages under tensors: their owners, their bytes, and which of them may move."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import compress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.torch_private.owners_and_versions import COUNTS_OWNERS, address_of, num_references

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
    """Wait until a tensor's bytes have arrived, if a collective operation still writes and owns them (AsyncCollectiveTensor)."""
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
    return {address_of(storage) for tensor in tensors for storage in storages_of(tensor)}


def as_bytes(storage: Storage) -> torch.Tensor:
    """View a storage as uint8 [bytes], without a copy. Never `.numpy()` it: that pins the storage's size for good."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))


def element_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's elements, as if it were dense: torch has no `nbytes` of a sparse one."""
    return tensor.numel() * tensor.element_size()


def owners(storage: Storage) -> int:
    """Return how many tensors own a storage; the Python object by which bpipe asks does not count."""
    return num_references(address_of(storage)) - _WRAPPER


def _calibrate() -> int:
    tensor = torch.empty(1)
    storage = tensor.untyped_storage()
    return num_references(address_of(storage)) - 1


_WRAPPER = _calibrate() if COUNTS_OWNERS else 0
_ONE_OWNER = _WRAPPER + 1


def shared_among(tensors: Iterable[torch.Tensor | None], others: Container[int] = ()) -> list[int]:
    """Return the indices of the tensors that may share memory: all but plain ones that are the only owner of their storage.

    Usually there are none among many tensors, and finding that out costs two calls for each of them.

    Args:
        others: the keys of storages that have another owner.
    """
    places = []
    for place, one in enumerate(tensors):
        if one is None:
            continue
        if type(one) is torch.Tensor and one.layout is torch.strided:
            storage = one.untyped_storage()
            if num_references(address_of(storage)) == _ONE_OWNER and address_of(storage) not in others:
                continue
        places.append(place)
    return places


def num_tensors(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    """Count the tensors over each storage."""
    return Counter(address_of(storage) for tensor in tensors for storage in storages_of(tensor))


class HasTensor(Protocol):
    """An object that stands for a saved tensor."""

    @property
    def tensor(self) -> torch.Tensor: ...


T = TypeVar("T", bound=HasTensor)


class Group(Generic[T]):
    """The saved tensors of one storage, and the number of its other owners.

    Attributes:
        device: of the tensors; the storage of a fake one is on none.
        is_resizable: whether its memory can be freed and made again, as that of a fake one could.
    """

    device: torch.device

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.saved: list[T] = []
        self.num_others = 0
        self.is_resizable = False

    @property
    def python_references(self) -> int:
        """References to the Python object of the storage; torch makes only one such object: ours, and any of the user's."""
        return sys.getrefcount(self.storage)

    def count_others(self) -> None:
        """Count the owners besides the saved tensors, and look where these are."""
        self.device = self.saved[0].tensor.device
        self.is_resizable = self.storage.resizable() or self.storage.device.type == "meta"
        self.num_others = owners(self.storage) - len(self.saved) + self.python_references - _ONLY_OURS


def grouped(saved: Iterable[T]) -> dict[int, Group[T]]:
    """Group saved tensors by storage, and count the other owners of each."""
    groups: dict[int, Group[T]] = {}
    for one in saved:
        settle(one.tensor)  # before anything counts owners: a collective that still writes it is an owner, too
        for storage in storages_of(one.tensor):
            if storage.nbytes():
                groups.setdefault(address_of(storage), Group(storage)).saved.append(one)
            del storage  # only the group may hold a reference when it counts
    for group in groups.values():
        group.count_others()
    return groups


def _calibrate_references() -> int:
    tensor = torch.empty(1)
    return Group[Any](tensor.untyped_storage()).python_references


_ONLY_OURS = _calibrate_references()  # with a tensor that owns the storage too: torch may keep a reference of its own then


def _own_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor on this rank, which may be a part of a storage, or of a DTensor."""
    return min(tensor.nbytes, sum(storage.nbytes() for storage in storages_of(tensor)))


class MessageBytes(NamedTuple):
    """The bytes of a stage's input or result, and those of each storage, with a weak reference that identifies it.

    Args:
        gradient: the bytes of the gradients that go back for it; None for as many.
    """

    num_bytes: int
    storages: dict[int, tuple[StorageWeakRef, int]]
    gradient: int | None = None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor], needed: Sequence[bool] | None = None) -> MessageBytes:
        """Return the bytes of some tensors.

        Args:
            needed: which of them need a gradient; default: all.
        """
        found = {address_of(s): (StorageWeakRef(s), s.nbytes()) for tensor in tensors for s in storages_of(tensor)}
        num_bytes = sum(size for _, size in found.values())
        gradient = None if needed is None else sum(map(_own_bytes, compress(tensors, needed)))
        return cls(num_bytes, found, None if gradient == num_bytes else gradient)

    def with_more(self, other: MessageBytes) -> MessageBytes:
        """Return the bytes of both; what lies in the same storages counts once."""
        storages = self.storages | other.storages
        more = sum(size for key, (_, size) in other.storages.items() if key not in self.storages)
        return MessageBytes(max(self.num_bytes + more, other.num_bytes), storages)

    def among(self, keys: Container[int]) -> int:
        """Return how many of its bytes lie in some storages."""
        return sum(size for key, (storage, size) in self.storages.items() if key in keys and not storage.expired())


class Held(NamedTuple):
    """A saved storage that cannot move, and why."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int
    reason: str
