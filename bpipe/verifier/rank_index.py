"""An index of one rank's actions, made once for all rules that concern a single rank, and what the plan's flow expects of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property

from bpipe.passes.communicate import received_by, sent_by
from bpipe.plan.action import SHARDING, WAIT_OF, Action, Op, OpKey, PartKey
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
        self.flow = plan.flow
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
        """Return the operations on a part of a microbatch."""
        stage, microbatch, part = which
        return self.present[stage, part][microbatch]

    @cached_property
    def messages(self) -> dict[tuple[int, int], dict[tuple[Op, int], int]]:
        """What the flow expects, by stage and turn: the messages with other ranks, by operation and part, and the rank of each."""
        expected: dict[tuple[int, int], dict[tuple[Op, int], int]] = {}
        for stage in self.stages:
            for turn in self.flow.turns_of(stage):
                found = expected[stage, turn] = {}
                for op in (Op.F, Op.B):
                    for action in self.transfers(op, stage, turn):
                        assert action.peer is not None
                        found |= {(one, action.part): action.peer for one in (action.op, WAIT_OF[action.op])}
        return expected

    def transfers(self, op: Op, stage: int, turn: int) -> Iterator[Action]:
        """Yield the messages before and behind a computation, for the first unit of a turn."""
        action = Action(op, stage, self.flow.units.of(turn)[0])
        yield from received_by(self.plan, action)
        yield from sent_by(self.plan, action)

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
