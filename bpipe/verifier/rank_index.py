"""An index of one rank's actions, made once for all the rules that the rank keeps by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence

from bpipe.plan.action import COMPUTE, SHARDING, Action, Op, PartKey, part_keys
from bpipe.plan.plan import Plan

__all__: list[str] = []

Place = tuple[int, bool, int]  # rank, whether in its served lane, position
Finding = tuple[Place | None, str]

BITS = {op: 1 << i for i, op in enumerate(Op)}


def mask(ops: Iterable[Op]) -> int:
    """Return a set of operations as bits of a number, because plans have millions of such sets."""
    return sum(BITS[op] for op in ops)


def ops_in(bits: int) -> list[Op]:
    return [op for op in Op if bits & BITS[op]]


class RankIndex:
    """An index of what one rank does with each part of each microbatch, made once for all rules and dropped before the next rank's.

    Args:
        plan: the plan.
        rank: the rank.
        stages: the stages that it holds.
    """

    def __init__(self, plan: Plan, rank: int, stages: Sequence[int]) -> None:
        self.plan, self.rank, self.stages = plan, rank, stages
        self.lane = (*plan.actions[rank], *plan.served[rank])
        self.num_computing = len(plan.actions[rank])
        self.present: defaultdict[PartKey, int] = defaultdict(int)  # a computation in pieces is one of the whole microbatch, too
        self.repeated: list[int] = []
        self.begun: list[int] = []  # the first pieces of computations in pieces
        self.acceptors: dict[PartKey, int | None] = {}
        for index, (action, which) in enumerate(zip(self.lane, part_keys(self.lane))):
            op = action[0]
            if op in SHARDING:
                continue
            if self.present[which] & BITS[op]:
                self.repeated.append(index)
            self.present[which] |= BITS[op]
            if op is Op.EVICT:
                self.acceptors[which] = action.peer
            elif action.part and op in COMPUTE and not plan.goes_on(action):
                self._begin(index, action)

    def _begin(self, index: int, action: Action) -> None:
        whole = (*action.key, 0)
        if self.present[whole] & BITS[action.op]:
            self.repeated.append(index)
        self.present[whole] |= BITS[action.op]
        self.begun.append(index)

    def is_served(self, index: int) -> bool:
        """Return whether an action of `lane` is in the served lane."""
        return index >= self.num_computing

    def place(self, index: int | None) -> Place | None:
        if index is None:
            return None
        served = self.is_served(index)
        return self.rank, served, index - self.num_computing * served

    def find(self, op: Op, which: PartKey) -> int | None:
        """Return the index of an action in `lane`, whatever its part if the whole is asked for; None if it is missing."""
        whole = None if which[2] else which[:2]
        found = (i for i, a in enumerate(self.lane) if a.op is op and (a.part_key == which or a.key == whole))
        return next(found, None)


Rule = Callable[[RankIndex], Iterator[Finding]]
