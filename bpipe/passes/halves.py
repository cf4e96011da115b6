"""Split backwards: number the steps of an order by microbatch, and place W where a rank would wait."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from itertools import count

from bpipe.flow.flow import Flow
from bpipe.plan.action import Action, Op, OpKey
from bpipe.plan.order import RESULT, needs

__all__: list[str] = []

Step = tuple[Op, int]


def numbered(steps: Sequence[Step]) -> Iterator[Action]:
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


class _Rank:
    """A rank that computes: the rest of its order, the W actions that are due, and its free slots."""

    def __init__(self, order: Sequence[Action], slots: int, flow: Flow) -> None:
        self.order, self.due = deque(order), deque[Action]()
        self.slots, self.flow = slots, flow
        self.lane: list[Action] = []

    def compute(self, arrived: set[OpKey]) -> Action | None:
        """Run the next computation; if that is a backward that cannot run yet, the one after it; else a W, or nothing."""
        order = self.order
        if order and self._can(order[0], arrived):
            action = order.popleft()
        elif len(order) > 1 and order[0].op is Op.I and self._can(order[1], arrived):
            action = order[1]
            del order[1]
        elif self.due:
            action = self.due.popleft()
        else:
            return None
        self.lane.append(action)
        self.slots += (action.op is Op.W) - (action.op is Op.F)
        if action.op is Op.I:
            self.due.append(action._replace(op=Op.W))
        return action

    def _can(self, action: Action, arrived: set[OpKey]) -> bool:
        return arrived.issuperset(needs(self.flow, action)) and (action.op is not Op.F or self.slots > 0)


def with_weights(orders: Sequence[Sequence[Action]], flow: Flow, slots: int) -> list[list[Action]]:
    """Run orders of F and I of a flow in unit time on ranks of `slots` slots, and insert W where a rank waits.

    A computation may overtake one backward whose input has not arrived. It takes the slot that it would have taken after it,
    only sooner: an order that keeps to `slots` with each W right after its I still does, and still ends.
    """
    ranks = [_Rank(order, slots, flow) for order in orders]
    arrived: set[OpKey] = set()
    while computed := [action for rank in ranks if (action := rank.compute(arrived)) is not None]:
        arrived.update((RESULT[op], stage, microbatch) for op, stage, microbatch, *_ in computed)
    assert not any(rank.order for rank in ranks), "an order that does not keep to its slots"
    return [rank.lane for rank in ranks]
