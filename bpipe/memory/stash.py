"""Follow what autograd saves for one microbatch of one stage, and say what of it may move.

The graph owns what it saves; the stash only looks on, through weak references, so that a backward still frees memory as it
goes. A storage may move if the saved tensors are its only owners: then nobody can touch it while it is empty.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bpipe.errors import SavedTensorError
from bpipe.memory.storages import Held, Storage, owners, shares_parts, storages_of

__all__: list[str] = []


class Saved:
    """What a saved-tensor hook hands to autograd: an alias of the tensor, its version, and its place in the order of saving."""

    __slots__ = ("__weakref__", "is_no_alias", "order", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, order: int) -> None:
        self.order = order
        self.tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self.version = tensor._version
        self.is_no_alias = shares_parts(self.tensor, tensor)


class _Group:
    """The saved tensors of one storage."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.saved: list[Saved] = []

    @property
    def python_references(self) -> int:
        """References to the Python object of the storage, of which torch makes only one: ours, and the user's if there are."""
        return sys.getrefcount(self.storage)

    def others(self) -> int:
        """Owners besides the saved tensors."""
        return owners(self.storage) - len(self.saved) + self.python_references - _ONLY_OURS

    def held(self, reason: str) -> Held:
        tensor = self.saved[0].tensor
        return Held(tuple(tensor.shape), tensor.dtype, self.storage.nbytes(), reason)


def _calibrate() -> int:
    tensor = torch.empty(1)
    return _Group(tensor.untyped_storage()).python_references


_ONLY_OURS = _calibrate()  # with a tensor that owns the storage too: torch may keep a reference of its own then


class Movable(NamedTuple):
    """A storage that may move."""

    storage: Storage
    num_saved: int  # saved tensors that own it
    order: int  # of its first saving
    is_output: bool  # held for a send, too


@dataclass
class Contents:
    """The storages of a microbatch: those that may move, in the order of their saving, and those that cannot."""

    movable: list[Movable] = field(default_factory=list, repr=False)
    fixed_bytes: int = 0  # this microbatch's alone, and yet not movable
    shared: dict[int, Held] = field(default_factory=dict)  # owned by others too, by storage
    foreign: list[Held] = field(default_factory=list)  # parameters, buffers and the user's batch: not activations

    @property
    def movable_bytes(self) -> int:
        return sum(entry.storage.nbytes() for entry in self.movable)

    @property
    def own_bytes(self) -> int:
        """What this microbatch takes, and its backward gives back."""
        return self.movable_bytes + self.fixed_bytes

    @property
    def held(self) -> list[Held]:
        return [*self.shared.values(), *self.foreign]


class Stash:
    """The saved tensors of one microbatch of one stage.

    Args:
        name: the microbatch, for messages, such as "microbatch 3 of stage 0".
        foreign: storages that are nobody's activations, and what they are.
        device: only what lies there can move; None for any.
        cuts: where each part but the first begins, in the order of saving; none where a microbatch moves as a whole.
    """

    def __init__(self, name: str, foreign: Mapping[int, str], device: torch.device | None = None, cuts: Sequence[int] = ()) -> None:
        self.name, self._cuts = name, cuts
        self._device = device
        self._foreign = foreign
        self._saved: list[weakref.ref[Saved]] = []
        self._num_saved = 0
        self._away: set[int] = set()  # parts; 0 stands for all

    def capture(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which everything that autograd saves is followed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor, self._num_saved)
        self._num_saved += 1
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Saved) -> torch.Tensor:
        self._check_unchanged(saved)
        if self._away and (0 in self._away or self._part(saved.order) in self._away):
            raise SavedTensorError(
                f"a saved tensor of {self.name} was used while its bytes were on another rank. "
                "Run no backward of your own through a stage between its forward and its backward."
            )
        return saved.tensor if isinstance(saved.tensor, torch.nn.Parameter) else saved.tensor.detach()

    def _check_unchanged(self, saved: Saved) -> None:
        if saved.tensor._version != saved.version:
            raise SavedTensorError(
                f"a tensor saved for the backward of {self.name} was modified in place: shape {tuple(saved.tensor.shape)}, "
                f"{saved.tensor.dtype}, version {saved.tensor._version}, expected {saved.version}. "
                "Replace the in-place operation, or clone the tensor before it."
            )

    def contents(self, ours: Iterable[torch.Tensor] = (), leaving: Iterable[torch.Tensor] = ()) -> Contents:
        """Look at what is saved now.

        Args:
            ours: tensors that the pipeline itself still holds, and returns to the user: they make a storage immovable, but
                it stays this microbatch's.
            leaving: tensors that the pipeline holds for a send that completes before the storage is emptied.

        Raises:
            SavedTensorError: a saved tensor that could move was modified in place.
        """
        kept, sent = _count(ours), _count(leaving)
        contents = Contents()
        for key, group in self._groups().items():
            others = group.others() - kept[key] - sent[key]
            if reason := self._foreign.get(key) or ("a parameter" if _has_parameter(group) else None):
                contents.foreign.append(group.held(reason))
            elif any(saved.is_no_alias for saved in group.saved):
                contents.shared[key] = group.held("inside a tensor subclass whose detach() makes no alias")
            elif others:
                contents.shared[key] = group.held(f"owned {others} more time{'s' * (others > 1)} outside the graph")
            elif kept[key] or not group.storage.resizable() or self._is_elsewhere(group.storage.device):
                contents.fixed_bytes += group.storage.nbytes()
            else:
                for saved in group.saved:
                    self._check_unchanged(saved)
                contents.movable.append(Movable(group.storage, len(group.saved), group.saved[0].order, bool(sent[key])))
        return contents

    def _groups(self) -> dict[int, _Group]:
        """What is saved and not yet freed, by storage, in the order of saving."""
        groups: dict[int, _Group] = {}
        for saved in [saved for ref in self._saved if (saved := ref()) is not None]:
            for storage in storages_of(saved.tensor):
                if storage.nbytes():
                    groups.setdefault(storage._cdata, _Group(storage)).saved.append(saved)
        return groups

    def _is_elsewhere(self, device: torch.device) -> bool:
        ours = self._device
        return ours is not None and (
            device.type != ours.type or (None not in (device.index, ours.index) and device.index != ours.index)
        )

    def mark(self, part: int, *, away: bool) -> None:
        """Say whether a part's movable storages are empty; part 0 is all of them."""
        if away:
            self._away.add(part)
        else:
            self._away.discard(part)

    def of_part(self, contents: Contents, part: int) -> list[tuple[Storage, int]]:
        """The movable storages of a part, each with the number of its owners. What is sent to the next stage is in the last."""
        entries = [(e.storage, e.num_saved, self._part_of(e)) for e in contents.movable]
        return [(storage, num_saved) for storage, num_saved, its_part in entries if part in (0, its_part)]

    def _part_of(self, entry: Movable) -> int:
        return len(self._cuts) + 1 if entry.is_output else self._part(entry.order)

    def _part(self, order: int) -> int:
        return bisect_right(self._cuts, order) + 1


def _has_parameter(group: _Group) -> bool:
    return any(isinstance(saved.tensor, torch.nn.Parameter) for saved in group.saved)


def _count(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    return Counter(storage._cdata for tensor in tensors for storage in storages_of(tensor))
