"""The ledger: bytes live, evicted and held on a rank, action by action."""

from __future__ import annotations

from dataclasses import dataclass

from bpipe.memory.saved.footprint import Footprint
from bpipe.memory.saved.stash import StashContents
from bpipe.memory.saved.storages import Held
from bpipe.plan.amounts import show_bytes
from bpipe.plan.sizes import COLLECTED, GIVEN, Amount
from bpipe.schedules import Action

__all__: list[str] = []

MOST_SHOWN = 12  # storages

Key = tuple[int, int]  # stage, microbatch
Kind = tuple[int, str]  # stage, and a description of the microbatch's inputs


@dataclass(slots=True)
class Account:
    """The entry of one microbatch of a stage in the ledger."""

    kind: Kind  # its stage, and a description of its inputs
    footprint: Footprint | None = None  # its bytes; None until its forward has run
    taken_bytes: int = 0  # the bytes that it will free in the end
    is_followed: bool = False  # whether a stash followed its saved tensors, instead of a look at the graph after its forward
    is_measured: bool = False  # whether it was measured in this step
    is_unknown: bool = False  # whether its memory is unknown, because no step has seen one like it
    is_idle: bool = False  # whether no gradient came for it

    @property
    def known_footprint(self) -> Footprint:
        """Its footprint, once its forward has run."""
        assert self.footprint is not None, "the footprint is known after the forward"
        return self.footprint


class Ledger:
    """The bytes that one step keeps on one rank.

    Microbatches that were measured are entered with their own bytes; the others with the bytes of a measured one of their stage
    and shapes whose graph has as many nodes.
    """

    def __init__(self) -> None:
        self.live_bytes = 0  # without the held bytes
        self.peak_bytes = 0
        self.slots = 0
        self.peak_slots = 0
        self.host_bytes = 0  # copies in the host's memory, counted separately: on CPU that is the device's memory
        self.peak_host_bytes = 0
        self.evicted_bytes = 0
        self.loaded_bytes = 0
        self.accounts: dict[Key, Account] = {}
        self.held: list[Held] = []  # saved and not movable, of the microbatch followed last, with the reason
        self.non_activations: list[Held] = []  # saved, but not activations: parameters, buffers, the user's batch
        self._shared_bytes: dict[Kind, int] = {}

    def __repr__(self) -> str:
        if not self.accounts:
            return "Ledger(no step has run)"
        moved = f", evicted {show_bytes(self.evicted_bytes)}, loaded {show_bytes(self.loaded_bytes)}" if self.evicted_bytes else ""
        host = f", on the host at most {show_bytes(self.peak_host_bytes)}" if self.peak_host_bytes else ""
        held = f", {show_bytes(sum(one.num_bytes for one in self.held))} of a microbatch cannot move" if self.held else ""
        peak = f"at most {show_bytes(self.peak_bytes + self.held_bytes)} of activations, {self.peak_slots} microbatches"
        return f"Ledger({peak}{moved}{host}{held})"

    def __str__(self) -> str:
        largest = sorted(self.held, key=lambda one: -one.num_bytes)
        rows = [f"  {show_bytes(one.num_bytes):>9}  {list(one.shape)} {one.dtype}: {one.reason}" for one in largest[:MOST_SHOWN]]
        more = [f"  and {len(largest) - MOST_SHOWN} more in .held"] if len(largest) > MOST_SHOWN else []
        head = ["Cannot move, of the microbatch that was followed last, the largest first:"] if rows else []
        return "\n".join([repr(self), *head, *rows, *more])

    @property
    def footprints(self) -> dict[Key, Footprint]:
        """The footprint of each microbatch whose forward has run."""
        return {key: one.footprint for key, one in self.accounts.items() if one.footprint is not None}

    @property
    def held_bytes(self) -> int:
        """Bytes that microbatches share with each other or with the module, each kind of microbatch once."""
        return sum(self._shared_bytes.values())

    def seen(self, contents: StashContents) -> None:
        """Note which storages of a followed microbatch are immovable, shared or not activations."""
        self.held, self.non_activations = [*contents.unmovable, *contents.shared.values()], contents.non_activations

    def forward(self, account: Account, footprint: Footprint) -> None:
        """Enter a microbatch that ran forward, with its footprint."""
        account.footprint = footprint
        self._shared_bytes[account.kind] = footprint.shared_bytes
        self._change(footprint.own_bytes, 1)
        account.taken_bytes = footprint.own_bytes

    def left(self, num_bytes: int) -> None:
        """Count the state that a slice has left in the first of two forwards; no longer (negative), once the second has made it."""
        self._change(num_bytes, 0)

    def seen_again(self, account: Account, contents: StashContents, parts: tuple[int, ...]) -> None:
        """Update a footprint from another look: tensors that the module held during the forward may have no other owner by now."""
        account.footprint = account.known_footprint.seen_again(contents, parts)
        self._takes(account, account.footprint.own_bytes)

    def backward_input(self, account: Account, between_bytes: int | None) -> None:
        """Note the bytes that `backward_input` leaves for `backward_weight`; None if they were not counted."""
        account.footprint = account.known_footprint._replace(between_bytes=between_bytes)
        if between_bytes is not None:
            self._takes(account, between_bytes)

    def handed_back(self, account: Account, given_bytes: int, collected_bytes: int) -> None:
        """Count the first gradients that a slice gives to states of earlier ones, and forget those that came for its own state."""
        known = account.known_footprint
        amounts = [one for one in known.amounts if one.name not in (GIVEN, COLLECTED)]
        amounts += [Amount(GIVEN, given_bytes), Amount(COLLECTED, collected_bytes)]
        account.footprint = known._replace(amounts=tuple(amounts))
        self._change(given_bytes, 0)
        self._change(-collected_bytes, 0)

    def _takes(self, account: Account, num_bytes: int) -> None:
        """Set the bytes that a microbatch takes from now on."""
        self._change(num_bytes - account.taken_bytes, 0)
        account.taken_bytes = num_bytes

    def backward(self, account: Account) -> None:
        """Remove a microbatch whose backward, or `backward_weight`, has run and freed its memory."""
        self._change(-account.taken_bytes, -1)
        account.taken_bytes = 0

    def evicted(self, action: Action, num_bytes: int) -> None:
        """Subtract the evicted bytes of a microbatch, or of a part of it."""
        self.evicted_bytes += num_bytes
        self._change(-num_bytes, -(not action.part))

    def loading(self, action: Action, num_bytes: int) -> None:
        """Add the bytes that were allocated for a part that is loaded back."""
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
