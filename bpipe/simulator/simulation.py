"""Run a plan on a cost model: the discrete events of its lanes and links, in the order of time.

A lane runs its actions one after the other. A transfer starts when both of its ends are posted and its link is free, and
overlaps all computations of the lanes; each direction between two ranks is a link, which carries one transfer at a time, in the
order in which they became ready. A host is always ready, and each direction between a rank and its host is a link too. Gathering
and freeing weights takes no time here.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappush
from operator import sub

from bpipe.errors import PlanError
from bpipe.plan.action import COMPUTE, HOST, POSTS, RECEIVES, SENDS, SHARDING, START_OF, Action, Identity, Op, Purpose
from bpipe.plan.collector import collector_paused
from bpipe.plan.meter import Meter, occupancy
from bpipe.plan.order import Agenda, run_in_time
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes, StageSizes
from bpipe.simulator.costs import Costs
from bpipe.simulator.timeline import Lane, Timeline

__all__ = ["simulate"]

Ends = tuple[Purpose, int, int, bool]  # a channel, and whether its sends or its receives
_Run = tuple[int, Lane, Iterator[tuple[int, Action]]]  # a rank, when its lane runs, and the actions with their places there
_Post = tuple[Lane, int, Identity]  # one end of a transfer: where its times are, and which action it is


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
    simulation = _Simulation(plan, costs)
    sized = _sized(plan, costs) if plan.sizes is None else plan
    saved = sized.activations_meter()
    whole = saved if plan.sizes is None else plan.meter()  # messages take memory only in a plan of bytes
    return Timeline(
        plan=plan,
        actions=tuple(_with_bytes(times, sized, rank, saved, whole) for rank, times in enumerate(simulation.actions)),
        served=simulation.served,
    )


def simulated_times(plan: Plan, costs: Costs) -> Timeline:
    """Do what `simulate` does without the bytes of ranks, where a search needs no more than when computations run."""
    return Timeline(plan=plan, actions=_Simulation(plan, costs).actions, served=())


def _sized(plan: Plan, costs: Costs) -> Plan:
    """Return a plan with the bytes that the costs say its stages keep, and without pairs."""
    of_units = [
        tuple(
            StageSizes(parts=(costs.movable(stage, unit),), fixed=costs.saved(stage, unit) - costs.movable(stage, unit))
            for stage in range(plan.num_stages)
        )
        for unit in plan.units.of(0)
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


class _Simulation:
    """All lanes of a plan, the transfers between them, and the links that carry them."""

    def __init__(self, plan: Plan, costs: Costs) -> None:
        costs.check(plan)
        self.plan, self.costs, self.slowdown = plan, costs, costs.slowdown
        self.seconds = costs.seconds_of(plan)
        self.are_pairs_shorter = costs.overlapped_share > 0 and bool(plan.overlapped)
        self.carried = costs.carried if plan.sizes is None else partial(plan.sizes.carried, flow=plan.flow)
        self.lonely: dict[Ends, deque[_Post]] = defaultdict(deque)  # posted ends whose other end is missing
        self.free_s: dict[tuple[int, int], float] = defaultdict(float)  # when each link is free again
        self.arrival_s: dict[Identity, float] = {}  # of transfers that their lane has not waited for yet
        self.blocked: dict[Identity, tuple[int, int, Action]] = {}  # lanes that wait for a transfer whose other end is missing
        self.busy_s: list[list[tuple[float, float]]] = [[] for _ in plan.actions]  # when transfers of a rank are in flight
        self.actions, self.served = (tuple(map(_unknown, lanes)) for lanes in (plan.actions, plan.served))
        lanes: list[_Run] = [(rank, self.actions[rank], enumerate(lane)) for rank, lane in enumerate(plan.actions)]
        for rank, served in enumerate(plan.served):
            chains: dict[int, list[tuple[int, Action]]] = defaultdict(list)
            for position, action in enumerate(served):
                assert action.peer is not None
                chains[action.peer].append((position, action))
            lanes += [(rank, self.served[rank], iter(chains[peer])) for peer in sorted(chains)]
        self.agenda: Agenda = [(0.0, index) for index in range(len(lanes))]
        with collector_paused():
            run_in_time([self._run(index, *lane) for index, lane in enumerate(lanes)], self.agenda)
        if self.blocked:
            stuck = [f"rank {rank} at {action}" for _, rank, action in sorted(self.blocked.values())]
            raise PlanError(f"the plan never ends ({', '.join(stuck[:4])} wait forever): call verify() to see why")

    def _run(self, index: int, rank: int, times: Lane, actions: Iterator[tuple[int, Action]]) -> Iterator[float | None]:
        """Run a lane: yield when each computation and each wait ends, and None where it waits for an end that is not posted yet."""
        now, begin_s, end_s = 0.0, times.begin_s, times.end_s
        for position, action in actions:
            op, stage, unit, part, peer = action
            if op in POSTS or (op is Op.REDUCE_GRAD and peer is not None):
                self._post(rank, action, times, position, now)
                continue
            begin_s[position] = begin = now
            beside = None
            if op in COMPUTE:
                work = self.seconds(op, stage, unit)
                if self.are_pairs_shorter and self.plan.begins_pair(action):
                    beside, backward = next(actions)  # both take their time together
                    work = self.costs.pair_s(action, backward)
                while (end := self._ended_s(rank, begin, work)) > now:  # transfers that start meanwhile may slow it down
                    yield (now := end)
            elif op not in SHARDING or peer is not None:
                key = (START_OF[op], stage, unit, part)
                if key not in self.arrival_s:
                    self.blocked[key] = index, rank, action
                    yield None
                    now = self.arrival_s[key]
                elif self.arrival_s[key] > now:
                    yield (now := self.arrival_s[key])
                del self.arrival_s[key]
            end_s[position] = now
            if beside is not None:
                begin_s[beside], end_s[beside] = begin, now

    def _ended_s(self, rank: int, begin: float, work: float) -> float:
        """Return when a computation that has begun ends, slowed down by the transfers known so far."""
        if self.slowdown == 1:
            return begin + work
        busy = self.busy_s[rank] = [interval for interval in self.busy_s[rank] if interval[1] > begin]
        return _slowed_end(begin, work, sorted(busy), self.slowdown)

    def _post(self, rank: int, action: Action, times: Lane, position: int, now: float) -> None:
        """Post one end of a transfer; the second end starts it, or the first if the other end is a host.

        An exchange of gradients goes both ways at once, and lasts until both have arrived.
        """
        op, *_, peer = action
        assert peer is not None
        if op in SENDS:
            purpose, src, dst = SENDS[op], rank, peer
        elif op in RECEIVES:
            purpose, src, dst = RECEIVES[op], peer, rank
        else:
            purpose, src, dst = Purpose.TWIN, min(rank, peer), max(rank, peer)
        is_send, mine = rank == src, (times, position, action[:4])
        theirs = self.lonely.get((purpose, src, dst, not is_send))
        if not theirs and peer != HOST:
            self.lonely[purpose, src, dst, is_send].append(mine)
            return
        begin, end = self._carry(src, dst, self.carried(action), now)
        if purpose is Purpose.TWIN:
            back = self._carry(dst, src, self.carried(action), now)
            begin, end = min(begin, back[0]), max(end, back[1])
        for lane, place, key in (mine, theirs.popleft()) if theirs else (mine,):
            lane.begin_s[place], lane.end_s[place] = begin, end
            self.arrival_s[key] = end
            if key in self.blocked:
                heappush(self.agenda, (end, self.blocked.pop(key)[0]))

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


def _unknown(lane: tuple[Action, ...]) -> Lane:
    """Return the times of a lane that has not run yet."""
    return Lane(begin_s=array("d", bytes(8 * len(lane))), end_s=array("d", bytes(8 * len(lane))))


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
