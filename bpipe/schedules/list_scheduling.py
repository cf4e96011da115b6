"""List scheduling in units of time: a rank that is free takes what comes first among what can run, and W where it would wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from typing import Protocol

from bpipe.flow.flow import Flow
from bpipe.plan.action import Action, Op, OpKey
from bpipe.plan.order import RESULT, UNITS, needs

__all__: list[str] = []

Step = tuple[Op, int]
Timed = tuple[int, Action]  # a computation, and the moment at which it would run if no rank were busy


class Rank(Protocol):
    """The computations that a rank is to run, W aside."""

    def candidates(self) -> Iterable[Action]:
        """Return those that may be the next one, the best one first."""

    def take(self, action: Action) -> None:
        """Take one of the candidates."""


class TimedRank:
    """Computations that run whenever they are ready, the earliest by its moment first; each stage keeps its order."""

    def __init__(self, timed: Iterable[Timed]) -> None:
        self._queues: dict[Step, deque[Timed]] = defaultdict(deque)
        for one in timed:
            self._queues[one[1][:2]].append(one)

    def candidates(self) -> Iterable[Action]:
        return [action for _, action in sorted(queue[0] for queue in self._queues.values() if queue)]

    def take(self, action: Action) -> None:
        self._queues[action[:2]].popleft()


class _OrderedRank:
    """Computations in an order, in which one may overtake one backward whose input has not arrived."""

    def __init__(self, order: Iterable[Action]) -> None:
        self._order = deque(order)

    def candidates(self) -> Iterable[Action]:
        return islice(self._order, 2 if self._order and self._order[0].op is Op.I else 1)

    def take(self, action: Action) -> None:
        self._order.remove(action)


def greedy_order(ranks: Sequence[Rank], flow: Flow, slots: Sequence[float]) -> list[list[Action]]:
    """Return what each rank runs if it takes a computation whenever it can: F, I and W in one unit of time, B in two.

    Where a rank would wait, it runs W of an I that has none yet. It ends where no rank can go on, whether or not all has run.

    Args:
        ranks: what each is to run.
        flow: what each computation needs.
        slots: of each rank: a forward takes one, B or W frees it.
    """
    lanes: list[list[Action]] = [[] for _ in ranks]
    due: list[deque[Action]] = [deque() for _ in ranks]
    free, taken, ended, now = [0] * len(ranks), [0] * len(ranks), dict[OpKey, int](), 0

    def is_ready(x: int, action: Action) -> bool:
        has_room = action.op is not Op.F or taken[x] < slots[x]
        return has_room and all(ended.get(needed, now + 1) <= now for needed in needs(flow, action))

    while True:
        for x, rank in enumerate(ranks):
            if free[x] > now:
                continue
            if action := next((one for one in rank.candidates() if is_ready(x, one)), None):
                rank.take(action)
            elif due[x]:
                action = due[x].popleft()
            else:
                continue
            lanes[x].append(action)
            op, stage, unit, *_ = action
            taken[x] += (op is Op.F) - (op in (Op.B, Op.W))
            if op is Op.I:
                due[x].append(action._replace(op=Op.W))
            free[x] = ended[RESULT[op], stage, unit] = now + UNITS[op]
        if max(free) <= now:
            return lanes
        now = min(time for time in free if time > now)


def whole_order(ranks: Sequence[Rank], flow: Flow, slots: Sequence[float]) -> list[list[Action]]:
    """Return the `greedy_order` of ranks that can run all that they have."""
    lanes = greedy_order(ranks, flow, slots)
    assert not any(list(rank.candidates()) for rank in ranks), "an order that does not end, or does not keep to its slots"
    return lanes


def with_weights(orders: Iterable[Iterable[Action]], flow: Flow, slots: int) -> list[list[Action]]:
    """Run orders of F and I of a flow on ranks of `slots` slots, and insert W where a rank waits.

    An overtaking computation takes the slot that it would have taken after the other one, only sooner: an order that keeps to
    `slots` with each W right after its I still does, and still ends.
    """
    ranks = list(map(_OrderedRank, orders))
    return whole_order(ranks, flow, [slots] * len(ranks))


def numbered(steps: Iterable[Step]) -> Iterator[Action]:
    """Yield (operation, stage) steps with their microbatches, which ascend in each stage's forwards and backwards.

    A W belongs to the oldest I that has none yet, on any stage.
    """
    numbers: defaultdict[Step, count[int]] = defaultdict(count)
    due: deque[Action] = deque()
    for op, stage in steps:
        if op is Op.W:
            yield due.popleft()
            continue
        action = Action(op, stage, next(numbers[RESULT[op], stage]))
        if op is Op.I:
            due.append(action._replace(op=Op.W))
        yield action
