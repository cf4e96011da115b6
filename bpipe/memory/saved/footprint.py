"""The bytes that one microbatch takes on one stage, measured from what it saved."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from bpipe.memory.saved.stash import StashContents
from bpipe.memory.saved.storages import MessageBytes
from bpipe.plan.sizes import SkipSizes, StageSizes, gradients_are_collected

__all__: list[str] = []


class Footprint(NamedTuple):
    """The bytes that one microbatch takes on one stage."""

    own_bytes: int  # freed by its backward
    movable_bytes: int  # of these, the bytes that an eviction frees
    shared_bytes: int  # saved, but with other owners too: counted once for all microbatches of the kind
    parts: tuple[int, ...] = ()  # the movable bytes of each part, if it moves in parts
    received_bytes: int = 0  # the message from the previous stage
    sent_bytes: int = 0  # the message to the next stage
    kept_received_bytes: int = 0  # the bytes of the messages that are also own bytes
    kept_sent_bytes: int = 0
    between_bytes: int | None = None  # the bytes kept between backward_input and backward_weight, once known
    # Of a slice, once its backward has run: the bytes of the first gradients that it gives to states of earlier slices, and of the
    # gradients that later slices have given to its own state.
    given_bytes: int = 0
    collected_bytes: int = 0
    state_bytes: int = 0  # the own bytes that later slices read
    results_bytes: int = 0  # what a stage with a loss of its own makes beside its message, and the part that is among the own bytes
    kept_results_bytes: int = 0
    skips: tuple[SkipSizes, ...] = ()  # what it hands on to later stages than the next, and gets from earlier ones

    def seen_again(self, contents: StashContents, parts: tuple[int, ...]) -> Footprint:
        """Return the same microbatch's footprint, with the bytes that another look found."""
        own, movable, shared = footprint_of(contents)[:3]
        return self._replace(own_bytes=own, movable_bytes=movable, shared_bytes=shared, parts=parts)

    @property
    def num_bytes(self) -> int:
        """All bytes that it saved, including shared ones: equal for equal microbatches, at any position in a step."""
        return self.own_bytes + self.shared_bytes

    def with_between_of(self, other: Footprint) -> Footprint:
        """Return this footprint with the larger `between_bytes` of itself and another one like it, as far as these are known."""
        shown = [one.between_bytes for one in (self, other) if one.between_bytes is not None]
        return self._replace(between_bytes=max(shown, default=None))

    def with_more(self, num_bytes: int) -> Footprint:
        """Return the footprint of a microbatch that saved `num_bytes` more than this one, or fewer (negative)."""
        own = max(0, self.own_bytes + num_bytes)
        movable = min(self.movable_bytes, own)
        return self._replace(own_bytes=own, movable_bytes=movable, parts=(movable,), between_bytes=None)

    def sizes(self, num_parts: int = 0) -> StageSizes:
        """Return the sizes as a plan counts them.

        Args:
            num_parts: the plan's, which may come from a microbatch with more or fewer parts; 0 for as many as this one has.
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
            state=min(self.state_bytes, self.own_bytes - self.movable_bytes),
            given=self.given_bytes,
            collected=self.collected_bytes,
            results=self.results_bytes,
            kept_results=min(self.kept_results_bytes, self.own_bytes),
            skips=self.skips,
        )


def footprint_of(contents: StashContents) -> Footprint:
    """Return the bytes found in a look at a microbatch, as a footprint."""
    shared = sum(held.num_bytes for held in contents.shared.values())
    return Footprint(contents.own_bytes, contents.movable_bytes, shared, state_bytes=contents.state_bytes)


def spanning(one: Footprint, other: Footprint) -> Footprint:
    """Return a footprint that covers two; if they are equal, that footprint itself."""
    if one == other:
        return one
    parts = tuple(max(column) for column in zip_longest(one.parts, other.parts, fillvalue=0))
    movable = sum(parts) if parts else max(one.movable_bytes, other.movable_bytes)
    between = [each.between_bytes for each in (one, other) if each.between_bytes is not None]
    return Footprint(
        own_bytes=movable + max(each.own_bytes - each.movable_bytes for each in (one, other)),
        movable_bytes=movable,
        shared_bytes=max(one.shared_bytes, other.shared_bytes),
        parts=parts,
        received_bytes=max(one.received_bytes, other.received_bytes),
        sent_bytes=max(one.sent_bytes, other.sent_bytes),
        kept_received_bytes=min(one.kept_received_bytes, other.kept_received_bytes),
        kept_sent_bytes=min(one.kept_sent_bytes, other.kept_sent_bytes),
        between_bytes=max(between, default=None),
        given_bytes=max(one.given_bytes, other.given_bytes),
        collected_bytes=max(one.collected_bytes, other.collected_bytes),
        state_bytes=max(one.state_bytes, other.state_bytes),
        results_bytes=max(one.results_bytes, other.results_bytes),
        kept_results_bytes=min(one.kept_results_bytes, other.kept_results_bytes),
        skips=_largest_skips([one.skips, other.skips]),
    )


def skip_sizes(place: int, value: MessageBytes, gradient: int, own: Container[int], sent: MessageBytes) -> SkipSizes:
    """Return the bytes of a skip on a stage that makes or uses it, given the storages that it has saved, and its output."""
    joint = sum(size for key, (_, size) in value.storages.items() if key in sent.storages and key not in own)
    return SkipSizes(place, value.num_bytes, value.among(own), joint, gradient)


def _largest_skips(some: Iterable[Sequence[SkipSizes]]) -> tuple[SkipSizes, ...]:
    """Return sizes of skips that cover all given ones."""
    by_place: dict[int, list[SkipSizes]] = {}
    for skip in sorted(skip for skips in some for skip in skips):
        by_place.setdefault(skip.place, []).append(skip)
    return tuple(
        SkipSizes(
            place=place,
            num_bytes=max(one.num_bytes for one in found),
            kept=min(one.kept for one in found),
            joint=min(one.joint for one in found),
            gradient=max(one.gradient for one in found),
        )
        for place, found in by_place.items()
    )


def covering(slices: Sequence[Iterable[StageSizes]]) -> tuple[StageSizes, ...]:
    """Return sizes for each slice of a microbatch on a stage that none of those given for it exceed, all with as many parts.

    If they do not say the same of the gradients of states, these count as if they came with the forward whose state it is.
    """
    given = [list(dict.fromkeys(sizes)) for sizes in slices]
    are_alike = all(len({(one.given, one.collected) for one in sizes}) == 1 for sizes in given)
    if not are_alike or not gradients_are_collected([sizes[0] for sizes in given]):
        given = [[replace(one, fixed=one.fixed + one.collected, given=0, collected=0) for one in sizes] for sizes in given]
    found = [largest_of(sizes) for sizes in given]
    most = max(len(sizes.parts) for sizes in found)
    return tuple(replace(sizes, parts=(*sizes.parts, *[0] * (most - len(sizes.parts)))) for sizes in found)


def largest_of(some: Iterable[StageSizes]) -> StageSizes:
    """Return sizes that cover all given sizes."""
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
        state=max(one.state for one in sizes),
        given=max(one.given for one in sizes),
        collected=max(one.collected for one in sizes),
        results=max(one.results for one in sizes),
        kept_results=min(one.kept_results for one in sizes),
        skips=_largest_skips([one.skips for one in sizes]),
    )


def with_margin(sizes: StageSizes, margin: float) -> StageSizes:
    """Return sizes whose saved bytes are larger by a fraction; messages stay, because they are agreed and do not vary."""

    def more(num_bytes: int) -> int:
        return num_bytes + ceil(num_bytes * margin)

    between = None if sizes.between is None else more(sizes.between)
    return replace(sizes, parts=tuple(map(more, sizes.parts)), fixed=more(sizes.fixed), between=between)
