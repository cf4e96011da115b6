"""The evictor's side: follow what microbatches save, hand it to the acceptor, and get it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from bpipe.comm import header
from bpipe.memory.bundle import Bundle
from bpipe.memory.guests import Rooms
from bpipe.memory.ledger import Footprint, Key, Kind, Ledger, footprint_of
from bpipe.memory.stash import Stash
from bpipe.runtime.traffic import Traffic
from bpipe.schedules import Action

__all__: list[str] = []

REMEMBERED_KINDS = 1024  # of microbatches, by stage and shapes


@dataclass
class Memory:
    """What a schedule remembers from step to step: measured footprints and the rooms for guests."""

    profile: dict[Kind, Footprint] = field(default_factory=dict)
    rooms: dict[int, Rooms] = field(default_factory=dict)  # by evictor

    def learn(self, kind: Kind, footprint: Footprint) -> None:
        """Remember the latest microbatch of a kind that was followed, and forget the oldest kind when there are too many."""
        self.profile[kind] = footprint
        if len(self.profile) > REMEMBERED_KINDS:
            del self.profile[next(iter(self.profile))]

    @property
    def guest_bytes(self) -> int:
        return sum(rooms.num_bytes for rooms in self.rooms.values())


class Evictions:
    """The saved tensors of one rank's microbatches during one step.

    Args:
        traffic: this rank's transfers.
        evicted: the microbatches that the plan evicts.
        memory: footprints measured so far; a first microbatch with new shapes adds to them.
        find_foreign: finds storages that are no activations, and what they are.
        kept: the tensors that the step will return to the user.
    """

    def __init__(
        self,
        traffic: Traffic,
        evicted: Iterable[Key],
        memory: Memory,
        find_foreign: Callable[[], dict[int, str]],
        kept: Callable[[], list[torch.Tensor]],
    ) -> None:
        self.ledger = Ledger()
        self._traffic, self._evicted, self._memory = traffic, set(evicted), memory
        self._find_foreign, self._kept = find_foreign, kept
        self._kinds: dict[Key, Kind] = {}
        self._first: dict[Kind, Footprint] = {}
        self._stashes: dict[Key, Stash] = {}
        self._bundles: dict[Key, Bundle] = {}
        self._landing: dict[Key, list[torch.Tensor]] = {}

    def follow(self, key: Key, shapes: str) -> Stash | None:
        """A stash for a microbatch that will be evicted, or is the first of its stage with these shapes; else nothing."""
        self._kinds[key] = (key[0], shapes)
        if key not in self._evicted and self._kinds[key] in self._memory.profile:
            return None
        return Stash(f"microbatch {key[1]} of stage {key[0]}", self._find_foreign(), self._traffic.transport.device)

    def after_forward(self, key: Key, stash: Stash | None) -> None:
        """Enter a microbatch in the ledger: as it was found, or as measured before."""
        kind = self._kinds[key]
        if stash is not None:
            contents = stash.contents(self._kept(), self._traffic.holds())
            self._memory.learn(kind, footprint_of(contents))
            self.ledger.seen(contents)
            if key in self._evicted:
                self._stashes[key] = stash
        self.ledger.forward(key, kind, self._memory.profile[kind])
        self._first.setdefault(kind, self._memory.profile[kind])

    def predicted(self) -> dict[Key, Footprint]:
        """The footprint of each microbatch, if it is like the first of its kind in this step."""
        return {key: self._first[kind] for key, kind in self._kinds.items()}

    def after_backward(self, key: Key) -> None:
        self._stashes.pop(key, None)
        self.ledger.backward(key)

    def evict(self, action: Action) -> None:
        key, traffic = action[1:3], self._traffic
        stash = self._stashes[key]
        contents = stash.contents(self._kept(), traffic.holds())
        self.ledger.seen_again(key, footprint_of(contents))
        bundle = self._bundles[key] = Bundle(contents.movable, stash.name)
        data = header.pack_eviction(traffic.subject(*key), bundle.message_sizes)
        stash.mark(away=True)
        traffic.posted(action, traffic.transport.send(traffic.channel(action), bundle.messages(), data))

    def complete_evict(self, action: Action) -> None:
        key = action[1:3]
        self._traffic.wait(action)
        self._bundles[key].empty()
        self.ledger.evicted(key, self._bundles[key].num_bytes)

    def load(self, action: Action) -> None:
        key = action[1:3]
        self.ledger.loading(key)
        messages = self._landing[key] = self._bundles[key].refill()
        self._traffic.posted(action, self._traffic.transport.receive(self._traffic.channel(action), messages))

    def complete_load(self, action: Action) -> None:
        key = action[1:3]
        self._traffic.wait(action)
        self._bundles.pop(key).scatter(self._landing.pop(key))
        self._stashes[key].mark(away=False)
