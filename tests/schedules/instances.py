"""Small problems of the balance pass on which an exact search ends in time: any schedule, uneven stages, parts."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import NamedTuple

from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Op, Plan, Sizes, StageSizes, build, finish
from tests.schedules.exact import fewest_bytes


class Instance(NamedTuple):
    """A schedule, the sizes of the parts of a microbatch by stage, static bytes by rank, and a budget for all ranks."""

    name: str
    num_ranks: int
    num_microbatches: int
    parts: tuple[tuple[int, ...], ...]
    static: tuple[int, ...]
    budget: int

    @property
    def plan(self) -> Plan:
        return computations_only(build(self.name, len(self.parts), self.num_microbatches, num_ranks=self.num_ranks))

    @property
    def sizes(self) -> Sizes:
        return Sizes(stages=tuple(StageSizes(parts=parts) for parts in self.parts), static=self.static)

    def bytes_moved(self) -> tuple[int, int]:
        """By the balance pass, and at least by any."""
        balanced = balance(self.plan, sizes=self.sizes, budgets=self.budget)
        moved = sum(self.sizes.moved(action) for lane in balanced.actions for action in lane if action.op is Op.EVICT)
        return moved, fewest_bytes(self.plan, self.sizes, [self.budget] * self.num_ranks)


def some(random: Random) -> Instance:
    """Any instance in which something must move."""
    while True:
        name = random.choice(["1f1b", "1f1b", "interleaved_1f1b", "gpipe", "zbv", "v_half"])
        has_one = name in ("1f1b", "gpipe")
        p, m = random.randint(3, 6) if has_one else random.randint(2, 4), random.randint(4, 12)
        m = p * max(1, m // p) if name == "interleaved_1f1b" else m
        parts = tuple(_parts(random, p if has_one else 2 * p))
        drawn = Instance(name, p, m, parts, tuple(random.randint(0, 20) for _ in range(p)), 0)
        highest = max(finish(replace(drawn.plan, sizes=drawn.sizes)).device_peak_bytes)
        lowest = max(finish(balance(drawn.plan, sizes=drawn.sizes)).device_peak_bytes)
        if lowest < highest:
            return drawn._replace(budget=random.choice([lowest, random.randint(lowest, highest - 1)]))


def _parts(random: Random, num_stages: int) -> list[tuple[int, ...]]:
    kind = random.choice(["even", "uneven", "uneven", "even parts", "uneven parts", "uneven parts"])
    if kind == "even":
        return [(8,)] * num_stages
    if kind == "even parts":
        return [(2, 2, 2)] * num_stages
    if kind == "uneven":
        return [(random.randint(3, 12),) for _ in range(num_stages)]
    return [tuple(random.randint(1, 6) for _ in range(random.randint(1, 3))) for _ in range(num_stages)]
