"""The ledger: bytes live, evicted and held on a rank, action by action."""

from __future__ import annotations

from bpipe.memory.saved.footprint import Footprint
from bpipe.memory.saved.stash import Contents
from bpipe.memory.saved.storages import Held
from bpipe.schedules import Action

__all__: list[str] = []

Key = tuple[int, int]  # stage, microbatch
Kind = tuple[int, str]  # stage, and what its microbatch looks like


class Ledger:
    """The bytes that one step keeps on one rank.

    Microbatches that were looked at are entered with their own bytes; the others with the bytes of a measured one of their stage
    and shapes whose graph has as many nodes.
    """

    def __init__(self) -> None:
        self.live_bytes = 0  # without what is held
        self.peak_bytes = 0
        self.slots = 0
        self.peak_slots = 0
        self.host_bytes = 0  # copies in the host's memory, in a column of their own: on CPU that is the device's
        self.peak_host_bytes = 0
        self.evicted_bytes = 0
        self.loaded_bytes = 0
        self.footprints: dict[Key, Footprint] = {}
        self.held: list[Held] = []  # saved and not movable, of the microbatch followed last, with the reason
        self.foreign: list[Held] = []  # saved and no activation: parameters, buffers, the user's batch
        self._taken: dict[Key, int] = {}  # what each microbatch gives back in the end
        self._in_pieces: dict[Key, int] = {}  # what pieces of a forward or a backward that runs took, or gave back
        self._shared_bytes: dict[Kind, int] = {}
        self._away: dict[tuple[int, int, int], int] = {}  # by stage, microbatch and part

    @property
    def held_bytes(self) -> int:
        """Bytes of what microbatches share with each other or with the module, each kind of microbatch once."""
        return sum(self._shared_bytes.values())

    def seen(self, contents: Contents) -> None:
        """Note what a look at a followed microbatch found unmovable, shared or foreign."""
        self.held, self.foreign = [*contents.unmovable, *contents.shared.values()], contents.foreign

    def forward(self, key: Key, kind: Kind, footprint: Footprint) -> None:
        """Enter a microbatch that ran forward, with its footprint."""
        self.footprints[key] = footprint
        self._shared_bytes[kind] = footprint.shared_bytes
        self._taken[key] = footprint.own_bytes
        self._change(footprint.own_bytes - self._in_pieces.pop(key, 0), 1)

    def piece(self, key: Key, num_bytes: int) -> None:
        """Count the bytes that a piece of a forward took, or that a piece of a backward gave back (negative)."""
        self._in_pieces[key] = self._in_pieces.get(key, 0) + num_bytes
        self._change(num_bytes, 0)

    def seen_again(self, key: Key, contents: Contents, parts: tuple[int, ...]) -> None:
        """Update a footprint from another look: what the module held during the forward may be the microbatch's alone by now."""
        self.footprints[key] = self.footprints[key].seen_again(contents, parts)
        self._takes(key, self.footprints[key].own_bytes)

    def input_half(self, key: Key, between_bytes: int | None) -> None:
        """Note the bytes that the first half of a microbatch's backward left to the second one; None: nobody looked."""
        self.footprints[key] = self.footprints[key]._replace(between_bytes=between_bytes)
        if between_bytes is not None:
            self._takes(key, between_bytes)

    def _takes(self, key: Key, num_bytes: int) -> None:
        """Set the bytes that a microbatch takes from now on."""
        self._change(num_bytes - self._taken[key], 0)
        self._taken[key] = num_bytes

    def backward(self, key: Key) -> None:
        """Remove a microbatch whose backward, or the second half of it, ran and gave its memory back."""
        self._change(-self._taken.pop(key) - self._in_pieces.pop(key, 0), -1)

    def evicted(self, action: Action, num_bytes: int) -> None:
        """Subtract the evicted bytes of a microbatch, or of a part of it."""
        self._away[action[1:4]] = num_bytes
        self.evicted_bytes += num_bytes
        self._change(-num_bytes, -(not action.part))

    def loading(self, action: Action) -> None:
        """Add the bytes that were allocated for what returns."""
        num_bytes = self._away.pop(action[1:4])
        self.loaded_bytes += num_bytes
        self._change(num_bytes, not action.part)

    def stored(self, num_bytes: int) -> None:
        """Count a copy in the host's memory that began, or that is no longer needed (negative)."""
        self.host_bytes += num_bytes
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)

    def _change(self, num_bytes: int, slots: int) -> None:
        self.live_bytes += num_bytes
        self.slots += slots
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.peak_slots = max(self.peak_slots, self.slots)
