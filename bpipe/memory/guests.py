"""The acceptor's rooms: memory for the microbatches of one evictor, reserved once and used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.schedules.sizes import choose_room

__all__: list[str] = []

Guest = tuple[int, int, int]  # stage, microbatch, part


class Rooms:
    """Rooms for one evictor, as many as the plan says.

    They are reserved together at the first arrival and touched once, because fresh pages cost more than the transfer; a
    room grows when a larger guest arrives.

    Args:
        sizes: bytes of each room that the plan reserves; 0 where it counts slots.
        device: where they lie.
        is_pinned: whether they are pinned memory of the host, which a GPU copies to and from by itself.
        may_grow: whether there may be more rooms than planned.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device, *, is_pinned: bool = False, may_grow: bool = False) -> None:
        self._device, self._is_pinned, self._may_grow = device, is_pinned, may_grow
        self._planned = list(sizes)
        self._rooms = [self._new(0) for _ in sizes]
        self._free = list(range(len(sizes)))
        self._taken: dict[Guest, int] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all rooms, free ones too."""
        return sum(room.numel() for room in self._rooms)

    def take(self, guest: Guest, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Give a guest a room and return its parts, uint8 [size] each."""
        total = sum(sizes)
        self._reserve(total if not any(self._planned) else 0)
        room = choose_room([one.numel() for one in self._rooms], self._free, total)
        if room is None:
            assert self._may_grow, f"no room is free for {guest}: the plan reserves {len(self._rooms)}"
            room = len(self._rooms)
            self._rooms.append(self._new(0))
            self._planned.append(0)
            self._free.append(room)
        self._grow(room, total)
        self._free.remove(room)
        self._taken[guest] = room
        return list(self._rooms[room][:total].split(list(sizes))) if sizes else []

    def _reserve(self, at_least: int) -> None:
        """Give every free room what the plan says, or where that counts slots what this guest needs."""
        for room in self._free:
            self._grow(room, max(at_least, self._planned[room]))

    def _grow(self, room: int, num_bytes: int) -> None:
        if self._rooms[room].numel() < num_bytes:
            self._rooms[room] = self._new(0)  # the old memory is given back before the new is taken
            self._rooms[room] = self._new(num_bytes).fill_(0)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned)

    def leave(self, guest: Guest) -> None:
        """Free a guest's room for the next one."""
        self._free.append(self._taken.pop(guest))

    def clear(self) -> None:
        """Give all rooms' memory back."""
        self._rooms.clear()
        self._free.clear()
        self._taken.clear()
