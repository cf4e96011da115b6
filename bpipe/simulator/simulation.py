"""Run a plan on a cost model: the discrete events of its lanes and links, in the order of time.

A lane runs its actions one after the other. A transfer starts when both of its ends are posted and its link is free, and
overlaps all computations of the lanes; each direction between two ranks is a link, which carries one transfer at a time, in the
order in which they became ready. A host is always ready, and each direction between a rank and its host is a link too. Gathering
and freeing weights takes no time here.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from heapq import heappop, heappush
from itertools import repeat
from operator import sub
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import COMPUTE, HOST, POSTS, RECEIVES, SENDS, SHARDING, START_OF, Action, Identity, Op, Purpose
from bpipe.plan.collector import collector_paused
from bpipe.plan.meter import Meter, meter_of, occupancy
from bpipe.plan.plan import Plan
from bpipe.simulator.costs import Costs
from bpipe.simulator.timeline import Lane, Timeline

__all__ = ["simulate"]

Ends = tuple[Purpose, int, int, bool]  # a channel, and whether its sends or its receives


def simulate(plan: Plan, costs: Costs) -> Timeline:
    """Predict when each action of a plan runs and the bytes of each rank.

    If the plan has sizes, all bytes, including those of messages, are its own, and the costs' bytes are ignored; bytes that
    microbatches share are static there. If the plan counts slots, all bytes are the costs': then messages take time but no memory,
    and static bytes are known only if `static_bytes` was given.

    It takes a few microseconds and 32 bytes per action.

    Args:
        plan: a verified plan.
        costs: the costs of its actions.

    Raises:
        ConfigurationError: a series of costs does not fit the plan.
        PlanError: the plan's lanes wait for each other in a cycle, so it is not a verified plan.

    Example:
        >>> from bpipe.schedules import build
        >>> plan = build("balanced_1f1b", 4, 8)
        >>> simulate(plan, Costs()).makespan_s == simulate(build("1f1b", 4, 8), Costs()).makespan_s
        True
    """
    events = _run(plan, costs)
    return Timeline(
        plan=plan,
        actions=tuple(_recorded(plan, costs, rank, lane) for rank, lane in enumerate(events.compute)),
        served=tuple(_merged(plan, rank, chains) for rank, chains in enumerate(events.chains)),
    )


def simulated_times(plan: Plan, costs: Costs) -> Timeline:
    """Do what `simulate` does without the bytes of ranks, where a search needs no more than when computations run."""
    events = _run(plan, costs)
    lanes = tuple(Lane(begin_s=lane.begin_s, end_s=lane.end_s) for lane in events.compute)
    return Timeline(plan=plan, actions=lanes, served=())


def _run(plan: Plan, costs: Costs) -> _Events:
    costs.check(plan)
    with collector_paused():
        events = _Events(plan, costs)
        events.run()
    return events


def own_bytes(plan: Plan, costs: Costs, rank: int, *, with_messages: bool = True) -> Iterator[int]:
    """Yield the bytes that a rank's own microbatches, and messages between stages, take while each of its actions runs."""
    if not plan.has_backward:
        return repeat(0, len(plan.actions[rank]))
    return occupancy(plan.actions[rank], _meter(plan, costs, with_messages))


def _meter(plan: Plan, costs: Costs, with_messages: bool) -> Meter:
    """Return the meter of the plan's own sizes, or of the costs if it counts slots."""
    if plan.sizes is None:
        return meter_of(lambda action: costs.saved(*action.key), lambda action: costs.movable(*action.key))
    return plan.meter() if with_messages else plan.activations_meter()


def idle_bytes(plan: Plan, costs: Costs, rank: int) -> int:
    """Return the bytes that a rank holds without microbatches of its own: static ones of its stages, and remote buffers."""
    return _static_bytes(plan, costs, rank) + remote_buffer_bytes(plan, costs, rank)


def _static_bytes(plan: Plan, costs: Costs, rank: int) -> int:
    if plan.sizes is not None:
        return plan.sizes.static[rank]
    return sum(map(costs.static, plan.stages_of(rank)))


def remote_buffer_bytes(plan: Plan, costs: Costs, rank: int) -> int:
    """Return the bytes of a rank's buffers for remote activations."""
    if plan.sizes is not None:
        return plan.remote_buffer_bytes(rank)
    return sum(map(sum, plan.remote_buffers(rank, lambda action: costs.movable(*action.key)).values()))


class _LaneRun:
    """A lane while it runs: its position and its record."""

    __slots__ = ("actions", "begin_s", "end_s", "has_begun", "position", "rank")

    def __init__(self, rank: int, actions: tuple[Action, ...]) -> None:
        self.rank, self.actions, self.position = rank, actions, 0
        self.has_begun = False  # whether the action at its position has begun
        self.begin_s = array("d", bytes(8 * len(actions)))
        self.end_s = array("d", bytes(8 * len(actions)))


class _End(NamedTuple):
    """One end of a transfer that was posted."""

    lane: _LaneRun
    position: int
    key: Identity


class _Events:
    """All lanes of a plan, the transfers between them, and the links that carry them."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan, self.costs = plan, costs
        self.seconds = costs.seconds_of(plan)
        self.are_pairs_shorter = costs.overlapped_share > 0 and bool(plan.overlapped)
        self.carried = costs.carried if plan.sizes is None else plan.sizes.carried
        self.compute = [_LaneRun(rank, lane) for rank, lane in enumerate(plan.actions)]
        self.chains = [{peer: _LaneRun(rank, chain) for peer, chain in plan.chains(rank).items()} for rank in range(plan.num_ranks)]
        self.lanes = [*self.compute, *(lane for chains in self.chains for lane in chains.values())]
        self.agenda = [(0.0, index) for index in range(len(self.lanes))]  # a heap: the time at which each ready lane goes on
        self.lonely: dict[Ends, deque[_End]] = defaultdict(deque)  # posted ends whose other end is missing
        self.free_s: dict[tuple[int, int], float] = defaultdict(float)  # when each link is free again
        self.arrival_s: dict[Identity, float] = {}  # of transfers that their lane has not waited for yet
        self.blocked: dict[Identity, int] = {}  # lanes that wait for a transfer whose other end is missing
        self.busy_s: list[list[tuple[float, float]]] = [[] for _ in self.compute]  # when transfers of a rank are in flight

    def run(self) -> None:
        """Advance the lane that is furthest behind, again and again, so that transfers become ready in time order."""
        while self.agenda:
            now, index = heappop(self.agenda)
            self._advance(index, now)
        stuck = [f"rank {lane.rank} at {lane.actions[lane.position]}" for lane in self.lanes if lane.position < len(lane.actions)]
        if stuck:
            raise PlanError(f"the plan never ends ({', '.join(stuck[:4])} wait forever): call verify() to see why")

    def _advance(self, index: int, now: float) -> None:
        """Run a lane until it is blocked, or another lane's turn comes first."""
        lane, agenda = self.lanes[index], self.agenda
        while lane.position < len(lane.actions):
            action = lane.actions[lane.position]
            op, *_, peer = action
            if op in POSTS or (op is Op.REDUCE_GRAD and peer is not None):
                self._post(lane, action, now)
                lane.position += 1
                continue
            if not lane.has_begun:
                lane.has_begun, lane.begin_s[lane.position] = True, now
            if op in COMPUTE:
                end = self._computed_s(lane, action)
            elif op in SHARDING and peer is None:
                end = now
            elif (arrived := self._arrived_s(index, action)) is None:
                return
            else:
                end = arrived
            if end > now and agenda and agenda[0][0] <= end:
                heappush(agenda, (end, index))
                return
            now = lane.end_s[lane.position] = max(now, end)
            lane.has_begun = False
            if op in START_OF:
                del self.arrival_s[action.start_identity]
            if self.are_pairs_shorter and self.plan.begins_pair(action):
                lane.position += 1
                lane.begin_s[lane.position], lane.end_s[lane.position] = lane.begin_s[lane.position - 1], now
            lane.position += 1

    def _computed_s(self, lane: _LaneRun, action: Action) -> float:
        """Return when a computation that has begun ends, slowed down by the transfers known so far."""
        begin, work = lane.begin_s[lane.position], self.seconds(*action[:3])
        if self.are_pairs_shorter and self.plan.begins_pair(action):  # they take their time together
            work = self.costs.pair_s(action, lane.actions[lane.position + 1])
        if action.part:
            work /= self.plan.num_parts(action.stage)
        if self.costs.slowdown == 1:
            return begin + work
        busy = self.busy_s[lane.rank] = [interval for interval in self.busy_s[lane.rank] if interval[1] > begin]
        return _slowed_end(begin, work, sorted(busy), self.costs.slowdown)

    def _arrived_s(self, index: int, completion: Action) -> float | None:
        """Return when the transfer that a lane waits for arrives; block the lane and return None while the other end is missing."""
        key = completion.start_identity
        arrival = self.arrival_s.get(key)
        if arrival is None:
            self.blocked[key] = index
        return arrival

    def _post(self, lane: _LaneRun, action: Action, now: float) -> None:
        """Post one end of a transfer; the second end starts it, or the first if the other end is a host."""
        op, peer = action.op, action.peer
        assert peer is not None
        mine, is_send = _End(lane, lane.position, action.identity), op in SENDS
        if action.is_exchange:
            self._exchange(mine, lane.rank, peer, self.carried(action), now)
            return
        purpose, src, dst = (SENDS[op], lane.rank, peer) if is_send else (RECEIVES[op], peer, lane.rank)
        theirs = self.lonely.get((purpose, src, dst, not is_send))
        if not theirs and peer != HOST:
            self.lonely[purpose, src, dst, is_send].append(mine)
            return
        begin, end = self._carry(src, dst, self.carried(action), now)
        self._arrive((mine, theirs.popleft()) if theirs else (mine,), begin, end, now)

    def _exchange(self, mine: _End, rank: int, peer: int, num_bytes: int, now: float) -> None:
        """Post one end of an exchange between twins; the second end starts it, both ways at once."""
        theirs = self.lonely.get((Purpose.TWIN, peer, rank, True))
        if not theirs:
            self.lonely[Purpose.TWIN, rank, peer, True].append(mine)
            return
        ways = [self._carry(*ends, num_bytes, now) for ends in ((rank, peer), (peer, rank))]
        self._arrive((mine, theirs.popleft()), min(begin for begin, _ in ways), max(end for _, end in ways), now)

    def _arrive(self, sides: Sequence[_End], begin: float, end: float, now: float) -> None:
        """Note when a transfer is in flight on each of its ends, and wake the lanes that wait for it."""
        for side in sides:
            side.lane.begin_s[side.position], side.lane.end_s[side.position] = begin, end
            self.arrival_s[side.key] = end
            if side.key in self.blocked:
                heappush(self.agenda, (max(now, end), self.blocked.pop(side.key)))

    def _carry(self, src: int, dst: int, num_bytes: int, now: float) -> tuple[float, float]:
        """Put a transfer on its link, and return when it begins and ends."""
        link = self.costs.link_between(src, dst)
        begin = max(now, self.free_s[src, dst])
        departed = self.free_s[src, dst] = begin + num_bytes / link.bytes_per_s
        end = departed + link.latency_s
        if self.costs.slowdown > 1:
            for rank in {src, dst} - {HOST}:
                self.busy_s[rank].append((begin, end))
        return begin, end


def _slowed_end(begin: float, work_s: float, busy: Sequence[tuple[float, float]], slowdown: float) -> float:
    """Return the end time of work that takes `slowdown` times as long within the busy intervals (sorted, may overlap)."""
    now = begin
    for start, end in busy:
        if now + work_s <= start:
            break
        work_s -= max(0.0, start - now)
        now = max(now, start)
        slow_work = max(0.0, end - now) / slowdown
        if work_s <= slow_work:
            return now + work_s * slowdown
        work_s -= slow_work
        now = max(now, end)
    return now + work_s


def _recorded(plan: Plan, costs: Costs, rank: int, lane: _LaneRun) -> Lane:
    """Return the record of a rank's compute lane, with the rank's bytes."""
    saved = array("q", own_bytes(plan, costs, rank, with_messages=False))
    is_sized = plan.sizes is not None  # messages take memory only then
    messages = map(sub, own_bytes(plan, costs, rank), saved) if is_sized else repeat(0, len(saved))
    return Lane(
        begin_s=lane.begin_s,
        end_s=lane.end_s,
        activation_bytes=saved,
        message_bytes=array("q", messages),
        static_bytes=_static_bytes(plan, costs, rank),
        remote_buffer_bytes=remote_buffer_bytes(plan, costs, rank),
    )


def _merged(plan: Plan, rank: int, chains: Mapping[int, _LaneRun]) -> Lane:
    """Return the record of a rank's chains in the order of its served lane."""
    positions = {peer: iter(range(len(chain.actions))) for peer, chain in chains.items()}
    begin_s, end_s = array("d"), array("d")
    for action in plan.served[rank]:
        assert action.peer is not None
        chain, position = chains[action.peer], next(positions[action.peer])
        begin_s.append(chain.begin_s[position])
        end_s.append(chain.end_s[position])
    return Lane(begin_s=begin_s, end_s=end_s)
