"""Run a plan on a cost model: the discrete events of its lanes and links, in the order of time.

A lane runs its actions one after the other. A transfer starts when both of its ends are posted and its link is free, and
overlaps all computations of the lanes; each direction between two ranks is a link, which carries one transfer at a time, in the
order in which they became ready. A host is always ready, and each direction between a rank and its host is a link too. Gathering
and freeing weights takes no time here.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from operator import sub
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import COMPUTE, HOST, POSTS, RECEIVES, SENDS, SHARDING, START_OF, Action, Identity, Op, Purpose
from bpipe.plan.collector import collector_paused
from bpipe.plan.meter import Meter, occupancy
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes, StageSizes
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
    events = _Events(plan, costs)
    sized = _sized(plan, costs) if plan.sizes is None else plan
    saved = sized.activations_meter()
    whole = saved if plan.sizes is None else plan.meter()  # messages take memory only in a plan of bytes
    return Timeline(
        plan=plan,
        actions=tuple(_with_bytes(lane.times, sized, rank, saved, whole) for rank, lane in enumerate(events.compute)),
        served=tuple(_merged(plan.served[rank], chains) for rank, chains in enumerate(events.chains)),
    )


def simulated_times(plan: Plan, costs: Costs) -> Timeline:
    """Do what `simulate` does without the bytes of ranks, where a search needs no more than when computations run."""
    return Timeline(plan=plan, actions=tuple(lane.times for lane in _Events(plan, costs).compute), served=())


def _sized(plan: Plan, costs: Costs) -> Plan:
    """Return a plan with the bytes that the costs say its stages keep, and without pairs."""
    of_units = [
        tuple(
            StageSizes(parts=(costs.movable(stage, unit),), fixed=costs.saved(stage, unit) - costs.movable(stage, unit))
            for stage in range(plan.num_stages)
        )
        for unit in plan.units_of(0)
    ]
    static = tuple(sum(map(costs.static, plan.stages_of(rank))) for rank in range(plan.num_ranks))
    return replace(plan, sizes=Sizes.of_slices(of_units, static=static), overlapped=frozenset())


def _with_bytes(times: Lane, sized: Plan, rank: int, saved: Meter, whole: Meter) -> Lane:
    """Return the times of a rank with its bytes: while its actions run, and those that stay."""
    own = messages = array("q", bytes(8 * len(times.begin_s)))
    if sized.has_backward:
        own = array("q", occupancy(sized.actions[rank], saved))
        messages = messages if whole is saved else array("q", map(sub, occupancy(sized.actions[rank], whole), own))
    buffers = sized.remote_buffer_bytes(rank)
    return replace(
        times,
        activation_bytes=own,
        message_bytes=messages,
        static_bytes=sized.idle_bytes(rank) - buffers,
        remote_buffer_bytes=buffers,
    )


class _LaneRun:
    """A lane while it runs: its position and its times."""

    __slots__ = ("actions", "begin_s", "end_s", "has_begun", "position", "rank")

    def __init__(self, rank: int, actions: tuple[Action, ...]) -> None:
        self.rank, self.actions, self.position = rank, actions, 0
        self.has_begun = False  # whether the action at its position has begun
        self.begin_s, self.end_s = (array("d", bytes(8 * len(actions))) for _ in range(2))

    @property
    def times(self) -> Lane:
        return Lane(begin_s=self.begin_s, end_s=self.end_s)


class _End(NamedTuple):
    """One end of a transfer that was posted."""

    lane: _LaneRun
    position: int
    key: Identity


class _Events:
    """All lanes of a plan, the transfers between them, and the links that carry them."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        costs.check(plan)
        self.plan, self.costs, self.slowdown = plan, costs, costs.slowdown
        self.seconds = costs.seconds_of(plan)
        self.are_pairs_shorter = costs.overlapped_share > 0 and bool(plan.overlapped)
        self.carried = costs.carried if plan.sizes is None else partial(plan.sizes.carried, flow=plan.flow)
        self.compute = [_LaneRun(rank, lane) for rank, lane in enumerate(plan.actions)]
        self.chains = [{peer: _LaneRun(rank, chain) for peer, chain in plan.chains(rank).items()} for rank in range(plan.num_ranks)]
        self.lanes = [*self.compute, *(lane for chains in self.chains for lane in chains.values())]
        self.agenda = [(0.0, index) for index in range(len(self.lanes))]  # a heap: the time at which each ready lane goes on
        self.lonely: dict[Ends, deque[_End]] = defaultdict(deque)  # posted ends whose other end is missing
        self.free_s: dict[tuple[int, int], float] = defaultdict(float)  # when each link is free again
        self.arrival_s: dict[Identity, float] = {}  # of transfers that their lane has not waited for yet
        self.blocked: dict[Identity, int] = {}  # lanes that wait for a transfer whose other end is missing
        self.busy_s: list[list[tuple[float, float]]] = [[] for _ in self.compute]  # when transfers of a rank are in flight
        with collector_paused():
            self._run()

    def _run(self) -> None:
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
            is_pair = self.are_pairs_shorter and self.plan.begins_pair(action)  # then both take their time together
            if op in COMPUTE:
                end = self._computed_s(lane, action, is_pair=is_pair)
            elif op in SHARDING and peer is None:
                end = now
            elif (key := action.start_identity) in self.arrival_s:
                end = self.arrival_s[key]
            else:
                self.blocked[key] = index
                return
            if end > now and agenda and agenda[0][0] <= end:
                heappush(agenda, (end, index))
                return
            now = lane.end_s[lane.position] = max(now, end)
            lane.has_begun = False
            if op in START_OF:
                del self.arrival_s[action.start_identity]
            if is_pair:
                lane.position += 1
                lane.begin_s[lane.position], lane.end_s[lane.position] = lane.begin_s[lane.position - 1], now
            lane.position += 1

    def _computed_s(self, lane: _LaneRun, action: Action, *, is_pair: bool) -> float:
        """Return when a computation that has begun ends, slowed down by the transfers known so far."""
        begin, work = lane.begin_s[lane.position], self.seconds(*action[:3])
        if is_pair:
            work = self.costs.pair_s(action, lane.actions[lane.position + 1])
        if self.slowdown == 1:
            return begin + work
        busy = self.busy_s[lane.rank] = [interval for interval in self.busy_s[lane.rank] if interval[1] > begin]
        return _slowed_end(begin, work, sorted(busy), self.slowdown)

    def _post(self, lane: _LaneRun, action: Action, now: float) -> None:
        """Post one end of a transfer; the second end starts it, or the first if the other end is a host.

        An exchange between twins goes both ways at once, and lasts until both have arrived.
        """
        op, rank, peer = action.op, lane.rank, action.peer
        assert peer is not None
        if op in SENDS:
            purpose, src, dst = SENDS[op], rank, peer
        elif op in RECEIVES:
            purpose, src, dst = RECEIVES[op], peer, rank
        else:
            purpose, src, dst = Purpose.TWIN, min(rank, peer), max(rank, peer)
        is_send, mine = rank == src, _End(lane, lane.position, action.identity)
        theirs = self.lonely.get((purpose, src, dst, not is_send))
        if not theirs and peer != HOST:
            self.lonely[purpose, src, dst, is_send].append(mine)
            return
        begin, end = self._carry(src, dst, self.carried(action), now)
        if purpose is Purpose.TWIN:
            back = self._carry(dst, src, self.carried(action), now)
            begin, end = min(begin, back[0]), max(end, back[1])
        for side in (mine, theirs.popleft()) if theirs else (mine,):
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
        if self.slowdown > 1:
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


def _merged(served: Sequence[Action], chains: Mapping[int, _LaneRun]) -> Lane:
    """Return the times of a rank's chains in the order of its served lane."""
    times = {peer: zip(chain.begin_s, chain.end_s) for peer, chain in chains.items()}
    begin_s, end_s = array("d"), array("d")
    for action in served:
        assert action.peer is not None
        begin, end = next(times[action.peer])
        begin_s.append(begin)
        end_s.append(end)
    return Lane(begin_s=begin_s, end_s=end_s)
