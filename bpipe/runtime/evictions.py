"""The evictor's side: follow what microbatches save, hand it to the acceptor, and get it back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch

from bpipe.comm import header
from bpipe.comm.transport import Transfer
from bpipe.memory.bundle import Bundle
from bpipe.memory.guests import Guest, Rooms
from bpipe.memory.host import HostRooms
from bpipe.memory.ledger import Footprint, Key, Kind, Ledger, footprint_of
from bpipe.memory.stash import Stash
from bpipe.runtime.traffic import Traffic
from bpipe.schedules import Action
from bpipe.schedules.action import HOST

__all__: list[str] = []

REMEMBERED_KINDS = 1024  # of microbatches, by stage and shapes


@dataclass
class Memory:
    """What a schedule remembers from step to step: measured footprints, the rooms for guests, and those in the host's memory."""

    profile: dict[Kind, Footprint] = field(default_factory=dict)
    cuts: dict[Kind, tuple[int, ...]] = field(default_factory=dict)  # where the parts of a microbatch begin
    rooms: dict[int, Rooms] = field(default_factory=dict)  # by evictor
    host_rooms: HostRooms | None = None

    def host(self, device: torch.device) -> HostRooms:
        """The rooms in this rank's host memory, made when first used."""
        if self.host_rooms is None:
            self.host_rooms = HostRooms(device)
        return self.host_rooms

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
        self._bundles: dict[Guest, Bundle] = {}
        self._landing: dict[Guest, list[torch.Tensor]] = {}

    def follow(self, key: Key, shapes: str) -> Stash | None:
        """A stash for a microbatch that will be evicted, or is the first of its stage with these shapes; else nothing."""
        kind = self._kinds[key] = (key[0], shapes)
        if key not in self._evicted and kind in self._memory.profile:
            return None
        cuts = self._memory.cuts.get(kind, ())
        return Stash(f"microbatch {key[1]} of stage {key[0]}", self._find_foreign(), self._traffic.transport.device, cuts)

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
        bundle = self._bundles[action[1:4]] = Bundle(stash.of_part(contents, action.part), stash.name)
        self.ledger.leaving(action, bundle.num_bytes)
        stash.mark(action.part, away=True)
        if action.peer == HOST:
            transfer: Transfer = self._memory.host(traffic.transport.device).store(action[1:4], bundle.messages())
        else:
            data = header.pack_eviction(traffic.subject(*key), action.part, bundle.message_sizes)
            transfer = traffic.transport.send(traffic.channel(action), bundle.messages(), data)
        traffic.posted(action, transfer)

    def complete_evict(self, action: Action) -> None:
        self._traffic.wait(action)
        bundle = self._bundles[action[1:4]]
        bundle.empty()
        self.ledger.evicted(action, bundle.num_bytes)

    def load(self, action: Action) -> None:
        self.ledger.loading(action)
        messages = self._landing[action[1:4]] = self._bundles[action[1:4]].refill()
        if action.peer == HOST:
            transfer: Transfer = self._memory.host(self._traffic.transport.device).fetch(action[1:4], messages)
        else:
            transfer = self._traffic.transport.receive(self._traffic.channel(action), messages)
        self._traffic.posted(action, transfer)

    def complete_load(self, action: Action) -> None:
        self._traffic.wait(action)
        self._bundles.pop(action[1:4]).scatter(self._landing.pop(action[1:4]))
        self._stashes[action[1:3]].mark(action.part, away=False)
        self.ledger.loaded(action)
