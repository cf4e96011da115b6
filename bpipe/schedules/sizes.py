"""What a microbatch takes on each stage, and when: the unit in which memory is planned, slots or bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.schedules.action import COMPUTE, Action, Op

__all__ = ["Sizes", "StageSizes"]

Amount = Callable[[Action], int]


class Meter(NamedTuple):
    """What actions take before they run and give back after they ran, by operation."""

    takes: Mapping[Op, Amount]
    gives: Mapping[Op, Amount]


def meter_of(saved: Amount, moved: Amount) -> Meter:
    """A forward takes what it saves until its backward ends; what moves counts at both ends while it is under way.

    A forward or a backward in pieces takes or gives back what each piece saves.
    """
    return Meter(
        takes={Op.F: saved, Op.LOAD: moved, Op.ACCEPT: moved},
        gives={Op.B: saved, Op.W: saved, Op.WAIT_EVICT: moved, Op.WAIT_RETURN: moved},
    )


def slot(action: Action) -> int:
    """Every microbatch counts the same; a part of one does not count, but for the first, which stands for all."""
    return 1 if action.part == 0 or (action.part == 1 and action.op in COMPUTE) else 0


SLOTS = meter_of(slot, slot)


def occupancy(actions: Iterable[Action], meter: Meter = SLOTS) -> Iterator[int]:
    """Yield what is occupied while each action runs, in the meter's unit."""
    takes, gives = meter
    live = 0
    for action in actions:
        taken = takes.get(action[0])
        if taken is not None:
            live += taken(action)
        yield live
        given = gives.get(action[0])
        if given is not None:
            live -= given(action)


def rooms_for(chain: Iterable[Action], moved: Amount = slot) -> tuple[int, ...]:
    """The rooms that an acceptor needs for one evictor: the size of each, for its guests in their order.

    A guest takes the smallest free room that is large enough, else the largest free one, which grows, else a new one.
    `bpipe.memory.guests.Rooms` does the same with memory.
    """
    sizes: list[int] = []
    free: list[int] = []
    taken: dict[tuple[int, int, int], int] = {}
    for action in chain:
        if action.op is Op.ACCEPT:
            size = moved(action)
            room = choose_room(sizes, free, size)
            if room is None:
                room = len(sizes)
                sizes.append(0)
            else:
                free.remove(room)
            sizes[room] = max(sizes[room], size)
            taken[action[1:4]] = room
        elif action.op is Op.WAIT_RETURN and action[1:4] in taken:
            free.append(taken.pop(action[1:4]))
    return tuple(sizes)


def choose_room(sizes: list[int], free: list[int], size: int) -> int | None:
    """The free room that a guest takes; None if there is none."""
    fitting = [room for room in free if sizes[room] >= size]
    if fitting:
        return min(fitting, key=sizes.__getitem__)
    return max(free, key=sizes.__getitem__, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSizes:
    """The bytes that one microbatch takes on one stage.

    Args:
        parts: what of its saved bytes can move: one number, or one for each part that can move by itself, in the order in
            which the forward saves them.
        fixed: what of them cannot move.
        received: the message from the stage before; the gradient sent back is as large.
        sent: the message to the stage after; the gradient received back is as large.
        kept_received: what of `received` the saved bytes contain.
        kept_sent: what of `sent` they contain.

    Raises:
        ConfigurationError: a negative number, no part, or more kept than there is.
    """

    parts: tuple[int, ...]
    fixed: int = 0
    received: int = 0
    sent: int = 0
    kept_received: int = 0
    kept_sent: int = 0

    def __post_init__(self) -> None:
        numbers = (*self.parts, self.fixed, self.received, self.sent, self.kept_received, self.kept_sent)
        if not self.parts or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ConfigurationError(f"sizes are whole numbers of at least 0, and at least one part: {self}")
        if self.kept_received > min(self.received, self.saved) or self.kept_sent > min(self.sent, self.saved):
            raise ConfigurationError(f"a stage cannot keep more of a message than it has: {self}")

    @property
    def movable(self) -> int:
        return sum(self.parts)

    @property
    def saved(self) -> int:
        """What a microbatch keeps from its forward to the end of its backward."""
        return self.fixed + self.movable


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The bytes of one microbatch on each stage, and of what stays on each rank.

    Args:
        stages: one entry a stage.
        static: for each rank, what stays: parameters, gradients, optimizer states.

    Example:
        >>> Sizes.of([4, 6]).stages[1].saved
        6
    """

    stages: tuple[StageSizes, ...]
    static: tuple[int, ...]

    @classmethod
    def of(cls, saved: Iterable[int], *, num_ranks: int | None = None, num_parts: int = 1) -> Sizes:
        """Stages that save so many bytes each, all of which can move, in parts of about equal size, and nothing else."""
        stages = tuple(StageSizes(parts=_cut(size, num_parts)) for size in saved)
        return cls(stages=stages, static=(0,) * (len(stages) if num_ranks is None else num_ranks))

    def moved(self, action: Action) -> int:
        """What an eviction or a load moves."""
        return _moved(self.stages[action.stage], action.part)

    def meter(self) -> Meter:
        """When a rank takes and gives back its bytes: those of messages between stages too."""
        return _meter(self)


def _cut(size: int, num_parts: int) -> tuple[int, ...]:
    ends = [size * part // num_parts for part in range(num_parts + 1)]
    return tuple(end - start for start, end in pairwise(ends))


@lru_cache(maxsize=64)
def _meter(sizes: Sizes) -> Meter:
    def amounts(of: Callable[[StageSizes, int], int]) -> Amount:
        """What an action counts, by its stage and part; 0 stands for all parts."""
        table = [[of(stage, part) for part in range(len(stage.parts) + 1)] for stage in sizes.stages]
        return lambda action: table[action[1]][action[3]]

    def at(places: Callable[[StageSizes], tuple[int, ...]], of: Callable[[StageSizes], int]) -> Callable[[StageSizes, int], int]:
        return lambda stage, part: of(stage) if part in places(stage) else 0

    saved, moved = amounts(_kept), amounts(_moved)
    own = meter_of(saved, moved)
    if not any(stage.received or stage.sent for stage in sizes.stages):
        return own
    first, last = (lambda stage: (0, 1)), (lambda stage: (0, len(stage.parts)))
    received, sent = amounts(at(first, _received)), amounts(at(first, _sent))
    makes, handed_in = amounts(at(first, _made_anew)), amounts(at(last, _received_anew))
    begins_backward = amounts(at(last, _received))
    takes: dict[Op, Amount] = {
        Op.RECV_F: received,
        Op.F: lambda action: saved(action) + makes(action),
        Op.RECV_B: sent,
        Op.B: begins_backward,
        Op.I: received,
    }
    gives: dict[Op, Amount] = {
        Op.F: handed_in,
        Op.WAIT_SEND_F: amounts(at(first, _sent_anew)),
        Op.B: lambda action: saved(action) + sent(action),
        Op.I: sent,
        Op.WAIT_SEND_B: received,
    }
    return Meter({**own.takes, **takes}, {**own.gives, **gives})


def _kept(stage: StageSizes, part: int) -> int:
    return stage.parts[part - 1] + stage.fixed * (part == 1) if part else stage.saved


def _moved(stage: StageSizes, part: int) -> int:
    return stage.parts[part - 1] if part else stage.movable


def _received(stage: StageSizes) -> int:
    return stage.received


def _sent(stage: StageSizes) -> int:
    return stage.sent


def _received_anew(stage: StageSizes) -> int:
    """What of the message received is not among the saved bytes: given back with the forward."""
    return stage.received - stage.kept_received


def _sent_anew(stage: StageSizes) -> int:
    return stage.sent - stage.kept_sent


def _made_anew(stage: StageSizes) -> int:
    """What a forward takes besides what it saves: its output, less what it saves of the message that was there already."""
    return _sent_anew(stage) - stage.kept_received
