"""The bytes that a microbatch takes on each stage, and the static bytes of each rank."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Flow
from bpipe.plan.action import BETWEEN_STAGES, Action, Op

__all__ = ["Amount", "Sizes", "StageSizes"]

MOST_PARTS = 1023  # of a microbatch on a stage
MOST_BYTES = 2**48  # of a stage or a rank: more than there are, and few enough for sums of 64 bits


# The names of amounts. Those of values with a name of their own, such as skips, are the values' names in the flow.
IN, OUT = "in", "out"  # the message from the part before, and that to the part behind: the results and the loss, if there is none
LOSS = "loss"  # what a loss is computed from and takes, beside its message or, of whole sequences of slices, beside its result
STATE = "state"  # of a slice, what the slices behind it read, such as keys and values
GIVEN, COLLECTED = "given", "collected"  # gradients of states: the first ones for slices before, and those that slices behind gave
GRADIENTS = "gradients"  # of a stage's weights, that its twin sends; of those it shares with stage 3: gradients-3
NAMES = (IN, OUT, LOSS, STATE, GIVEN, COLLECTED, GRADIENTS)
OF_VALUES = re.compile(rf"\d{{1,9}}(?:-\d{{1,9}})+|{GRADIENTS}-\d{{1,9}}", re.ASCII)


class Amount(NamedTuple):
    """Bytes that a unit takes on a stage besides what its forward alone holds, or of which others hold some, too.

    Args:
        name: what it is, as above.
        num_bytes: how many. A `STATE` is among the stage's fixed bytes: the slices behind run forward after it and backward before
            it, so that it stays until its own backward, even if the slice is recomputed. What a slice has `GIVEN` stays until the
            backwards of the slices before; what it adds to gradients that are there already takes nothing more.
        kept: those of them that are among the stage's saved bytes, so that they count once.
        joint: on the stage that makes it, those that are not saved, and lie in the message to the next part as well; of an `OUT`
            those that lie in the `IN` as well, as a mask does that is handed on.
        gradient: the bytes of its gradient; default: as many.
        joint_kept: likewise those that are saved, which a first of two forwards does not count as that.

    Example:
        >>> Amount("0-2", 100).gradient_bytes
        100
    """

    name: str
    num_bytes: int
    kept: int = 0
    joint: int = 0
    gradient: int | None = None
    joint_kept: int = 0

    @property
    def gradient_bytes(self) -> int:
        """The bytes of its gradient."""
        return self.num_bytes if self.gradient is None else self.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """The bytes that one microbatch, or one slice of a microbatch, takes on one stage.

    Args:
        parts: its saved bytes that can move: one number, or one for each part that can move by itself, in the order in
            which the forward saves them.
        fixed: its saved bytes that cannot move.
        between: its bytes between I and W, including gradients that wait for W; None: all its saved bytes.
        amounts: its messages and whatever else it takes, by name; one that is missing counts as nothing.

    Raises:
        ConfigurationError: a negative number, or one of more than 256 TiB; no part, or more than 1023; an amount that is there
            twice, has another name, or keeps more than it has, or a state larger than `fixed`.

    Example:
        >>> stage = StageSizes(parts=(300, 100), fixed=50, amounts=(Amount("in", 40), Amount("out", 40, kept=30)))
        >>> stage.saved, stage["out"].num_bytes, stage["loss"].num_bytes
        (450, 40, 0)
    """

    parts: tuple[int, ...]
    fixed: int = 0
    between: int | None = None
    amounts: tuple[Amount, ...] = ()

    def __post_init__(self) -> None:
        names = [amount.name for amount in self.amounts]
        if not all(isinstance(name, str) and (name in NAMES or OF_VALUES.fullmatch(name)) for name in names):
            raise ConfigurationError(f"amounts {names!s:.400}: each is one of {', '.join(NAMES)}, or of a value such as '0-2'")
        if len(set(names)) < len(names):
            raise ConfigurationError(f"an amount is there twice: {self.amounts!s:.400}")
        by_name = sorted(self.amounts, key=lambda amount: amount.name)
        amounts = tuple(amount for amount in by_name if any(number for number in amount[1:]))
        object.__setattr__(self, "amounts", amounts)
        numbers = [*self.parts, self.fixed, self.between or 0, *(number or 0 for amount in amounts for number in amount[1:])]
        if not self.parts or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ConfigurationError(f"sizes must be whole numbers of at least 0, with at least one part: {self!s:.400}")
        if max(*numbers, self.saved) > MOST_BYTES or len(self.parts) > MOST_PARTS:
            raise ConfigurationError(f"a stage's microbatch has at most {MOST_BYTES} bytes and {MOST_PARTS} parts: {self!s:.200}")
        if any(one.kept > self.saved or one.joint_kept > one.kept or one.kept + one.joint > one.num_bytes for one in amounts):
            raise ConfigurationError(f"a stage cannot keep more of a message than it has: {self!s:.400}")
        if self[STATE].num_bytes > self.fixed:
            raise ConfigurationError(f"a slice's state is among its fixed bytes, and cannot be more: {self!s:.400}")

    def __getitem__(self, name: str) -> Amount:
        """Return an amount by name; one of nothing if it is missing."""
        return next((amount for amount in self.amounts if amount.name == name), Amount(name, 0))

    def with_amounts(self, *amounts: Amount) -> StageSizes:
        """Return these sizes with other amounts in the place of those with the same names."""
        names = {amount.name for amount in amounts}
        return replace(self, amounts=(*(one for one in self.amounts if one.name not in names), *amounts))

    @property
    def movable(self) -> int:
        """The bytes of a microbatch that can be evicted."""
        return sum(self.parts)

    @property
    def saved(self) -> int:
        """The bytes that a microbatch keeps from its forward to the end of its backward."""
        return self.fixed + self.movable

    @property
    def late(self) -> int:
        """The bytes that it takes between I and W."""
        return self.saved if self.between is None else self.between

    def without_messages(self) -> StageSizes:
        """Return these sizes with only the saved bytes."""
        return replace(self, amounts=tuple(amount for amount in self.amounts if amount.name in (STATE, GIVEN, COLLECTED)))

    def moved(self, part: int) -> int:
        """Return the bytes that an eviction of a part moves; part 0 stands for all parts."""
        return self.parts[part - 1] if part else self.movable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The bytes of one microbatch, or of one slice of a microbatch, on each stage, and the static bytes of each rank.

    Args:
        stages: one entry per stage.
        static: the static bytes of each rank: parameters, gradients, optimizer states.
        later_slices: one tuple like `stages`, which is the first slice's then, for each later slice of a microbatch; default:
            slices are of equal size.

    Raises:
        ConfigurationError: a negative number of static bytes, or one of more than 256 TiB, or slices of different numbers of stages
            or parts.

    Example:
        >>> Sizes.of([4, 6]).stages[1].saved
        6
    """

    stages: tuple[StageSizes, ...]
    static: tuple[int, ...]
    later_slices: tuple[tuple[StageSizes, ...], ...] = ()

    def __post_init__(self) -> None:
        num_parts = [len(stage.parts) for stage in self.stages]
        if any([len(stage.parts) for stage in slice_] != num_parts for slice_ in self.later_slices):
            raise ConfigurationError(
                f"later_slices: give each slice {len(self.stages)} stages, in {num_parts} parts as the first one"
            )
        if not all(isinstance(n, int) and 0 <= n <= MOST_BYTES for n in self.static):
            raise ConfigurationError(f"static bytes must be whole numbers from 0 to {MOST_BYTES}: {self.static}")

    @classmethod
    def of(cls, saved: Iterable[int], *, num_ranks: int | None = None, num_parts: int = 1) -> Sizes:
        """Return sizes of stages that save these bytes, all of which can move, in parts of about equal size, and nothing else."""
        stages = tuple(StageSizes(parts=_cut(size, num_parts)) for size in saved)
        return cls(stages=stages, static=(0,) * (len(stages) if num_ranks is None else num_ranks))

    @classmethod
    def of_slices(cls, slices: Iterable[tuple[StageSizes, ...]], *, static: tuple[int, ...]) -> Sizes:
        """Return sizes of slices, given each one's on all stages; if all slices are alike, one stands for them.

        Raises:
            ConfigurationError: there are none, or they have different numbers of stages or parts.
        """
        each = list(slices)
        if not each:
            raise ConfigurationError("there are no sizes of any slice on all stages")
        first, *later = each
        return cls(stages=first, static=static, later_slices=tuple(later) if any(one != first for one in later) else ())

    @property
    def by_unit(self) -> tuple[tuple[StageSizes, ...], ...]:
        """The sizes on each stage, of each slice that has its own."""
        return (self.stages, *self.later_slices)

    def at(self, stage: int, unit: int) -> StageSizes:
        """Return the sizes of a unit, a slice or a microbatch that is not cut, on a stage."""
        return self.by_unit[unit % (1 + len(self.later_slices))][stage]

    def without_messages(self) -> Sizes:
        """Return these sizes with only the saved bytes."""
        first, *later = (tuple(stage.without_messages() for stage in stages) for stages in self.by_unit)
        return replace(self, stages=first, later_slices=tuple(later))

    def check(self, num_stages: int, num_ranks: int, units: int = 1) -> None:
        """Raise unless these sizes fit a plan.

        Raises:
            ConfigurationError: they have different numbers of stages, ranks or slices, or `wrong_with`.
        """
        if wrong := self.wrong_with(units):
            raise ConfigurationError(wrong)
        if (len(self.stages), len(self.static)) != (num_stages, num_ranks):
            raise ConfigurationError(
                f"sizes of {len(self.stages)} stages and {len(self.static)} ranks for a plan of {num_stages} and {num_ranks}: "
                "give a StageSizes for each stage and the static bytes of each rank"
            )

    def wrong_with(self, units: int) -> str:
        """Return why these cannot be the sizes of microbatches of so many units; empty if they can be."""
        if self.later_slices and len(self.by_unit) != units:
            later = f"give {units - 1} later_slices, or none"
            return f"sizes of {len(self.by_unit)} slices for a plan with slices={units}: {later}"
        for stage in range(len(self.stages)):
            if not gradients_are_collected([sizes[stage] for sizes in self.by_unit]):
                return (
                    f"sizes of stage {stage}: each byte that a slice has given to states of earlier slices must be collected by "
                    "these, which run backward after it"
                )
        return ""

    def moved(self, action: Action) -> int:
        """Return the bytes that an eviction or a load moves."""
        return self.at(*action.key).moved(action.part)

    def carried(self, action: Action, flow: Flow) -> int:
        """Return the bytes that a transfer carries, on either end: values, or the gradients of what its receiver got."""
        op, stage, unit, part, _ = action
        if part and op in BETWEEN_STAGES:
            own = [self.at(stage, unit)[name] for name in flow.message(stage, part - 1, flow.turn_of(unit)).names]
            return sum(one.num_bytes if op in (Op.SEND_F, Op.RECV_F) else one.gradient_bytes for one in own)
        if op is Op.SEND_F or op is Op.RECV_F:
            sent = self.at(stage - (op is Op.RECV_F), unit)[OUT].num_bytes
            return max(sent, self.at(stage + (op is Op.SEND_F), unit)[IN].num_bytes)  # views are one storage until they are sent
        if op is Op.SEND_B or op is Op.RECV_B:
            return self.at(stage + (op is Op.RECV_B), unit)[IN].gradient_bytes
        if op is Op.REDUCE_GRAD:
            return self.stages[stage][gradients(part)].num_bytes
        return self.moved(action)


def gradients(part: int) -> str:
    """Return the name of what a stage exchanges by the actions of a part.

    Example:
        >>> gradients(0), gradients(4)
        ('gradients', 'gradients-3')
    """
    return f"{GRADIENTS}-{part - 1}" if part else GRADIENTS


def gradients_are_collected(units: Sequence[StageSizes]) -> bool:
    """Return whether the slices of a microbatch collect on a stage, in the order of backwards, all that later ones have given."""
    waiting = 0
    for sizes in reversed(units):
        waiting -= sizes[COLLECTED].num_bytes
        if waiting < 0:
            return False
        waiting += sizes[GIVEN].num_bytes
    return not waiting


def _cut(size: int, num_parts: int) -> tuple[int, ...]:
    ends = [size * part // num_parts for part in range(num_parts + 1)]
    return tuple(end - start for start, end in pairwise(ends))
