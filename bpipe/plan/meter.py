"""Count the memory that actions allocate and free, in slots or in bytes.

Bytes belong to those who hold them, each from one action to another: what is saved for a backward, a value that is used or sent, a
message on its way. `holds.py` says who holds what; here the holds become one table of what each kind of action takes and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import lru_cache, partial
from operator import itemgetter
from typing import NamedTuple

from bpipe.flow.flow import Flow
from bpipe.plan.action import Action, MicrobatchKey, Op
from bpipe.plan.holds import Hold, Kind, changes, holds_by_order, holds_of
from bpipe.plan.sizes import COLLECTED, GIVEN, Sizes, StageSizes

__all__: list[str] = []

Change = tuple[int, int]  # what an action allocates before it runs, and what it frees when it has run
SizeOf = Callable[[Action], int]
NOTHING: Change = (0, 0)
KIND: Callable[[Action], Kind] = itemgetter(0, 1, 3)
BOTH = {Op.B: (Op.B, Op.I)}  # a whole backward stands for its first half, too


class Table(dict[Kind, Change]):
    """What each kind of action allocates and frees; nothing if it is not there."""

    def __missing__(self, kind: Kind) -> Change:
        return NOTHING

    def take(self, kind: Kind, num_bytes: int) -> None:
        """Let actions of a kind allocate bytes."""
        op, stage, part = kind
        for one in BOTH.get(op, (op,)):
            takes, gives = self[one, stage, part]
            self[one, stage, part] = takes + num_bytes, gives

    def give(self, kind: Kind, num_bytes: int) -> None:
        """Let actions of a kind free bytes."""
        op, stage, part = kind
        for one in BOTH.get(op, (op,)):
            takes, gives = self[one, stage, part]
            self[one, stage, part] = takes, gives + num_bytes

    def hold(self, hold: Hold) -> None:
        """Let the bytes of a hold with one end begin and stop to count."""
        (self.take if hold.begins_before else self.give)(hold.begin, hold.num_bytes * (1 if hold.begins_before else -1))
        (self.take if hold.ends_before else self.give)(hold.ends[0], hold.num_bytes * (-1 if hold.ends_before else 1))


class Slots(Table):
    """What counts from a forward to its backward, by stage and part, and at both ends of an eviction while that is in flight."""

    def __init__(self, amount: Callable[[int, int], int], *, again: bool) -> None:
        super().__init__()
        self._amount = amount
        self._takes = {Op.R} if again else {Op.F, Op.LOAD, Op.ACCEPT}
        self._gives = {Op.B, Op.W} | (set() if again else {Op.WAIT_EVICT, Op.WAIT_RETURN})

    def __missing__(self, kind: Kind) -> Change:
        op, stage, part = kind
        num = self._amount(stage, part)
        change = self[kind] = num * (op in self._takes), num * (op in self._gives)
        return change


class UnitMeter(NamedTuple):
    """What the actions of a unit allocate and free.

    Args:
        usual: of a unit whose forward runs once.
        again: of one whose forward runs twice: the first one keeps only its input; that of a slice also its state, until the second
            one has made that again.
        holds: besides, what ends at the last of several actions, whichever that is.
    """

    usual: Table
    again: Table
    holds: tuple[Hold, ...] = ()


class Meter(NamedTuple):
    """The memory that actions allocate and free.

    Args:
        units: of consecutive units, which begin with the first again after the last.
        overlapped: forwards that run side by side with the next action, a backward.
    """

    units: tuple[UnitMeter, ...]
    overlapped: Collection[MicrobatchKey] = ()

    @property
    def has_holds(self) -> bool:
        """Whether some memory is freed by the last of several actions."""
        return any(unit.holds for unit in self.units)

    def change(self, action: Action, *, again: bool = False) -> Change:
        """Return what an action allocates and frees, of a unit whose forward runs again or not."""
        op, stage, unit, part, _ = action
        unit_meter = self.units[unit % len(self.units)]
        return (unit_meter.again if again else unit_meter.usual)[op, stage, part]

    def held(self, actions: Sequence[Action]) -> tuple[dict[int, int], dict[int, int]]:
        """Return the bytes that begin to count before actions of a lane, and those that stop behind them, by place, of `holds`."""
        return changes(actions, [unit.holds for unit in self.units]) if self.has_holds else ({}, {})


def slots_of(*amounts: Callable[[int, int], int]) -> Meter:
    """Return a meter of some amount of each stage and part from its forward to its backward, for each of consecutive units."""
    return Meter(tuple(UnitMeter(Slots(amount, again=False), Slots(amount, again=True)) for amount in amounts))


SLOTS = slots_of(lambda stage, part: int(part == 0))  # every microbatch counts as 1, and its parts as 0


def slot(action: Action) -> int:
    """Count every microbatch as 1, and its parts as 0."""
    return 1 if action[3] == 0 else 0


def occupancy(actions: Sequence[Action], meter: Meter = SLOTS) -> Iterator[int]:
    """Yield the memory that is occupied while each action runs, in the meter's unit."""
    occupied = _occupancy(actions, meter)
    if meter.has_holds:
        occupied = _with_holds(actions, meter, occupied)
    return _side_by_side(actions, meter, occupied) if meter.overlapped else occupied


def _side_by_side(actions: Sequence[Action], meter: Meter, occupied: Iterator[int]) -> Iterator[int]:
    """Yield what is occupied if both of a pair allocate their memory when it begins, and free theirs when it has ended."""
    kept = 0  # what the forward of a pair would have freed by now
    for index, live in enumerate(occupied):
        action, live, kept = actions[index], live + kept, 0
        if action[0] is Op.F and action[1:3] in meter.overlapped:
            live += meter.change(actions[index + 1])[0]
            kept = meter.change(action)[1]
        yield live


def _with_holds(actions: Sequence[Action], meter: Meter, occupied: Iterator[int]) -> Iterator[int]:
    held = 0
    takes, gives = meter.held(actions)
    for index, live in enumerate(occupied):
        held += takes.get(index, 0)
        yield live + held
        held -= gives.get(index, 0)


def _occupancy(actions: Sequence[Action], meter: Meter) -> Iterator[int]:
    again = Op.R  # looked up once: a plan has millions of actions
    recomputed = {action.key for action in actions if action[0] is again}
    usual, when_recomputed = [one.usual for one in meter.units], [one.again for one in meter.units]
    if len(usual) == 1 and not recomputed:  # nearly always
        changes: Iterable[Change] = map(usual[0].__getitem__, map(KIND, actions))
    else:
        changes = (
            (when_recomputed if (stage, unit) in recomputed else usual)[unit % len(usual)][op, stage, part]
            for op, stage, unit, part, _ in actions
        )
    live = 0
    for takes, gives in changes:
        live += takes
        yield live
        live -= gives


@lru_cache(maxsize=64)
def bytes_meter(sizes: Sizes, flow: Flow) -> Meter:
    """Return a meter of bytes for the units of a flow, messages between stages included."""
    units = range(flow.units * flow.period if flow.period > 1 else len(sizes.by_unit))
    return Meter(tuple(unit_meter(flow, flow.turn_of(unit), partial(sizes.at, unit=unit)) for unit in units))


def unit_meter(flow: Flow, turn: int, at: Callable[[int], StageSizes]) -> UnitMeter:
    """Return the meter of a unit that has a turn of the flow's routes and takes so much on each stage."""
    tables = Table(), Table()
    for table in tables:
        for stage in range(len(flow.stage_ranks)):
            own = at(stage)
            for part in range(len(own.parts) + 1):
                _move(table, stage, part, own.moved(part))
    for again, table in enumerate(tables):
        for hold in holds_of(flow, turn, at, again=bool(again)):
            table.hold(hold)
        for stage in (flow.stage_of(part, turn) for part in range(len(flow.routes))):
            _stay(table, stage, at(stage))
    return UnitMeter(*tables, tuple(holds_by_order(flow, turn, at)))


def _move(table: Table, stage: int, part: int, num_bytes: int) -> None:
    """Count what moves at both ends while it is in flight."""
    for op in (Op.LOAD, Op.ACCEPT):
        table.take((op, stage, part), num_bytes)
    for op in (Op.WAIT_EVICT, Op.WAIT_RETURN):
        table.give((op, stage, part), num_bytes)


def _stay(table: Table, stage: int, own: StageSizes) -> None:
    """Count what stays between the halves of a backward, and the gradients of states, which one backward makes and others free."""
    takes, gives = table[Op.I, stage, 0]
    table[Op.I, stage, 0] = takes + own[GIVEN].num_bytes, gives + own[COLLECTED].num_bytes - own.late
    takes, gives = table[Op.B, stage, 0]
    table[Op.B, stage, 0] = takes + own[GIVEN].num_bytes, gives + own[COLLECTED].num_bytes
    table.give((Op.W, stage, 0), own.late)
