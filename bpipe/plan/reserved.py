"""Assign an evictor's remote activations to the buffers that an acceptor reserves for them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bpipe.plan.action import Action, Op, PartKey
from bpipe.plan.meter import SizeOf, slot

__all__: list[str] = []


class Reserved(NamedTuple):
    """Buffers for one evictor."""

    sizes: tuple[int, ...]  # the size of each buffer
    # the index of the buffer of each remote activation; no two remote activations are in one at once
    buffer_of: Mapping[PartKey, int]


def reserve(chain: Iterable[Action], moved: SizeOf = slot) -> Reserved:
    """Reserve the buffers that an acceptor needs for one evictor's remote activations in their order.

    A remote activation takes the smallest free buffer that is large enough, else the largest free one, which grows, else a new one.
    """
    sizes: list[int] = []
    free: list[tuple[int, int, int]] = []  # size, when it was freed (the latest first, whose memory is warm) and index; sorted
    buffer_of: dict[PartKey, int] = {}
    for turn, action in enumerate(chain):
        remote = action[1:4]  # a tuple's slice: plans have millions of actions
        if action[0] is Op.ACCEPT:
            size = moved(action)
            index = _choose(free, size)
            if index is None:
                index = len(sizes)
                sizes.append(0)
            sizes[index] = max(sizes[index], size)
            buffer_of[remote] = index
        elif action[0] is Op.WAIT_RETURN and remote in buffer_of:
            insort(free, (sizes[buffer_of[remote]], -turn, buffer_of[remote]))
    return Reserved(tuple(sizes), buffer_of)


def _choose(free: list[tuple[int, int, int]], size: int) -> int | None:
    """Take the free buffer that a remote activation goes into; return None if none is free."""
    if not free:
        return None
    largest = free[-1][0]
    return free.pop(bisect_left(free, (min(size, largest),)))[2]
