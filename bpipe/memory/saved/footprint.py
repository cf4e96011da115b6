"""The bytes that one microbatch takes on one stage, measured from what it saved."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from itertools import zip_longest
from math import ceil
from typing import NamedTuple

from bpipe.memory.saved.stash import StashContents
from bpipe.memory.saved.storages import MessageBytes
from bpipe.plan.sizes import COLLECTED, GIVEN, STATE, Amount, StageSizes, gradients_are_collected

__all__: list[str] = []


class Footprint(NamedTuple):
    """The bytes that one microbatch takes on one stage."""

    own_bytes: int  # freed by its backward
    movable_bytes: int  # of these, the bytes that an eviction frees
    shared_bytes: int  # saved, but with other owners too: counted once for all microbatches of the kind
    parts: tuple[int, ...] = ()  # the movable bytes of each part, if it moves in parts
    between_bytes: int | None = None  # the bytes kept between backward_input and backward_weight, once known
    amounts: tuple[Amount, ...] = ()  # its messages, state and gradients of states, as the sizes of a plan have them

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
        fixed = self.own_bytes - self.movable_bytes
        least = {one: (min(one.kept, self.own_bytes), min(one.joint_kept, self.own_bytes)) for one in self.amounts}
        amounts = [one._replace(kept=kept, joint_kept=both) for one, (kept, both) in least.items() if one.name != STATE]
        amounts += [Amount(STATE, min(one.num_bytes, fixed)) for one in self.amounts if one.name == STATE]
        return StageSizes(parts=parts, fixed=fixed, between=self.between_bytes, amounts=tuple(amounts))


def footprint_of(contents: StashContents) -> Footprint:
    """Return the bytes found in a look at a microbatch, as a footprint."""
    shared = sum(held.num_bytes for held in contents.shared.values())
    state = (Amount(STATE, contents.state_bytes),) if contents.state_bytes else ()
    return Footprint(contents.own_bytes, contents.movable_bytes, shared, amounts=state)


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
        between_bytes=max(between, default=None),
        amounts=_largest([*one.amounts, *other.amounts]),
    )


def amount_of(name: str, value: MessageBytes, gradient: int | None, own: Container[int], other: MessageBytes) -> Amount:
    """Return the bytes of a value with a name on a stage that makes or uses it.

    Args:
        own: the storages that the stage saved.
        other: a message that may carry the same tensors.
    """
    both = MessageBytes(0, {key: one for key, one in value.storages.items() if key in other.storages})
    joint = sum(size for key, (_, size) in both.storages.items() if key not in own)
    return Amount(name, value.num_bytes, value.among(own), joint, gradient, both.among(own))


def _largest(amounts: Iterable[Amount]) -> tuple[Amount, ...]:
    """Return amounts that cover all given ones, each with those of its name."""
    by_name: dict[str, list[Amount]] = {}
    for amount in amounts:
        by_name.setdefault(amount.name, []).append(amount)
    return tuple(
        Amount(
            name,
            num_bytes=max(one.num_bytes for one in found),
            kept=min(one.kept for one in found),
            joint=min(one.joint for one in found),
            joint_kept=min(one.joint_kept for one in found),
            gradient=None if all(one.gradient is None for one in found) else max(one.gradient_bytes for one in found),
        )
        for name, found in sorted(by_name.items())
    )


def covering(units: Sequence[Iterable[StageSizes]]) -> tuple[StageSizes, ...]:
    """Return sizes for each unit of a microbatch on a stage that none of those given for it exceed, all with as many parts.

    If they do not say the same of the gradients of states, these count as if they came with the forward whose state it is.
    """
    given = [list(dict.fromkeys(sizes)) for sizes in units]
    are_alike = all(len({(one[GIVEN], one[COLLECTED]) for one in sizes}) == 1 for sizes in given)
    if not are_alike or not gradients_are_collected([sizes[0] for sizes in given]):
        given = [list(map(_with_gradients_of_states, sizes)) for sizes in given]
    found = [largest_of(sizes) for sizes in given]
    most = max(len(sizes.parts) for sizes in found)
    return tuple(replace(sizes, parts=(*sizes.parts, *[0] * (most - len(sizes.parts)))) for sizes in found)


def _with_gradients_of_states(sizes: StageSizes) -> StageSizes:
    """Return sizes in which the gradients of a slice's state count from its forward on."""
    more = replace(sizes, fixed=sizes.fixed + sizes[COLLECTED].num_bytes)
    return more.with_amounts(Amount(GIVEN, 0), Amount(COLLECTED, 0))


def largest_of(some: Iterable[StageSizes]) -> StageSizes:
    """Return sizes that cover all given sizes."""
    sizes = list(some)
    is_halved = any(one.between is not None for one in sizes)
    return StageSizes(
        parts=tuple(max(column) for column in zip_longest(*(one.parts for one in sizes), fillvalue=0)),
        fixed=max(one.fixed for one in sizes),
        between=max(one.late for one in sizes) if is_halved else None,
        amounts=_largest(amount for one in sizes for amount in one.amounts),
    )


def with_margin(sizes: StageSizes, margin: float) -> StageSizes:
    """Return sizes whose saved bytes are larger by a fraction; messages stay, because they are agreed and do not vary."""

    def more(num_bytes: int) -> int:
        return num_bytes + ceil(num_bytes * margin)

    between = None if sizes.between is None else more(sizes.between)
    return replace(sizes, parts=tuple(map(more, sizes.parts)), fixed=more(sizes.fixed), between=between)
