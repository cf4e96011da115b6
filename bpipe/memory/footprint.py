"""The bytes that one microbatch takes on one stage, as a look at what it saved found them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import NamedTuple

from bpipe.memory.stash import Contents
from bpipe.schedules.sizes import StageSizes

__all__: list[str] = []


class Footprint(NamedTuple):
    """The bytes one microbatch takes on one stage."""

    own_bytes: int  # given back by its backward
    movable_bytes: int  # of these, what an eviction frees
    shared_bytes: int  # saved, and owned by others too: counted once for all microbatches of the kind
    parts: tuple[int, ...] = ()  # what of the movable ones each part has, if it moves in parts
    received_bytes: int = 0  # the message from the stage before
    sent_bytes: int = 0  # the message to the stage after
    kept_received_bytes: int = 0  # what of the messages is among its own
    kept_sent_bytes: int = 0
    between_bytes: int | None = None  # what stays between the halves of its backward, once that is known

    def seen_again(self, contents: Contents, parts: tuple[int, ...]) -> Footprint:
        """The same microbatch as another look found it."""
        own, movable, shared = footprint_of(contents)[:3]
        return self._replace(own_bytes=own, movable_bytes=movable, shared_bytes=shared, parts=parts)

    def saved_by(self, part: int) -> int:
        """What a piece of its forward saves: a part, if it has as many, and with the first what cannot move."""
        return sum(self.parts[part - 1 : part]) + (self.own_bytes - self.movable_bytes) * (part == 1)

    def sizes(self, num_parts: int = 0) -> StageSizes:
        """As a plan counts them.

        Args:
            num_parts: of the plan, which may have been made of a microbatch with more or fewer; 0 for as many as there are.
        """
        parts = self.parts or (self.movable_bytes,)
        if num_parts:
            parts = (*parts[: num_parts - 1], sum(parts[num_parts - 1 :]), *[0] * (num_parts - 1 - len(parts)))
        return StageSizes(
            parts=parts,
            fixed=self.own_bytes - self.movable_bytes,
            received=self.received_bytes,
            sent=self.sent_bytes,
            kept_received=min(self.kept_received_bytes, self.own_bytes),
            kept_sent=min(self.kept_sent_bytes, self.own_bytes),
            between=self.between_bytes,
        )


def footprint_of(contents: Contents) -> Footprint:
    """The bytes that a look at a microbatch found."""
    shared = sum(held.num_bytes for held in contents.shared.values())
    return Footprint(contents.own_bytes, contents.movable_bytes, shared)


def covering(footprints: Iterable[Footprint]) -> StageSizes:
    """Sizes within which each of some microbatches of a stage stays; those of one, if they are alike."""
    return largest_of(footprint.sizes() for footprint in set(footprints))


def largest_of(some: Iterable[StageSizes]) -> StageSizes:
    """Sizes that cover all of some."""
    sizes = list(some)
    is_halved = any(one.between is not None for one in sizes)
    return StageSizes(
        parts=tuple(max(column) for column in zip_longest(*(one.parts for one in sizes), fillvalue=0)),
        fixed=max(one.fixed for one in sizes),
        received=max(one.received for one in sizes),
        sent=max(one.sent for one in sizes),
        kept_received=min(one.kept_received for one in sizes),
        kept_sent=min(one.kept_sent for one in sizes),
        between=max(one.late for one in sizes) if is_halved else None,
    )
