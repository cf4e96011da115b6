"""The acceptor's rooms: memory for the microbatches of one evictor, reserved once and used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bpipe.schedules.rooms import Guest, Reserved

__all__: list[str] = []


class Rooms:
    """Rooms for one evictor, as the plan reserves them.

    They are allocated together at the first arrival and touched once, because fresh pages cost more than the transfer; a room
    grows when a guest is larger than planned.

    Args:
        reserved: which guest is in which room, and the size of each room.
        device: where they lie.
        in_bytes: whether sizes are bytes; where the plan counts slots, all rooms are made as large as the first guest.
        is_pinned: whether they are pinned memory of the host, which a GPU copies to and from by itself.
    """

    def __init__(self, reserved: Reserved, device: torch.device, *, in_bytes: bool, is_pinned: bool = False) -> None:
        self._reserved, self._device, self._in_bytes, self._is_pinned = reserved, device, in_bytes, is_pinned
        self._rooms = [self._new(0) for _ in reserved.sizes]

    @property
    def num_bytes(self) -> int:
        """The bytes of all rooms, free ones too."""
        return sum(room.numel() for room in self._rooms)

    def take(self, guest: Guest, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Give a guest its room and return its parts, uint8 [size] each."""
        room, total = self._reserved.room_of[guest], sum(sizes)
        if not self.num_bytes:
            for index, planned in enumerate(self._reserved.sizes):
                self._grow(index, planned if self._in_bytes else total)
        self._grow(room, total)
        return list(self._rooms[room][:total].split(list(sizes))) if sizes else []

    def _grow(self, room: int, num_bytes: int) -> None:
        if self._rooms[room].numel() < num_bytes:
            self._rooms[room] = self._new(0)  # the old memory is given back before the new is taken
            self._rooms[room] = self._new(num_bytes).fill_(0)

    def _new(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=self._is_pinned)

    def clear(self) -> None:
        """Give all rooms' memory back."""
        self._rooms = [self._new(0) for _ in self._rooms]
