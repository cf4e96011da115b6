"""The rooms that an acceptor reserves for one evictor's guests, and which guest is in which."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bpipe.plan.action import Action, Op, PartKey
from bpipe.plan.meter import Amount, slot

__all__: list[str] = []


class Reserved(NamedTuple):
    """Rooms for one evictor.

    Args:
        sizes: the size of each room.
        room_of: the room of each guest; no two guests are in one at once.
    """

    sizes: tuple[int, ...]
    room_of: Mapping[PartKey, int]


def reserve(chain: Iterable[Action], moved: Amount = slot) -> Reserved:
    """Reserve the rooms that an acceptor needs for one evictor's guests in their order.

    A guest takes the smallest free room that is large enough, else the largest free one, which grows, else a new one.
    """
    sizes: list[int] = []
    free: list[int] = []
    room_of: dict[PartKey, int] = {}
    for action in chain:
        guest = action[1:4]
        if action[0] is Op.ACCEPT:
            size = moved(action)
            room = _choose(sizes, free, size)
            if room is None:
                room = len(sizes)
                sizes.append(0)
            else:
                free.remove(room)
            sizes[room] = max(sizes[room], size)
            room_of[guest] = room
        elif action[0] is Op.WAIT_RETURN and guest in room_of:
            free.append(room_of[guest])
    return Reserved(tuple(sizes), room_of)


def _choose(sizes: list[int], free: list[int], size: int) -> int | None:
    """Choose the free room that a guest takes; return None if no room is free."""
    latest_first = free[::-1]  # its memory is warm
    fitting = [room for room in latest_first if sizes[room] >= size]
    if fitting:
        return min(fitting, key=sizes.__getitem__)
    return max(latest_first, key=sizes.__getitem__, default=None)
