"""A step as a job shop: its work as numbers, how long an order of it takes, and whether it fits into memory.

Each rank is a machine that runs one computation at a time, and each microbatch a job that passes the machines. A message starts
when its computation has ended and its link is free; evictions and loads start where they stand in a lane, and end where they are
waited for. This is nearly the simulator's model, in a fraction of its time, so that a search can try thousands of orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from math import inf
from typing import NamedTuple

from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import has_own_losses, paths_of
from bpipe.passes.balance.insert_evictions import mirrored
from bpipe.passes.communicate import received_by
from bpipe.plan.action import COMPUTE, HOST, Action, Identity, Op, OpKey
from bpipe.plan.order import needs
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs

__all__: list[str] = []

Lanes = list[list[int]]  # for each rank the numbers of its computations, in the order in which it runs them
SAME_RANK = -1  # the link of a result that stays on its rank

RESULTS = frozenset({Op.F, Op.B, Op.I})  # computations that get messages
MOVES = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD})
ITEMS = COMPUTE | MOVES

# The orders in which a stage takes its microbatches, by what is among them: a whole backward counts as I and W.
SERIES = {Op.F: (Op.F,), Op.B: (Op.I, Op.W), Op.I: (Op.I,), Op.W: (Op.W,), Op.R: (Op.R,)}
# What comes before on the same stage, for one microbatch, or for one part of it.
BEFORE = {
    **{Op.F: (), Op.R: (Op.F,), Op.B: (Op.F, Op.R, Op.WAIT_LOAD), Op.I: (Op.F, Op.R, Op.WAIT_LOAD), Op.W: (Op.I,)},
    **{Op.EVICT: (Op.F,), Op.WAIT_EVICT: (Op.EVICT,), Op.LOAD: (Op.WAIT_EVICT,), Op.WAIT_LOAD: (Op.LOAD,)},
}


# How a result comes to its consumer: the place of its link, on which messages take turns, or SAME_RANK; the seconds for which it
# takes up the link; and the latency from then on until it has arrived.
Message = tuple[int, float, float]


class Consumer(NamedTuple):
    """An item that waits for the result of another one, and the message that brings it."""

    number: int
    link: int
    seconds: float
    latency_s: float


class Times(NamedTuple):
    """When the computations of an order run."""

    begin_s: list[float]  # by number
    rank_s: list[float]  # when each rank has computed everything

    @property
    def step_s(self) -> float:
        """When all ranks have computed everything."""
        return max(self.rank_s)


class JobShop:
    """The work of a plan: what each item of it needs, how long it takes, and what it allocates and frees.

    Args:
        plan: a plan of whole computations, with or without evictions and recomputations; its messages and pairs are left out.
        costs: how long computations and transfers take.

    Attributes:
        actions: the items: computations, and where evictions and loads start and are waited for. An item's number is its place.
        lanes: the order of the plan.
        rank: of each item.
        seconds: that each item takes.
        consumers: of the result of each item.
        makers: the items whose results each item waits for.

    Raises:
        ConfigurationError: each microbatch of the plan has a path of its own, or its gradients stay in their stages.
    """

    def __init__(self, plan: Plan, costs: Costs) -> None:
        if has_own_losses(plan.flow) or paths_of(plan.flow):
            raise ConfigurationError(f"{plan.name}: orders are searched for plans whose microbatches pass all stages and come back")
        self.plan = plan
        lanes = [[action for action in lane if action[0] in ITEMS] for lane in plan.actions]
        self.actions = [action for lane in lanes for action in lane]
        self.rank = [rank for rank, lane in enumerate(lanes) for _ in lane]
        numbers = iter(range(len(self.actions)))
        self.lanes: Lanes = [list(islice(numbers, len(lane))) for lane in lanes]
        seconds = costs.seconds_of(plan)
        self._costs = costs
        self.seconds = [seconds(*action[:3]) if action[0] in COMPUTE else 0.0 for action in self.actions]
        self._number: dict[Identity, int] = {action.identity: number for number, action in enumerate(self.actions)}
        self._links: dict[tuple[int, int, bool], int] = {}
        self.consumers = self._consumers()
        self.makers = _reversed([[one[0] for one in consumers] for consumers in self.consumers])
        self._num_results = list(map(len, self.makers))

    @cached_property
    def earlier(self) -> list[list[int]]:
        """The items of the same stage that each one comes after."""
        of_unit: dict[OpKey, list[int]] = defaultdict(list)
        for number, action in enumerate(self.actions):
            of_unit[action.op_key].append(number)
        latest: dict[tuple[Op, int], int] = {}
        found: list[list[int]] = []
        for number, (op, stage, unit, part, _) in enumerate(self.actions):
            before = [other for op_before in BEFORE[op] for other in of_unit.get((op_before, stage, unit), ())]
            if op in MOVES:  # a part that moves comes after the forward, and after its own moves
                before = [other for other in before if self.actions[other].part == part or self.actions[other].op is Op.F]
            series = SERIES.get(op, ())
            found.append(before + [latest[one, stage] for one in series if (one, stage) in latest])
            latest.update(((one, stage), number) for one in series)
        return found

    @cached_property
    def later(self) -> list[list[int]]:
        """The items of the same stage that come after each one."""
        return _reversed(self.earlier)

    @property
    def num_links(self) -> int:
        """The number of links that messages, evictions and loads take."""
        return len(self._links)

    @cached_property
    def takes(self) -> list[int]:
        """What each item allocates before it runs, in the plan's unit of memory."""
        return [taken for taken, _ in self._amounts]

    @cached_property
    def gives(self) -> list[int]:
        """What each item frees after it has run."""
        return [given for _, given in self._amounts]

    def _consumers(self) -> list[list[Consumer]]:
        inputs: dict[OpKey, list[tuple[Op, int, Message]]] = {}  # by kind: microbatches are alike, but for the sizes of slices
        consumers: list[list[Consumer]] = [[] for _ in self.actions]
        for number, (action, rank) in enumerate(zip(self.actions, self.rank)):
            op, stage, unit, *_ = action
            if op in (Op.WAIT_EVICT, Op.WAIT_LOAD):
                post = self._number[action.start_identity]
                consumers[post].append(Consumer(number, *self._message(self.actions[post], rank)))
            elif op in RESULTS:
                kind = op, stage, unit % (self.plan.slices * self.plan.flow.period)
                if kind not in inputs:
                    inputs[kind] = list(self._inputs(action, rank))
                for made, source_stage, message in inputs[kind]:
                    consumers[self.made_by((made, source_stage, unit))].append(Consumer(number, *message))
        return consumers

    def _inputs(self, action: Action, rank: int) -> Iterator[tuple[Op, int, Message]]:
        """Yield the results that a computation on a rank needs from others, and how each of them comes there."""
        needed = needs(self.plan.flow, action)
        # Its own forward comes before a backward anyway: that is waited for where the backward gets nothing else.
        for op, stage, _ in [need for need in needed if need[1] != action.stage] or needed:
            if self.plan.stage_ranks[stage] == rank:
                yield op, stage, (SAME_RANK, 0.0, 0.0)
        for receive in received_by(self.plan, action):
            yield Op.F if action.op is Op.F else Op.B, self.plan.other_end(receive)[1], self._message(receive, rank)

    def _message(self, post: Action, rank: int) -> Message:
        """Return how a transfer comes to its end, which a rank receives, or sends if it is an eviction."""
        assert post.peer is not None
        ends = (rank, post.peer) if post.op is Op.EVICT else (post.peer, rank)
        # Loads are posted at their other end, so that they have turns of their own here.
        place = self._links.setdefault((*ends, post.op is Op.LOAD), len(self._links))
        sizes, link = self.plan.sizes, self._costs.link_between(*ends)
        carried = self._costs.carried(post) if sizes is None else sizes.carried(post, self.plan.flow)
        return place, carried / link.bytes_per_s, link.latency_s

    def made_by(self, result: OpKey) -> int:
        """Return the computation that makes a result; I makes that of a whole backward."""
        whole = self._number.get((*result, 0))
        return self._number[Op.I, *result[1:], 0] if whole is None else whole

    @cached_property
    def _amounts(self) -> list[tuple[int, int]]:
        meter = self.plan.meter() if self.plan.sizes is None else self.plan.activations_meter()
        again = {action.key for action in self.actions if action.op is Op.R}
        return [meter.change(action, again=action.key in again) for action in self.actions]

    def run(self, lanes: Lanes) -> Times | None:
        """Return when everything runs in an order; None if it never ends, because ranks wait for each other in a cycle."""
        seconds, consumers, rank_of = self.seconds, self.consumers, self.rank
        missing, ready_s, begin_s = self._num_results.copy(), [0.0] * len(rank_of), [0.0] * len(rank_of)
        free_s, now_s = [0.0] * self.num_links, [0.0] * len(lanes)
        positions, awaited = [0] * len(lanes), [-1] * len(lanes)
        runnable = list(range(len(lanes)))
        while runnable:
            rank = runnable.pop()
            lane, now, position = lanes[rank], now_s[rank], positions[rank]
            for number in lane[position:]:
                if missing[number]:
                    awaited[rank] = number
                    break
                if ready_s[number] > now:
                    now = ready_s[number]
                begin_s[number] = now
                now += seconds[number]
                position += 1
                for consumer, link, takes_s, latency_s in consumers[number]:
                    arrived = now
                    if link >= 0:
                        if free_s[link] > now:
                            arrived = free_s[link]
                        arrived += takes_s
                        free_s[link] = arrived
                        arrived += latency_s
                    if arrived > ready_s[consumer]:
                        ready_s[consumer] = arrived
                    missing[consumer] -= 1
                    if not missing[consumer] and awaited[rank_of[consumer]] == consumer:
                        awaited[rank_of[consumer]] = -1
                        runnable.append(rank_of[consumer])
            positions[rank], now_s[rank] = position, now
        return Times(begin_s, now_s) if all(map(int.__eq__, positions, map(len, lanes))) else None

    def step_s(self, lanes: Lanes) -> float:
        """Return how long an order takes; infinite if it never ends."""
        times = self.run(lanes)
        return inf if times is None else times.step_s

    def fits(self, lane: Sequence[int], limit: int | None) -> bool:
        """Return whether a rank may run its computations in an order, and needs no more memory than a limit."""
        done, held, earlier, takes, gives = set[int](), 0, self.earlier, self.takes, self.gives
        for number in lane:
            for other in earlier[number]:
                if other not in done:
                    return False
            done.add(number)
            held += takes[number]
            if limit is not None and held > limit:
                return False
            held -= gives[number]
        return True

    def peaks(self, lanes: Lanes) -> list[int]:
        """Return the most memory that each rank's own microbatches take, in the plan's unit."""
        return [max(self._held(lane), default=0) for lane in lanes]

    def _held(self, lane: Sequence[int]) -> Iterator[int]:
        held = 0
        for number in lane:
            held += self.takes[number]
            yield held
            held -= self.gives[number]

    def numbered(self, plan: Plan) -> Lanes:
        """Return the order of another plan of the same items."""
        return [self.numbers(action for action in lane if action[0] in ITEMS) for lane in plan.actions]

    def numbers(self, actions: Iterable[Action]) -> list[int]:
        """Return the numbers of some items."""
        return [self._number[action.identity] for action in actions]

    def plan_of(self, lanes: Lanes) -> Plan:
        """Return the plan of an order, without messages."""
        actions = [tuple(self.actions[number] for number in lane) for lane in lanes]
        served: list[list[Action]] = [[] for _ in lanes]
        for rank, lane in enumerate(actions):
            for peer in sorted({action.peer for action in lane if action.peer is not None and action.peer != HOST}):
                served[peer] += mirrored(lane, rank, peer)
        return replace(self.plan, actions=tuple(actions), served=tuple(map(tuple, served)), overlapped=frozenset())


def _reversed(arcs: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return for each item those that have it among theirs."""
    back: list[list[int]] = [[] for _ in arcs]
    for number, others in enumerate(arcs):
        for other in others:
            back[other].append(number)
    return back
