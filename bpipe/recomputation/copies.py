"""Copy storages, many at a time: the values that a forward finds in buffers, whichever operation changes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from bpipe.memory.saved.storages import Storage
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
Values = list[torch.Tensor]  # those of each group, one after the other


class _Spot(NamedTuple):
    """The position of a storage's bytes among the values."""

    group: int
    start: int  # in words of the group
    length: int
    width: int  # it is aligned to a multiple of this number of bytes


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is nothing but a view of its storage."""
    is_special = tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg()
    return type(tensor) is torch.Tensor and tensor.layout is torch.strided and not is_special


class Copies:
    """Copies the storages under some tensors, each once: tensors that share memory also share the memory of their copies.

    Storages of one device whose sizes are multiples of the same word are copied together.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        widest: dict[int, tuple[Storage, int]] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            known = widest.get(address_of(storage), (storage, 0))[1]
            widest[address_of(storage)] = storage, max(known, tensor.dtype.itemsize)
        self._groups: dict[tuple[torch.device, int, int], list[torch.Tensor]] = {}
        self._spots: dict[int, _Spot] = {}
        self._storages = [(storage, storage.nbytes()) for storage, _ in widest.values()]
        ends: dict[tuple[torch.device, int, int], tuple[int, int]] = {}  # of each group: its index, and its words so far
        for key, (storage, element_size) in widest.items():
            size, device = storage.nbytes(), storage.device
            word = 8 if size % 8 == 0 else 4 if size % 4 == 0 else 2 if size % 2 == 0 else 1
            of_group = (device, word, 0 if element_size <= word else key)  # where it would not be aligned, it is alone
            index, start = ends.setdefault(of_group, (len(ends), 0))
            length = size // word
            words = torch.empty(0, dtype=_WORDS[word], device=device).set_(storage, 0, (length,), (1,))
            self._groups.setdefault(of_group, []).append(words)
            self._spots[key] = _Spot(index, start, length, max(word, element_size))
            ends[of_group] = index, start + length

    def is_whole(self) -> bool:
        """Return whether no storage has been freed or resized since."""
        return all(storage.nbytes() == size for storage, size in self._storages)

    def take(self) -> Values:
        """Copy the present values of the storages."""
        return [torch.cat(members) for members in self._groups.values()]

    def differing(self, one: Values, other: Values) -> set[int]:
        """Return the storages whose values differ between the two; waits for the device."""
        groups = {i for i, (a, b) in enumerate(zip(one, other)) if not torch.equal(a, b)}
        if not groups:
            return set()
        places = [(key, group, slice(start, start + length)) for key, (group, start, length, _) in self._spots.items()]
        return {key for key, group, place in places if group in groups and not torch.equal(one[group][place], other[group][place])}

    def all(self) -> set[int]:
        return set(self._spots)

    def among(self, values: Values, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as a view of its copy, with a version of its own."""
        spot = self._spots[address_of(tensor.untyped_storage())]
        group = values[spot.group]
        offset = spot.start * group.dtype.itemsize // tensor.dtype.itemsize + int(tensor.storage_offset())
        copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return copy.set_(group.untyped_storage(), offset, tensor.shape, tensor.stride())

    def is_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Return whether this copies exactly the storages under some tensors, and its copies can be viewed as these tensors are."""
        sizes = [(address_of(tensor.untyped_storage()), tensor.dtype.itemsize) for tensor in tensors]
        is_same = {key for key, _ in sizes} == self._spots.keys() and self.is_whole()
        return is_same and all(size <= self._spots[key].width for key, size in sizes)
