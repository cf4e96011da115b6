"""Follow what autograd saves for one microbatch of one stage, and say what of it may move.

The graph owns what it saves; the stash only looks on, through weak references, so that a backward still frees memory as it
goes. A storage may move if the saved tensors are its only owners: then nobody can touch it while it is empty.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from bpipe.errors import SavedTensorError
from bpipe.memory.storages import Held, Storage, keys_of, owners, storages_of

__all__: list[str] = []


class Saved:
    """What a saved-tensor hook hands to autograd: an alias of the tensor, and its version when it was saved."""

    __slots__ = ("__weakref__", "tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if isinstance(tensor, torch.nn.Parameter) else tensor.detach()
        self.version = tensor._version


@dataclass
class Contents:
    """The storages of a microbatch: those that may move, in the order of their saving, and those that cannot."""

    movable: list[tuple[Storage, int]] = field(default_factory=list)  # each with the number of its saved tensors
    fixed_bytes: int = 0  # this microbatch's alone, and yet not movable
    shared: dict[int, Held] = field(default_factory=dict)  # owned by others too, by storage
    foreign: list[Held] = field(default_factory=list)  # parameters, buffers and the user's batch: not activations

    @property
    def movable_bytes(self) -> int:
        return sum(storage.nbytes() for storage, _ in self.movable)

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
    """

    def __init__(self, name: str, foreign: Mapping[int, str]) -> None:
        self.name = name
        self._foreign = foreign
        self._saved: list[weakref.ref[Saved]] = []
        self._is_away = False

    def capture(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which everything that autograd saves is followed."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Saved:
        saved = Saved(tensor)
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Saved) -> torch.Tensor:
        self._check_unchanged(saved)
        if self._is_away:
            raise SavedTensorError(
                f"a saved tensor of {self.name} was used while its bytes were on another rank. "
                "Run no backward of your own through a stage between its forward and its backward."
            )
        return saved.tensor

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
            SavedTensorError: a saved tensor was modified in place.
        """
        alive = [saved for ref in self._saved if (saved := ref()) is not None]
        storages: dict[int, Storage] = {}
        aliases: Counter[int] = Counter()
        example: dict[int, torch.Tensor] = {}
        for saved in alive:
            self._check_unchanged(saved)
            for storage in storages_of(saved.tensor):
                storages[storage._cdata] = storage
                aliases[storage._cdata] += 1
                example.setdefault(storage._cdata, saved.tensor)
        parameters = keys_of(saved.tensor for saved in alive if isinstance(saved.tensor, torch.nn.Parameter))
        kept, sent = _count(ours), _count(leaving)
        contents = Contents()
        for key, storage in storages.items():
            if not storage.nbytes():
                continue
            others = owners(storage) - aliases[key] - kept[key] - sent[key]
            held = Held(tuple(example[key].shape), example[key].dtype, storage.nbytes(), "")
            if key in self._foreign or key in parameters:
                contents.foreign.append(held._replace(reason=self._foreign.get(key, "a parameter")))
            elif others:
                contents.shared[key] = held._replace(reason=f"owned by {others} more tensor{'s' * (others > 1)} outside the graph")
            elif kept[key] or not storage.resizable():
                contents.fixed_bytes += storage.nbytes()
            else:
                contents.movable.append((storage, aliases[key]))
        return contents

    def mark(self, *, away: bool) -> None:
        """Say whether the movable storages are empty."""
        self._is_away = away


def _count(tensors: Iterable[torch.Tensor]) -> Counter[int]:
    return Counter(storage._cdata for tensor in tensors for storage in storages_of(tensor))
