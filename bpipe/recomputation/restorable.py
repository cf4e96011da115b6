"""Decide which of the tensors found by a search are copied for another forward, and which are only compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.engine.setup import BATCH
from bpipe.errors import StageError
from bpipe.memory.saved.storages import storages_of
from bpipe.model.state.contents import SMALL_BYTES
from bpipe.model.state.reachable import Reachable
from bpipe.recomputation.copies import Copies, is_plain
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

Written = set[tuple[int, object]]  # places of tensors
_Look = tuple[tuple[int, ...], int, torch.dtype, bool]  # a tensor's storages, their bytes, its dtype, whether it needs a gradient


class Restorable:
    """The tensors of a search, grouped by how they are restored.

    Args:
        written: the places of large tensors that are copied, because forwards write them; None: all of them.
        non_activations: storages that are not activations, with the kind of each: the batch is left alone.

    Raises:
        StageError: a buffer is not initialised yet.
    """

    def __init__(
        self,
        name: str,
        found: Reachable,
        written: Written | None,
        non_activations: Mapping[int, str],
        copies_of: Callable[[Sequence[torch.Tensor]], Copies],
    ) -> None:
        self._found, self._written = found, written
        self._looks: list[tuple[torch.Tensor, _Look]] = []
        self.odd: list[torch.Tensor] = []  # each is copied separately
        self.uncopied: list[tuple[str, torch.Tensor]] = []  # only compared
        self.contained: list[tuple[str, torch.Tensor]] = []  # likewise: what is in a container is not replaced by a copy
        self.unversioned: list[tuple[str, torch.Tensor]] = []  # likewise, but torch counts no versions of them
        contained = [tensor for key, tensor in found.tensors.items() if found.is_contained(key) and not is_lazy(tensor)]
        held = {storage for tensor in contained for storage in _look_of(tensor)[0]}
        plain: list[tuple[str, torch.Tensor, _Look]] = []
        for key, tensor in found.tensors.items():
            if tensor.device.type == "meta":
                continue
            where = found.name(key)
            if is_lazy(tensor):
                raise StageError(f"{name} cannot be recomputed: {where} is not initialised. Run the stage once before training")
            look = _look_of(tensor)
            self._looks += ((tensor, look),)
            if BATCH in map(non_activations.get, look[0]):
                continue
            if tensor.requires_grad or isinstance(tensor, nn.Parameter):  # never replaced by a copy: its `.grad` belongs to it
                self.uncopied += ((where, tensor),)
            elif not held.isdisjoint(look[0]):  # replaced by a copy, it would be another one than in the container
                self.contained += ((where, tensor),)
            elif is_plain(tensor):
                plain += ((where, tensor, look),)
            else:
                self.odd += (tensor,)
        self.copies = copies_of([tensor for _, tensor, look in plain if self._is_copied(tensor, look[1])])
        keys = self.copies.all()
        self.copied = [tensor for _, tensor, look in plain if look[0][0] in keys]
        self.uncopied += [(where, tensor) for where, tensor, look in plain if look[0][0] not in keys]
        self.unversioned = [one for one in (*self.uncopied, *self.contained) if one[1].is_inference()]
        self.uncopied = [one for one in self.uncopied if not one[1].is_inference()]
        self.contained = [one for one in self.contained if not one[1].is_inference()]

    def _is_copied(self, tensor: torch.Tensor, num_bytes: int) -> bool:
        if num_bytes <= SMALL_BYTES or self._written is None:
            return num_bytes > 0
        return any((id(place.container), place.key) in self._written for place in self._found.places[id(tensor)])

    def is_of(self, found: Reachable, written: Written | None) -> bool:
        """Return whether these tensors would be grouped in the same way now: no tensor was changed into another one."""
        is_same = found is self._found and written is self._written
        return is_same and [_look_of(one) for one, _ in self._looks] == [look for _, look in self._looks]


def _look_of(tensor: torch.Tensor) -> _Look:
    """Return the properties that decide how a tensor is restored, and that may change (`.data = ...`, `requires_grad_`)."""
    if type(tensor) is torch.Tensor and tensor.layout is torch.strided:
        storage = tensor.untyped_storage()
        return (address_of(storage),), storage.nbytes(), tensor.dtype, tensor.requires_grad
    storages = storages_of(tensor)
    return tuple([address_of(one) for one in storages]), sum([one.nbytes() for one in storages]), tensor.dtype, tensor.requires_grad
