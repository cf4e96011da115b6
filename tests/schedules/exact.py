"""The fewest bytes that any balance pass can move: a small exact search (mixed integer linear program, HiGHS).

It has the pass's rules of time: forwards and backwards are whole, an eviction runs during the step before the one that needs its
memory, a load during the step before its backward, both count at both ends, and acceptors keep buffers for remote activations
whatever they compute. It is looser in what a link carries at once, and in buffers, where a small remote activation may not need one
that a large one has left; so it is a lower bound, and not always one that can be reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from bpipe.passes.balance.rank_steps import steps_of
from bpipe.passes.communicate import communicate
from bpipe.plan.order import clock_of
from bpipe.schedules import Plan, Sizes

SECONDS = 5.0  # of one search; what it has proven by then is a bound all the same, which may be 0

Term = tuple[int, float]  # column, factor


class Choice(NamedTuple):
    """A part of a microbatch leaves a rank, is gone before a step, and stays at a peer until it is needed."""

    rank: int
    which: tuple[int, int, int]
    size: int
    left: int
    needed: int
    peer: int


@dataclass
class Rows:
    """Sums that may not exceed a bound."""

    entries: list[tuple[int, int, float]] = field(default_factory=list)  # row, column, factor
    bounds: list[float] = field(default_factory=list)

    def add(self, terms: Iterable[Term], most: float) -> None:
        self.entries += [(len(self.bounds), column, factor) for column, factor in terms]
        self.bounds.append(most)

    def constraint(self, num_columns: int) -> LinearConstraint:
        rows, columns, factors = zip(*self.entries)
        return LinearConstraint(csr_array((factors, (rows, columns)), shape=(len(self.bounds), num_columns)), ub=self.bounds)


def fewest_bytes(plan: Plan, sizes: Sizes, budgets: Sequence[int]) -> int:
    """The fewest bytes that evictions from ranks over their budget to the others must move to keep all within theirs."""
    return _Search(replace(plan, sizes=sizes), budgets).solve()


class _Search:
    """A column for each choice, 1 if it is made; and for each pair of ranks, the room that one has for the other's activations."""

    def __init__(self, plan: Plan, budgets: Sequence[int]) -> None:
        assert plan.sizes is not None
        times = clock_of(plan, [plan.compute(rank) for rank in range(plan.num_ranks)])
        self.sizes, self.ranks = plan.sizes, steps_of(plan, communicate(plan, times), times)
        over = [steps.peak > budget for steps, budget in zip(self.ranks, budgets)]
        self.budgets = budgets
        self.choices = [
            Choice(rank, which, self.size(which), left, stay.needed, peer)
            for rank, steps in enumerate(self.ranks)
            if over[rank]
            for which, stay in steps.stays.items()
            for left in range(stay.leaves, stay.needed - 1)
            for peer in range(plan.num_ranks)
            if not over[peer]
        ]
        pairs = sorted({(choice.rank, choice.peer) for choice in self.choices})
        self.remote_buffers = {pair: len(self.choices) + index for index, pair in enumerate(pairs)}

    def size(self, which: tuple[int, int, int]) -> int:
        return self.sizes.stages[which[0]].moved(which[2])

    def solve(self) -> int:
        if not self.choices:
            return 0
        is_choice = np.array([1] * len(self.choices) + [0] * len(self.remote_buffers))
        cost = [choice.size for choice in self.choices] + [0] * len(self.remote_buffers)
        found = milp(
            cost,
            integrality=is_choice,
            bounds=Bounds(0, np.where(is_choice, 1, np.inf)),
            constraints=self.rows().constraint(len(cost)),
            options={"time_limit": SECONDS},
        )
        assert found.status in (0, 1), found.message
        return ceil((found.mip_dual_bound or 0) - 1e-6)

    def rows(self) -> Rows:
        rows = Rows()
        for rank in range(len(self.ranks)):
            self.keep_within(rows, rank)
        for terms in self.once():
            rows.add(terms, 1)
        for pair, column in self.remote_buffers.items():
            for terms in self.remotes(*pair):
                rows.add([*terms, (column, -1.0)], 0)
        return rows

    def keep_within(self, rows: Rows, rank: int) -> None:
        """At each step: what is there, less what is away, and buffers for others, within the limit."""
        away: dict[int, list[Term]] = defaultdict(list)
        for column, choice in enumerate(self.choices):
            for step in range(choice.left, choice.needed - 1) if choice.rank == rank else ():
                away[step].append((column, -choice.size))
        remotes = [(column, 1.0) for (_, acceptor), column in self.remote_buffers.items() if acceptor == rank]
        for step, occupied in enumerate(self.ranks[rank].occupied or [0]):
            rows.add([*away[step], *remotes], self.budgets[rank] - occupied)

    def once(self) -> Iterator[list[Term]]:
        """The choices for each part, of which one can be made."""
        of: dict[tuple[int, int, int], list[Term]] = defaultdict(list)
        for column, choice in enumerate(self.choices):
            of[choice.which].append((column, 1))
        yield from of.values()

    def remotes(self, evictor: int, acceptor: int) -> Iterator[list[Term]]:
        """What one rank keeps for another at each step of that."""
        at: dict[int, list[Term]] = defaultdict(list)
        for column, choice in enumerate(self.choices):
            if (choice.rank, choice.peer) == (evictor, acceptor):
                for step in range(choice.left - 1, choice.needed):
                    at[step].append((column, choice.size))
        yield from at.values()
