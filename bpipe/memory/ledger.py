"""The ledger: bytes live, evicted and held on a rank, action by action, and the peak that the plan predicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bpipe.memory.stash import Contents
from bpipe.memory.storages import Held
from bpipe.schedules import Action
from bpipe.schedules.action import HOST
from bpipe.schedules.sizes import meter_of, occupancy

__all__: list[str] = []

Key = tuple[int, int]  # stage, microbatch
Kind = tuple[int, str]  # stage, and what its microbatch looks like: those of a kind take the same memory


class Footprint(NamedTuple):
    """The bytes one microbatch takes on one stage."""

    own_bytes: int  # given back by its backward
    movable_bytes: int  # of these, what an eviction frees
    shared_bytes: int  # saved, and owned by others too: counted once for all microbatches of the kind


class Ledger:
    """What one step keeps on one rank.

    Microbatches that were followed are entered with their own bytes; those that the plan leaves alone with the bytes of the
    measured microbatch of their stage and shapes.
    """

    def __init__(self) -> None:
        self.live_bytes = 0  # without what is held
        self.peak_bytes = 0
        self.slots = 0
        self.peak_slots = 0
        self.evicted_bytes = 0
        self.loaded_bytes = 0
        self.footprints: dict[Key, Footprint] = {}
        self.held: list[Held] = []  # saved and not movable, of the microbatch followed last, with the reason
        self.foreign: list[Held] = []  # saved and no activation: parameters, buffers, the user's batch
        self._shared_bytes: dict[Kind, int] = {}
        self._away: dict[tuple[int, int, int], int] = {}  # by stage, microbatch and part
        self.host_bytes = 0  # of this rank's own microbatches in its host's memory: a column of its own
        self.host_peak_bytes = 0

    @property
    def held_bytes(self) -> int:
        """Bytes of what microbatches share with each other or with the module, each kind of microbatch once."""
        return sum(self._shared_bytes.values())

    def seen(self, contents: Contents) -> None:
        """A followed microbatch was looked at."""
        self.held, self.foreign = list(contents.shared.values()), contents.foreign

    def forward(self, key: Key, kind: Kind, footprint: Footprint) -> None:
        """A microbatch ran forward and keeps its footprint."""
        self.footprints[key] = footprint
        self._shared_bytes[kind] = footprint.shared_bytes
        self._change(footprint.own_bytes, 1)

    def seen_again(self, key: Key, footprint: Footprint) -> None:
        """What the module had kept hold of during the forward may be the microbatch's alone by now."""
        away = sum(num_bytes for (*which, _), num_bytes in self._away.items() if tuple(which) == key)
        footprint = footprint._replace(own_bytes=footprint.own_bytes + away, movable_bytes=footprint.movable_bytes + away)
        self._change(footprint.own_bytes - self.footprints[key].own_bytes, 0)
        self.footprints[key] = footprint

    def backward(self, key: Key) -> None:
        """A microbatch ran backward and gave its memory back."""
        self._change(-self.footprints[key].own_bytes, -1)

    def leaving(self, action: Action, num_bytes: int) -> None:
        """The bytes of an eviction are about to be copied."""
        if action.peer == HOST:
            self.host_bytes += num_bytes
            self.host_peak_bytes = max(self.host_peak_bytes, self.host_bytes)

    def evicted(self, action: Action, num_bytes: int) -> None:
        """A microbatch's bytes, or a part of them, have left."""
        self._away[action[1:4]] = num_bytes
        self.evicted_bytes += num_bytes
        self._change(-num_bytes, -(not action.part))

    def loading(self, action: Action) -> None:
        """Memory for what returns was allocated."""
        num_bytes = self._away[action[1:4]]
        self.loaded_bytes += num_bytes
        self._change(num_bytes, not action.part)

    def loaded(self, action: Action) -> None:
        """What was away is back."""
        num_bytes = self._away.pop(action[1:4])
        if action.peer == HOST:
            self.host_bytes -= num_bytes

    def _change(self, num_bytes: int, slots: int) -> None:
        self.live_bytes += num_bytes
        self.slots += slots
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_slots = max(self.peak_slots, self.slots)


def footprint_of(contents: Contents) -> Footprint:
    """The bytes that a look at a microbatch found."""
    shared = sum(held.num_bytes for held in contents.shared.values())
    return Footprint(contents.own_bytes, contents.movable_bytes, shared)


def predicted_peak_bytes(actions: Iterable[Action], footprints: Mapping[Key, Footprint]) -> int:
    """The most bytes a rank's own microbatches occupy: a scan of its list, in bytes instead of slots."""

    meter = meter_of(lambda action: footprints[action[1:3]].own_bytes, lambda action: footprints[action[1:3]].movable_bytes)
    return max(occupancy(actions, meter), default=0)
