"""The acceptor's rooms: memory for the microbatches of one evictor, reserved once and used again and again."""

from __future__ import annotations

import torch

__all__: list[str] = []


class Rooms:
    """Rooms for one evictor, as many as the plan says.

    They are reserved together at the first arrival and touched once, because fresh pages cost more than the transfer; a
    room grows when a larger microbatch arrives.

    Args:
        count: how many rooms the plan reserves.
        device: where they lie.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._free = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(count)]
        self._taken: dict[tuple[int, int], torch.Tensor] = {}

    @property
    def num_bytes(self) -> int:
        """The bytes of all rooms, free ones too."""
        return sum(room.numel() for room in (*self._free, *self._taken.values()))

    def take(self, guest: tuple[int, int], sizes: list[int]) -> list[torch.Tensor]:
        """Give a (stage, microbatch) a room and return its parts, uint8 [size] each."""
        total = sum(sizes)
        for index, room in enumerate(self._free):
            if room.numel() < total:
                self._free[index] = room.new_empty(0)
                del room  # the old room's memory is given back before the new one takes its own
                self._free[index] = _touched(total, self._free[index].device)
        room = self._taken[guest] = self._free.pop()
        return list(room[:total].split(sizes)) if sizes else []

    def leave(self, guest: tuple[int, int]) -> None:
        """Free a guest's room for the next one."""
        self._free.append(self._taken.pop(guest))

    def clear(self) -> None:
        """Give all rooms' memory back."""
        self._free.clear()
        self._taken.clear()


def _touched(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device).fill_(0)
