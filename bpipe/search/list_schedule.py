"""List scheduling: whenever a rank is free, it begins what comes first by a rule among all that can begin and fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from bpipe.plan.action import BACKWARD, Op
from bpipe.search.job_shop import JobShop, Lanes

__all__: list[str] = []

DEFERRED = 2  # the class of W: it runs where a rank would wait
CLASS = {Op.B: 0, Op.I: 0, Op.R: 0, Op.F: 1, Op.W: DEFERRED}


class Rule(NamedTuple):
    """A rule that says what comes first."""

    forwards_first: bool = False  # whether forwards come before backwards, as long as they fit
    deepest_first: bool = True  # whether the later of a rank's stages come first, else the earlier ones
    patience: float = 1.0  # the share of a W that must fit before the next other computation is known to be ready
    most: Sequence[int] | None = None  # microbatches that each stage has between forward and backward at once; default: any number
    reserves: bool = False  # whether a forward leaves room for what all microbatches that have begun will take on its rank
    like: Sequence[float] | None = None  # when each item begins in another order, by number: what begins first there comes first


RULES = [
    Rule(first, deepest, patience, reserves=reserves)
    for patience in (1.0, 0.5, 0.0)
    for first in (False, True)
    for deepest in (True, False)
    for reserves in (False, True)
]


def listed(shop: JobShop, limits: Sequence[int | None], rule: Rule) -> Lanes | None:
    """Return the order that a rule leads to, within limits of memory; None if it leads to a rank that waits forever.

    Args:
        shop: the computations; those of a stage keep their order.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
        rule: what comes first.
    """
    listing = _Listing(shop, limits, rule)
    listing.run()
    return None if any(queue.numbers for queues in listing.queues for queue in queues) else listing.lanes


class _Queue(NamedTuple):
    """The computations of a rank that have an order among themselves: those of a kind and stage."""

    key: tuple[int, int]  # what comes first by the rule, if it does not follow another order
    op: Op
    stage: int
    numbers: list[int]  # the next one last


class _Listing:
    """An order that grows at its end, in the order of time."""

    def __init__(self, shop: JobShop, limits: Sequence[int | None], rule: Rule) -> None:
        self._shop, self._limits, self._rule = shop, [inf if limit is None else limit for limit in limits], rule
        self.queues = self._queued()
        self.lanes: Lanes = [[] for _ in shop.lanes]
        self._missing = [len(makers) + len(earlier) for makers, earlier in zip(shop.makers, shop.earlier)]
        self._ready_s = [0.0] * len(shop.actions)
        self._free_s = [0.0] * shop.num_links
        self._held = [0] * len(shop.lanes)
        self._kept: list[dict[int, int]] = [{} for _ in shop.lanes]  # what each unit on a rank holds there
        self._coming: list[dict[int, int]] = [defaultdict(int) for _ in shop.lanes]  # and will take in the rank's later stages
        for action, rank, takes in zip(shop.actions, shop.rank, shop.takes):
            if action.op is Op.F:
                self._coming[rank][action.microbatch] += takes
        self._begun = [0] * shop.plan.num_stages  # microbatches between forward and backward
        self._agenda: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(shop.lanes))]
        self._idle = [False] * len(shop.lanes)

    def _queued(self) -> list[list[_Queue]]:
        """Return the queues of each rank, in the order in which they come first by the rule."""
        shop = self._shop
        numbers: dict[tuple[Op, int], list[int]] = defaultdict(list)
        for number, (op, stage, *_) in enumerate(shop.actions):
            numbers[Op.B if op is Op.I else op, stage].append(number)
        queues: list[list[_Queue]] = [[] for _ in shop.lanes]
        for (op, stage), of_kind in numbers.items():
            queues[shop.rank[of_kind[0]]].append(_Queue(self._key(op, stage), op, stage, of_kind[::-1]))
        return [sorted(of_rank, key=lambda queue: queue.key) for of_rank in queues]

    def _key(self, op: Op, stage: int) -> tuple[int, int]:
        rank_of_op = CLASS[op]
        if self._rule.forwards_first and rank_of_op < DEFERRED:
            rank_of_op = 1 - rank_of_op
        return rank_of_op, -stage if self._rule.deepest_first else stage

    def run(self) -> None:
        while self._agenda:
            now, rank = heappop(self._agenda)
            chosen, later_s = self._chosen(rank, now)
            if chosen is not None:
                self._begin(rank, chosen, now)
            elif later_s < inf:
                heappush(self._agenda, (later_s, rank))
            else:
                self._idle[rank] = True

    def _chosen(self, rank: int, now: float) -> tuple[_Queue | None, float]:
        """Return the queue whose next computation begins, or None and when to look again."""
        like, best, later_s = self._rule.like, None, inf
        for queue in self.queues[rank]:
            if not queue.numbers or self._missing[number := queue.numbers[-1]] or not self._has_room(rank, queue, number):
                continue
            if self._ready_s[number] > now:
                later_s = min(later_s, self._ready_s[number])
            elif like is not None:
                if best is None or like[number] < like[best.numbers[-1]]:
                    best = queue
            else:
                best = queue
                break
        if best is None or like is not None or best.key[0] != DEFERRED:
            return best, later_s
        is_short = later_s - now < self._rule.patience * self._shop.seconds[best.numbers[-1]]
        return (None if is_short else best), later_s

    def _has_room(self, rank: int, queue: _Queue, number: int) -> bool:
        """Return whether the next computation of a queue fits."""
        if self._held[rank] + self._shop.takes[number] > self._limits[rank]:
            return False
        if queue.op is not Op.F:
            return True
        most = self._rule.most
        return (most is None or self._begun[queue.stage] < most[queue.stage]) and self._can_end(rank, number)

    def _can_end(self, rank: int, number: int) -> bool:
        """Return whether all units of a rank can end one after the other if a forward begins (the banker's algorithm)."""
        _, _, unit, *_ = self._shop.actions[number]
        takes, kept, coming = self._shop.takes[number], self._kept[rank], self._coming[rank]
        free = self._limits[rank] - self._held[rank] - takes
        if self._rule.reserves and sum(coming[other] for other in kept if other != unit) > free:
            return False
        for other, held in kept.items() if unit in kept else (*kept.items(), (unit, 0)):
            own = takes if other == unit else 0
            if coming[other] - own > free:
                return False
            free += held + own
        return True

    def _begin(self, rank: int, queue: _Queue, now: float) -> None:
        shop, number, missing = self._shop, queue.numbers.pop(), self._missing
        self.lanes[rank].append(number)
        _, _, unit, *_ = shop.actions[number]
        kept, coming, takes = self._kept[rank], self._coming[rank], shop.takes[number]
        self._held[rank] += takes - shop.gives[number]
        kept[unit] = kept.get(unit, 0) + takes - shop.gives[number]
        coming[unit] -= takes if queue.op is Op.F else 0
        if not kept[unit] and not coming[unit]:
            del kept[unit]
        self._begun[queue.stage] += (queue.op is Op.F) - (queue.op in BACKWARD)
        for later in shop.later[number]:
            missing[later] -= 1
        end = now + shop.seconds[number]
        for consumer, link, takes_s, latency_s in shop.consumers[number]:
            arrived = end
            if link >= 0:
                self._free_s[link] = max(self._free_s[link], end) + takes_s
                arrived = self._free_s[link] + latency_s
            self._ready_s[consumer] = max(self._ready_s[consumer], arrived)
            missing[consumer] -= 1
            other = shop.rank[consumer]
            if not missing[consumer] and self._idle[other]:
                self._idle[other] = False
                heappush(self._agenda, (max(now, self._ready_s[consumer]), other))
        heappush(self._agenda, (end, rank))


def most_begun(shop: JobShop, lanes: Lanes) -> list[int]:
    """Return how many microbatches each stage has between forward and backward at once, in an order."""
    most, begun = [0] * shop.plan.num_stages, [0] * shop.plan.num_stages
    for lane in lanes:
        for number in lane:
            op, stage, *_ = shop.actions[number]
            begun[stage] += (op is Op.F) - (op in BACKWARD)
            most[stage] = max(most[stage], begun[stage])
    return most
