"""List scheduling: whenever a rank is free, it begins what comes first by a rule among all that can begin and fits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
    like: Sequence[float] | None = None  # when each item begins in another order, by number: what begins first there comes first


RULES = [Rule(first, deepest, patience) for first in (False, True) for deepest in (True, False) for patience in (1.0, 0.5, 0.0)]


def listed(shop: JobShop, limits: Sequence[int | None], rule: Rule) -> Lanes | None:
    """Return the order that a rule leads to, within limits of memory; None if it leads to a rank that waits forever.

    Args:
        shop: the computations; those of a stage keep their order.
        limits: the most memory of each rank's own microbatches, in the plan's unit; None: no limit.
        rule: what comes first.
    """
    return _Listing(shop, limits, rule).run()


class _Listing:
    """An order that grows at its end, in the order of time."""

    def __init__(self, shop: JobShop, limits: Sequence[int | None], rule: Rule) -> None:
        self._shop, self._limits, self._rule = shop, [inf if limit is None else limit for limit in limits], rule
        queues: dict[tuple[Op, int], list[int]] = defaultdict(list)
        for number, action in enumerate(shop.actions):
            queues[Op.B if action.op is Op.I else action.op, action.stage].append(number)
        self._queues: list[list[list[int]]] = [[] for _ in shop.lanes]
        for queue in queues.values():
            self._queues[shop.rank[queue[0]]].append(queue[::-1])  # the next one last
        self._missing = list(map(len, shop.makers))
        self._ready_s = [0.0] * len(shop.actions)
        self._free_s = [0.0] * shop.num_links
        self._done = bytearray(len(shop.actions))
        self._held = [0] * len(shop.lanes)
        self._begun = [0] * shop.plan.num_stages  # microbatches between forward and backward
        self._agenda: list[tuple[float, int]] = [(0.0, rank) for rank in range(len(shop.lanes))]
        self._idle = [False] * len(shop.lanes)
        self._lanes: Lanes = [[] for _ in shop.lanes]

    def run(self) -> Lanes | None:
        while self._agenda:
            now, rank = heappop(self._agenda)
            chosen, later_s = self._chosen(rank, now)
            if chosen is not None:
                self._begin(rank, chosen, now)
            elif later_s < inf:
                heappush(self._agenda, (later_s, rank))
            else:
                self._idle[rank] = True
        return None if any(queue for queues in self._queues for queue in queues) else self._lanes

    def _chosen(self, rank: int, now: float) -> tuple[list[int] | None, float]:
        """Return the queue whose next computation begins, or None and when to look again."""
        best, best_key, later_s = None, (inf, inf), inf
        for queue in self._able(rank):
            number = queue[-1]
            if self._ready_s[number] > now:
                later_s = min(later_s, self._ready_s[number])
                continue
            key = self._key(number)
            if key < best_key:
                best, best_key = queue, key
        if best is None or self._rule.like is not None or best_key[0] != DEFERRED:
            return best, later_s
        is_short = later_s - now < self._rule.patience * self._shop.seconds[best[-1]]
        return (None if is_short else best), later_s

    def _able(self, rank: int) -> Iterator[list[int]]:
        """Yield the queues whose next computation has, or will have, what it needs, and fits."""
        shop = self._shop
        for queue in self._queues[rank]:
            if queue and not self._missing[queue[-1]] and all(self._done[other] for other in shop.earlier[queue[-1]]):
                number = queue[-1]
                more = self._held[rank] + shop.takes[number]
                op, stage, *_ = shop.actions[number]
                if op is Op.F and self._held[rank]:
                    more += self._reserved(rank, stage)
                is_most = op is Op.F and self._rule.most is not None and self._begun[stage] >= self._rule.most[stage]
                if more <= self._limits[rank] and not is_most:
                    yield queue

    def _reserved(self, rank: int, stage: int) -> int:
        """Return what the later stages of a rank need for one microbatch, so that one which is begun can end."""
        shop, queues = self._shop, self._queues[rank]
        last = [queue[-1] for queue in queues if queue]
        return sum(shop.takes[n] for n in last if shop.actions[n].op is Op.F and shop.actions[n].stage > stage)

    def _key(self, number: int) -> tuple[float, float]:
        if self._rule.like is not None:
            return self._rule.like[number], 0.0
        op, stage, *_ = self._shop.actions[number]
        rank_of_op = CLASS[op]
        if self._rule.forwards_first and rank_of_op < DEFERRED:
            rank_of_op = 1 - rank_of_op
        return rank_of_op, -stage if self._rule.deepest_first else stage

    def _begin(self, rank: int, queue: list[int], now: float) -> None:
        shop, number = self._shop, queue.pop()
        self._lanes[rank].append(number)
        self._done[number] = 1
        self._held[rank] += shop.takes[number] - shop.gives[number]
        op, stage, *_ = shop.actions[number]
        self._begun[stage] += (op is Op.F) - (op in BACKWARD)
        end = now + shop.seconds[number]
        for consumer, link, takes_s, latency_s in shop.consumers[number]:
            arrived = end
            if link >= 0:
                self._free_s[link] = max(self._free_s[link], end) + takes_s
                arrived = self._free_s[link] + latency_s
            self._ready_s[consumer] = max(self._ready_s[consumer], arrived)
            self._missing[consumer] -= 1
            other = shop.rank[consumer]
            if not self._missing[consumer] and self._idle[other]:
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
