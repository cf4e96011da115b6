"""Follow the tensors that autograd saves for one microbatch of one stage, and find out which of them may move.

The graph owns the saved tensors; the stash only observes them, through weak references, so that a backward still frees memory as
it goes. A storage may move if the saved tensors are its only owners: then no code can access it while it is empty.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.errors import SavedTensorError, StageError, text_of
from bpipe.memory.saved.attributes import Kept, tensors_kept_in
from bpipe.memory.saved.joined import in_pieces, joined_again
from bpipe.memory.saved.saved_tensor import FORGOTTEN, Packed, Saved, shape_of, untraced
from bpipe.memory.saved.storages import Group, Held, Storage, grouped, keys_of, num_tensors, storages_of
from bpipe.torch_private.engine_and_graph import Hooks, OwnPackHook, hooks_around
from bpipe.torch_private.owners_and_versions import FOLLOWS, address_of

__all__: list[str] = []


PACKED = "packed by a saved-tensor hook around the step, into an object that is not a tensor"


class Cached(NamedTuple):
    """A tensor that a recomputation will take from its cache, after it has asked for a saved one, its guard."""

    tensor: weakref.ref[torch.Tensor]
    version: int
    guard: weakref.ref[Saved]


class _Taken(Saved):
    """A cached tensor in place of a saved one. It is evicted and loaded with its guard, whose use is refused while it is away."""

    __slots__ = ("_guard",)

    def __init__(self, tensor: torch.Tensor, version: int, guard: Saved) -> None:
        self.order, self.tensor, self.version, self._guard = guard.order, tensor, version, guard
        self.is_away, self.is_forgotten, self.is_no_alias, self.original, self.attributes = guard.is_away, False, False, None, {}

    @property
    def guard(self) -> Saved:
        return self._guard


class Movable(NamedTuple):
    """A storage that may move."""

    storage: Storage
    saved: list[Saved]  # its owners, in the order of saving
    is_output: bool  # also owned by a send


@dataclass
class StashContents:
    """The storages of a microbatch: those that may move, in the order of saving, and those that cannot."""

    movable: list[Movable] = field(default_factory=list, repr=False)
    fixed: dict[int, int] = field(default_factory=dict)  # this microbatch's own but not movable: bytes by storage
    state_bytes: int = 0  # of the fixed ones: what later slices read
    unmovable: list[Held] = field(default_factory=list)  # those of them that its module could make movable
    borrowed_bytes: int = 0  # bytes of the previous stage, on this rank, which has saved them too
    shared: dict[int, Held] = field(default_factory=dict)  # with other owners too, by storage
    non_activations: list[Held] = field(default_factory=list)  # parameters, buffers and the user's batch: not activations

    def fix(self, storage: Storage) -> None:
        """Note that a storage is this microbatch's own, and stays."""
        self.fixed[address_of(storage)] = storage.nbytes()

    @property
    def own(self) -> set[int]:
        """This microbatch's storages."""
        return {*self.fixed, *(address_of(entry.storage) for entry in self.movable)}

    @property
    def movable_bytes(self) -> int:
        return sum(entry.storage.nbytes() for entry in self.movable)

    @property
    def fixed_bytes(self) -> int:
        return sum(self.fixed.values())

    @property
    def own_bytes(self) -> int:
        """The bytes that this microbatch takes, and that its backward frees."""
        return self.movable_bytes + self.fixed_bytes

    @property
    def held(self) -> list[Held]:
        return [*self.unmovable, *self.shared.values(), *self.non_activations]


class Stash:
    """The saved tensors of one microbatch of one stage.

    Args:
        name: the microbatch, for messages, such as "microbatch 3 of stage 0".
        non_activations: storages that are not activations, with the kind of each.
        device: only tensors on this device can move; None for any.
        cuts: the positions where each part but the first begins, in the order of saving; empty if a microbatch moves as a whole,
            None if that is to be decided after its forward.
    """

    def __init__(
        self,
        name: str,
        non_activations: Mapping[int, str],
        device: torch.device | None = None,
        cuts: Sequence[int] | None = None,
    ) -> None:
        self.name, self.cuts = name, () if cuts is None else cuts
        self._is_cut = cuts is not None
        self._device = device
        self._non_activations = non_activations
        self._apart: list[StorageWeakRef] = []  # these keep addresses from being reused
        self._saved: list[weakref.ref[Saved]] = []
        self._num_saved = 0
        self._outputs: set[int] = set()  # first savings of storages that are sent to the next stage
        self._lent: set[int] = set()  # likewise of those that the next stage, on this rank, got without a transfer
        self._borrowed: dict[int, StorageWeakRef] = {}  # those that this one got so from the previous stage, or an earlier slice
        self._left: dict[int, tuple[StorageWeakRef, int]] = {}  # those that later slices of the sequence get, and their bytes
        self._is_later_slice = False
        self._away: dict[int, list[weakref.ref[Saved]]] = {}  # by part; 0 stands for all
        self.kept: list[Kept] = []  # tensors that no hook has seen
        self._packed: list[Kept] = []  # results of the user's own pack hook
        self._users: Hooks | None = None
        self.cached: list[Cached] = []  # not seen by hooks either, but movable

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Follow all tensors that autograd saves inside this context, as packed by the user's own hooks around it, if any."""
        if not FOLLOWS:  # torch lacks a private name: nothing is evicted, and the bytes of the microbatch count as none
            yield
            return
        self._users = hooks_around()
        pack = OwnPackHook(untraced(self._pack))
        if self._users is not None:
            pack.set_users(self._users)
        with following(self.name), torch.autograd.graph.saved_tensors_hooks(pack, untraced(self._unpack)):
            yield

    def _pack(self, tensor: torch.Tensor) -> Saved | Packed:
        value = tensor if self._users is None else self._users[0](tensor)
        if self._is_later_slice:
            value = in_pieces(value)
        order = self._num_saved
        self._num_saved += 1
        if not isinstance(value, torch.Tensor):
            here = [one for one in tensors_kept_in(value) if not self._is_elsewhere(one.device)]
            self._packed += [Kept(weakref.ref(one), PACKED) for one in here]
            return Packed(value, order)
        saved = Saved(value, order)
        if self._users is None:
            saved.original = weakref.ref(tensor)
            if type(tensor) is torch.Tensor:  # subclasses keep their own parts there
                saved.attributes = tensor.__dict__
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Saved | Packed) -> torch.Tensor:
        if saved.is_forgotten:
            raise SavedTensorError(FORGOTTEN)
        if isinstance(saved, Saved):
            saved.check_unchanged(self.name)
        value = saved.value if isinstance(saved, Packed) else self._alias(saved)
        if self._is_later_slice:
            value = joined_again(value)
        return value if self._users is None else self._users[1](value)

    def _alias(self, saved: Saved) -> torch.Tensor:
        if saved.is_away:
            raise SavedTensorError(
                f"a saved tensor of {self.name} was used while its bytes were on another rank. "
                "Run no backward of your own through a stage between its forward and its backward."
            )
        return saved.tensor if isinstance(saved.tensor, torch.nn.Parameter) else saved.tensor.detach()

    def set_apart(self, tensors: Iterable[torch.Tensor], reason: str) -> None:
        """Treat tensors as non-activations as long as they live: copies that stand in for tensors known to be none."""
        apart = {address_of(storage): StorageWeakRef(storage) for tensor in tensors for storage in storages_of(tensor)}
        self._non_activations, self._apart = {**self._non_activations, **dict.fromkeys(apart, reason)}, list(apart.values())

    def borrow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that belong to the previous stage, on this rank, or to an earlier slice, as long as these keep them."""
        self._borrowed |= {address_of(storage): StorageWeakRef(storage) for tensor in tensors for storage in storages_of(tensor)}

    def go_on_after(self, past: Iterable[torch.Tensor]) -> None:
        """Note what earlier slices of the sequence have left: it is theirs, and what it is joined to is saved in pieces."""
        self._is_later_slice = True
        self.borrow(past)

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that later slices of the sequence get: they cannot move, and stay until this slice's backward."""
        found = [storage for tensor in tensors for storage in storages_of(tensor)]
        self._left |= {address_of(storage): (StorageWeakRef(storage), storage.nbytes()) for storage in found}

    def lend(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note tensors that the next stage, on this rank, gets: they cannot move, because that stage may save them too."""
        keys = keys_of(tensors)
        self._lent = {group.saved[0].order for key, group in self._groups().items() if key in keys}

    def _is_borrowed(self, key: int) -> bool:
        return key in self._borrowed and not self._borrowed[key].expired()

    def _is_known(self, key: int) -> bool:
        """Return whether a storage is counted elsewhere, or as what later slices get."""
        return key in self._non_activations or key in self._left or self._is_borrowed(key)

    def contents(self, ours: Iterable[torch.Tensor] = (), leaving: Iterable[torch.Tensor] = ()) -> StashContents:
        """Look at the tensors that are saved now.

        Args:
            ours: tensors that the pipeline itself still holds, and returns to the user: they make a storage immovable, but
                it stays this microbatch's.
            leaving: tensors that the pipeline holds for a send that completes before the storage is emptied.
        """
        contents, by_functions, groups = StashContents(), self._kept_by_functions(), self._groups()
        kept, sent = num_tensors(ours), num_tensors(leaving)
        for storage, held in by_functions.values():
            contents.fix(storage)
            contents.unmovable.append(held)
        for key, group in groups.items():
            others = group.num_others - kept[key] - sent[key]
            if reason := self._non_activations.get(key) or ("a parameter" if _has_parameter(group) else None):
                contents.non_activations.append(_held(group, reason))
            elif others and self._is_borrowed(key):
                contents.borrowed_bytes += group.storage.nbytes()
            elif key in by_functions:
                continue
            elif any(saved.is_no_alias for saved in group.saved):
                contents.shared[key] = _held(group, "inside a tensor subclass whose detach() makes no alias")
            elif group.saved[0].order in self._lent or key in self._left:
                contents.fix(group.storage)
            elif others:
                contents.shared[key] = _held(group, f"owned {others} more time{'s' * (others > 1)} outside the graph")
            elif kept[key] or not group.is_resizable or self._is_elsewhere(group.device):
                contents.fix(group.storage)
            else:
                contents.movable.append(Movable(group.storage, group.saved, bool(sent[key])))
        for key, (reference, num_bytes) in self._left.items():  # also what this slice's graph has not saved
            if not (key in self._non_activations or self._is_borrowed(key) or reference.expired()):
                contents.fixed[key] = num_bytes
                contents.state_bytes += num_bytes
        return contents

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are saved now."""
        return [saved.tensor for saved in self._alive()]

    def _groups(self) -> dict[int, Group[Saved]]:
        """Group saved and not yet freed tensors by storage, in the order of saving."""
        return grouped(self._alive())

    def _alive(self) -> list[Saved]:
        """Return saved or cached and not yet freed tensors, in the order of saving."""
        alive = [saved for ref in self._saved if (saved := ref()) is not None]
        pairs = [(one.tensor(), one.version, one.guard()) for one in self.cached]
        alive += [_Taken(tensor, version, guard) for tensor, version, guard in pairs if tensor is not None and guard is not None]
        return sorted(alive, key=lambda saved: saved.order) if self.cached else alive

    def _kept_by_functions(self) -> dict[int, tuple[Storage, Held]]:
        """Return tensors that custom Functions, checkpointed regions or the user's hooks still keep, by storage."""
        found: dict[int, tuple[Storage, Held]] = {}
        for tensor, reason in [(tensor, one.reason) for one in (*self.kept, *self._packed) if (tensor := one.tensor()) is not None]:
            for storage in storages_of(tensor):
                if storage.nbytes() and not self._is_known(address_of(storage)):
                    found[address_of(storage)] = (storage, Held(shape_of(tensor), tensor.dtype, storage.nbytes(), reason))
        return found

    def _is_elsewhere(self, device: torch.device) -> bool:
        return self._device is not None and not is_on(device, self._device)

    def settle(self, contents: StashContents, num_parts: int) -> None:
        """Assign storages to parts, after a forward: those that are sent to the next stage are in the last part."""
        self._outputs = {entry.saved[0].order for entry in contents.movable if entry.is_output}
        if not self._is_cut:
            self.cuts = cuts_for(contents.movable, num_parts)

    def send_away(self, contents: StashContents, part: int) -> list[tuple[Storage, int]]:
        """Mark a part as away, and return its movable storages, each with the number of its owners."""
        entries = [entry for entry in contents.movable if part in (0, self._part_of(entry))]
        self._away[part] = [weakref.ref(saved.guard) for entry in entries for saved in entry.saved]
        self._mark(part, is_away=True)
        return [(entry.storage, len(entry.saved)) for entry in entries]

    def take_back(self, part: int) -> None:
        """Mark a part as back: its storages have their bytes again."""
        self._mark(part, is_away=False)
        del self._away[part]

    def _mark(self, part: int, *, is_away: bool) -> None:
        for saved in [saved for ref in self._away[part] if (saved := ref()) is not None]:
            saved.is_away = is_away

    def part_sizes(self, contents: StashContents) -> tuple[int, ...]:
        """Return the movable bytes of each part."""
        sizes = [0] * (len(self.cuts) + 1)
        for entry in contents.movable:
            sizes[self._part_of(entry) - 1] += entry.storage.nbytes()
        return tuple(sizes)

    def _part_of(self, entry: Movable) -> int:
        first = entry.saved[0].order
        return len(self.cuts) + 1 if first in self._outputs else self._part(first)

    def _part(self, order: int) -> int:
        return bisect_right(self.cuts, order) + 1


@contextmanager
def following(name: str) -> Iterator[None]:
    """Raise an error that says what to do if a forward uses a transform that refuses our saved-tensor hooks."""
    try:
        yield
    except RuntimeError as error:
        text = text_of(error)
        if "torch.func" not in text or "saved tensor hooks" not in text:
            raise
        raise StageError(
            f"{name} uses a transform of torch.func that refuses saved-tensor hooks, by which bpipe tracks the tensors that a "
            "microbatch saves: grad, vjp, jacrev or hessian. Use torch.autograd.grad(..., create_graph=True) or "
            "torch.autograd.functional in the stage; vmap, jvp and functional_call work."
        ) from error


def _held(group: Group[Saved], reason: str) -> Held:
    tensor = group.saved[0].tensor
    return Held(shape_of(tensor), tensor.dtype, group.storage.nbytes(), reason)


def is_on(one: torch.device, device: torch.device) -> bool:
    """Return whether a device is another one, which may have no index."""
    return one.type == device.type and (None in (one.index, device.index) or one.index == device.index)


def _has_parameter(group: Group[Saved]) -> bool:
    return any(isinstance(saved.tensor, torch.nn.Parameter) for saved in group.saved)


def cuts_for(movable: Sequence[Movable], num_parts: int) -> tuple[int, ...]:
    """Return the position where each part but the first begins, in the order of saving, so that all have about equally many bytes.

    There are fewer parts if a storage has the bytes of several.
    """
    total = sum(entry.storage.nbytes() for entry in movable)
    cuts: list[int] = []
    before = index = 0
    for entry in movable:
        size = entry.storage.nbytes()
        reached = min(num_parts - 1, (2 * before + size) * num_parts // (2 * total))  # ends of parts up to its middle
        if reached > index and before:
            cuts.append(entry.saved[0].order)
        before, index = before + size, max(index, reached)
    return tuple(cuts)
