"""An index of one rank's actions, made once for all rules that concern a single rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from bpipe.plan.action import SHARDING, Action, Op, OpKey, PartKey
from bpipe.plan.plan import Plan

__all__: list[str] = []

Place = tuple[int, bool, int]  # rank, whether in its served lane, position
Finding = tuple[Place | None, str]
Kind = tuple[Op, int, int]  # operation, stage, part

BITS = {op: 1 << i for i, op in enumerate(Op)}


def mask(ops: Iterable[Op]) -> int:
    """Return a set of operations as bits of a number, because plans have millions of such sets."""
    return sum(BITS[op] for op in ops)


def ops_in(bits: int) -> list[Op]:
    return [op for op in Op if bits & BITS[op]]


class RankIndex:
    """An index of one rank's actions on each part of each microbatch, made once for all rules and freed before the next rank's."""

    def __init__(self, plan: Plan, rank: int, stages: Sequence[int]) -> None:
        self.plan, self.rank, self.stages = plan, rank, dict.fromkeys(stages)  # in order, and found at once
        self.lane = (*plan.actions[rank], *plan.served[rank])
        self.num_computing = len(plan.actions[rank])
        self.at: defaultdict[Kind, dict[int, int]] = defaultdict(dict)  # where each microbatch stands in `lane`
        self.repeated: list[int] = []  # the actions that stand a second time
        for index, (op, stage, microbatch, part, _) in enumerate(self.lane):
            found = self.at[op, stage, part]
            if microbatch not in found:
                found[microbatch] = index
            elif op not in SHARDING:
                self.repeated.append(index)

    @cached_property
    def present(self) -> defaultdict[tuple[int, int], list[int]]:
        """The operations on each microbatch, by stage and part."""
        present: defaultdict[tuple[int, int], list[int]] = defaultdict(lambda: [0] * self.plan.num_units)
        for (op, stage, part), found in self.at.items():
            bits, bit = present[stage, part], 0 if op in SHARDING else BITS[op]
            for microbatch in found:
                bits[microbatch] |= bit
        return present

    def there(self, which: PartKey) -> int:
        """Return the operations on a part of a microbatch; none for microbatch -1."""
        stage, microbatch, part = which
        return self.present[stage, part][microbatch] if microbatch >= 0 else 0

    def acceptor(self, which: PartKey) -> int | None:
        """Return the peer to which a part is evicted, or None."""
        stage, microbatch, part = which
        index = self.at.get((Op.EVICT, stage, part), {}).get(microbatch)
        return None if index is None else self.lane[index].peer

    def show(self, action: Action) -> str:
        """Write an action for people."""
        return self.plan.show(action)

    def is_served(self, index: int) -> bool:
        """Return whether an action of `lane` is in the served lane."""
        return index >= self.num_computing

    def place(self, index: int | None) -> Place | None:
        if index is None:
            return None
        served = self.is_served(index)
        return self.rank, served, index - self.num_computing * served

    def find(self, op: Op, which: PartKey) -> int | None:
        """Return the index of an action in `lane`, with any part if the whole is asked for; None if it is missing."""
        stage, microbatch, part = which
        return self.at.get((op, stage, part), {}).get(microbatch) if part else self._first.get((op, stage, microbatch))

    @cached_property
    def _first(self) -> dict[OpKey, int]:
        """Where each operation on a microbatch stands first, with any part."""
        return {action.op_key: index for index, action in reversed(list(enumerate(self.lane)))}


Rule = Callable[[RankIndex], Iterator[Finding]]
