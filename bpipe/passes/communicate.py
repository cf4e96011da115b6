"""The communicate pass: give every computation the transfers that bring its inputs and carry its outputs away.

At the boundary before each computation, in this order: send the previous result; post the receive of the computation
after this one, so that it arrives while this one runs (earlier if its channel's order requires it); complete older sends;
complete and start evictions and loads; and complete this computation's own receive.

    SEND_F2  RECV_B1  WAIT_SEND_F1  WAIT_EVICT0 ... EVICT1  WAIT_RECV_B0  B0

A forward and a backward that run side by side get the inputs of both before them, and send the results of both behind them.

A message of skips to a stage that is no neighbour is received as soon as it has been made, so that it waits where it is used, and
its sender may evict. The gradients that come back for it are received before they are used.

Stages with weights in common, such as the twins of two directions, exchange the gradients as soon as the last backward of these has
run, and add them up when their rank has computed everything.

A send is completed once the next one of its channel has started, before its microbatch has been evicted or runs backward,
but not before its receive has completed in one global order of the computations (`order.clock`). If gradients stay in their
stage, the send is completed behind its microbatch's backward, which need not wait for the next rank: at most two messages are
under way between two ranks, so that no rank runs further ahead of the next one. All lists are
projections of that order, so they cannot deadlock; `verify` nevertheless proves it for the result.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.flow.flow import Flow, Message
from bpipe.flow.shaping import with_other
from bpipe.plan.action import BACKWARD, COMPUTE, SHARDING, WAIT_OF, Action, MicrobatchKey, Op
from bpipe.plan.order import RESULT, UNITS, UNKNOWN, Moments, clock_of
from bpipe.plan.plan import Plan

__all__: list[str] = []

CHANGES_GRADIENTS = COMPUTE - {Op.F, Op.R} | {Op.REDUCE_GRAD}
KEPT = (COMPUTE - {Op.R}) | SHARDING  # kept by a pass that makes new evictions and recomputations


class _Route(NamedTuple):
    """The source of each microbatch's input of a computation, or the destination of its result."""

    op: Op  # the transfer
    wait: Op  # its completion
    part: int  # as in its action: of a message between stages that are no neighbours
    peer: int  # the rank at the other end
    returns: bool  # whether a gradient comes back for it
    times: Sequence[int]  # by microbatch, when the computation at its other end begins; of skips, what `_arrived` returns
    early: Mapping[int, int] | None = None  # of a receive of skips: by microbatch, after how many computations it is waited for


# Makes an action from its fields in half the time of `Action(...)`, because plans have millions of them.
_action: Callable[[tuple[Op, int, int, int, int]], Action] = partial(tuple.__new__, Action)


def communicate(plan: Plan, times: tuple[Sequence[array[int]], Moments] | None = None) -> Plan:
    """Insert sends and receives into a plan of computations, with or without evictions.

    Neighbouring stages on one rank hand their tensors over without a transfer.

    Args:
        times: when the computations start, if known, as `clock_of` returns them.

    Raises:
        PlanError: the computations wait for each other in a cycle.
    """
    computed = [plan.compute(rank) for rank in range(plan.num_ranks)]
    starts, begins = times or clock_of(plan, computed)
    arrivals = _arrivals(plan, computed, starts, begins)
    sent, received = (_Routes(plan, begins, arrivals, starts, is_sent=is_sent) for is_sent in (True, False))
    made = replace(plan, actions=tuple(_Lane(plan, rank, times, sent, received).emit() for rank, times in enumerate(starts)))
    return with_exchanges(made, starts) if plan.flow.sums else made


def with_exchanges(plan: Plan, starts: Sequence[Sequence[int]] | None = None) -> Plan:
    """Add the exchanges of gradients to a plan that lacks nothing else.

    Each follows the last backward of all that it is of, what that sends, and a reduction over data-parallel replicas. Two ranks
    exchange theirs in one order: that in which the later end is ready.

    Args:
        starts: when the computations start, if known.
    """
    computed = [plan.compute(rank) for rank in range(plan.num_ranks)]
    ends: dict[int, int] = {}  # of each stage, when its last backward has ended
    for lane, times in zip(computed, starts or clock_of(plan, computed)[0]):
        ends |= {action.stage: start + UNITS[action.op] for action, start in zip(lane, times) if action.op is not Op.F}
    flow, ready = plan.flow, dict[frozenset[int], int]()
    for (stage, _), (other, after) in flow.exchanges.items():
        both = frozenset((stage, other))
        ready[both] = max(ready.get(both, 0), *map(ends.__getitem__, after))
    behind: list[dict[int, list[Action]]] = [defaultdict(list) for _ in plan.actions]  # by place in the lane
    for stage, part in sorted(flow.exchanges, key=lambda key: ready[frozenset((key[0], flow.exchanges[key].other))]):
        other, after = flow.exchanges[stage, part]
        rank, action = plan.stage_ranks[stage], Action(Op.REDUCE_GRAD, stage, 0, part, plan.stage_ranks[other])
        behind[rank][max([_place_behind(plan.actions[rank], after), *behind[rank]])].append(action)
    return replace(plan, actions=tuple(_with_exchanges(lane, found) for lane, found in zip(plan.actions, behind)))


def _place_behind(lane: Sequence[Action], stages: Set[int]) -> int:
    """Return the place of the last action in a lane that changes gradients of stages, or sends what it has made."""
    changes = (i for i, one in enumerate(lane) if one.stage in stages and one.op in CHANGES_GRADIENTS and one.peer is None)
    place = max(changes)
    while place + 1 < len(lane) and lane[place + 1].op in (Op.SEND_F, Op.SEND_B):
        place += 1
    return place


def _with_exchanges(lane: Sequence[Action], behind: Mapping[int, Sequence[Action]]) -> tuple[Action, ...]:
    """Return a lane with exchanges behind some places, and their completions at its end, those of a stage one after the other."""
    by_stage: dict[int, list[Action]] = {}
    for action in (action for found in behind.values() for action in found):
        by_stage.setdefault(action.stage, []).append(action._replace(op=Op.WAIT_REDUCE_GRAD))
    posted = (each for place, action in enumerate(lane) for each in (action, *behind.get(place, ())))
    return (*posted, *(wait for waits in by_stage.values() for wait in waits))


def sent_by(plan: Plan, action: Action) -> list[Action]:
    """Return the sends that follow a computation whose result goes to other ranks, in their order."""
    return [_transfer(action, message, is_sent=True) for message in _messages(plan.flow, action, is_sent=True)]


def received_by(plan: Plan, action: Action) -> list[Action]:
    """Return the receives that a computation needs whose inputs come from other ranks."""
    return [_transfer(action, message, is_sent=False) for message in _messages(plan.flow, action, is_sent=False)]


def _messages(flow: Flow, action: Action, *, is_sent: bool) -> tuple[Message, ...]:
    op, stage, unit, *_ = action
    return (flow.sent if is_sent else flow.received)(RESULT[op], stage, flow.turn_of(unit))


def _transfer(action: Action, message: Message, *, is_sent: bool) -> Action:
    forward, backward = (Op.SEND_F, Op.SEND_B) if is_sent else (Op.RECV_F, Op.RECV_B)
    part = message.stage + 1 if message.is_aside else 0
    return Action(backward if message.is_gradient else forward, action.stage, action.microbatch, part, message.rank)


def _arrivals(
    plan: Plan, computed: Sequence[Sequence[Action]], starts: Sequence[Sequence[int]], begins: Moments
) -> dict[tuple[int, int], dict[int, int]]:
    """Return for each message beside an output, by its ends and microbatch, after how many computations of its receiver it is
    waited for.

    It is posted before the first computation that begins after the message has been made, and waited for after that one, or
    before it, if its sender would wait too long for that to evict the microbatch.
    """
    arrivals: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
    evicted: dict[int, dict[MicrobatchKey, int]] = {}
    for rank, lane in enumerate(computed if plan.flow.has_asides else ()):
        for used, action in enumerate(lane):
            for message in _messages(plan.flow, action, is_sent=False):
                if message.is_gradient or not message.is_aside:
                    continue
                sender, unit, made = message.stage, action.microbatch, begins.of(message.op, message.stage)[action.microbatch]
                if message.rank not in evicted:
                    evicted[message.rank] = _evicted(plan, message.rank, starts)
                following = bisect_right(starts[rank], made)
                place = min(following + 1, used)
                latest = evicted[message.rank].get((sender, unit))
                if latest is not None and _arrived(place, starts[rank], made) - (rank < message.rank) >= latest:
                    place = min(following, used)
                if place and plan.begins_pair(lane[place - 1]):  # not between the two of a pair
                    place += 1 if place < used else -1
                arrivals[sender, action.stage][unit] = place
    return arrivals


def _arrived(place: int, starts: Sequence[int], made: int) -> int:
    """Return when the computation begins after which a message of skips is waited for; at the earliest its own."""
    return max(made, starts[place - 1]) if place else made


def _evicted(plan: Plan, rank: int, starts: Sequence[Sequence[int]]) -> dict[MicrobatchKey, int]:
    """Return when the computation begins before which each microbatch has been evicted from a rank."""
    evicted: dict[MicrobatchKey, int] = {}
    begun = 0
    for action in plan.actions[rank]:
        if action.op in COMPUTE:
            begun += 1
        elif action.op is Op.WAIT_EVICT and begun < len(starts[rank]):
            evicted.setdefault(action.key, starts[rank][begun])
    return evicted


class _Routes(dict[tuple[Op, int, int], tuple[_Route, ...]]):
    """The routes of the results of computations, or of their inputs, by operation, stage and turn."""

    def __init__(
        self,
        plan: Plan,
        begins: Moments,
        arrivals: Mapping[tuple[int, int], Mapping[int, int]],
        starts: Sequence[Sequence[int]],
        *,
        is_sent: bool,
    ) -> None:
        self._flow, self._begins, self._arrivals, self._starts, self._is_sent = plan.flow, begins, arrivals, starts, is_sent

    def of(self, steps: Sequence[Action]) -> list[tuple[_Route, ...]]:
        """Return the routes of each of a rank's computations."""
        if self._flow.period == 1:
            return [self[op, stage, 0] for op, stage, _, _, _ in steps]
        return [self[op, stage, self._flow.turn_of(unit)] for op, stage, unit, _, _ in steps]

    def __missing__(self, kind: tuple[Op, int, int]) -> tuple[_Route, ...]:
        op, stage, turn = kind
        action = Action(op, stage, self._flow.units.of(turn)[0])
        messages = _messages(self._flow, action, is_sent=self._is_sent)
        self[kind] = tuple(self._route(stage, message, _transfer(action, message, is_sent=self._is_sent)) for message in messages)
        return self[kind]

    def _route(self, stage: int, message: Message, transfer: Action) -> _Route:
        times: Sequence[int] = self._begins.of(message.op, message.stage)
        early = None
        if message.is_aside and not message.is_gradient and self._is_sent:
            made, places = self._begins.of(Op.F, stage), self._arrivals.get((stage, message.stage), {})
            starts, times = self._starts[message.rank], [UNKNOWN] * len(made)
            for unit, place in places.items():
                times[unit] = _arrived(place, starts, made[unit])
        elif message.is_aside and not message.is_gradient:
            early = self._arrivals[message.stage, stage]
        return _Route(transfer.op, WAIT_OF[transfer.op], transfer.part, message.rank, message.returns, times, early)


class _Lane:
    """One rank's list: its computations, and the transfers at the boundary before each of them."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        begins: Sequence[int],
        sent: _Routes,
        received: _Routes,
    ) -> None:
        self.plan, self.rank, self.begins = plan, rank, begins
        self.steps: list[Action] = []
        self.before: list[list[Action]] = [[]]  # evictions and loads at each boundary
        for action in plan.actions[rank]:
            if action[0] not in COMPUTE:
                self.before[-1].append(action)
            else:
                self.steps.append(action)
                self.before.append([])
        # The boundary before each computation; of a backward that runs beside a forward, the one before both.
        self.boundaries = list(range(len(self.steps)))
        if plan.overlapped:
            self.boundaries = [i - (i > 0 and plan.begins_pair(self.steps[i - 1])) for i in self.boundaries]
        self.sends, self.receives = sent.of(self.steps), received.of(self.steps)
        self.arriving: list[list[Action]] = [[] for _ in self.before]  # at each boundary, completions of receives for the next step
        self.early: list[list[Action]] = [[] for _ in self.before]  # and of those for a later one
        self.posted = self._posts()
        self.completed = self._completions()

    def emit(self) -> tuple[Action, ...]:
        at_boundary = zip(self.posted, self.early, self.completed, self.before)
        lane = [action for actions in next(at_boundary) for action in actions]
        made, pairs = list[Action](), self.plan.overlapped  # the sends of what both of a pair make follow the pair
        for step, arriving, sends, (posted, early, completed, moves) in zip(self.steps, self.arriving, self.sends, at_boundary):
            _, stage, microbatch, _, _ = step
            lane += arriving
            lane.append(step)
            for send in sends:
                made.append(_action((send[0], stage, microbatch, send[2], send[3])))
            if not pairs or not self.plan.begins_pair(step):
                lane += made
                made = []
            lane += posted
            lane += early
            lane += completed
            lane += moves
        return tuple(lane)

    def _posts(self) -> list[list[Action]]:
        """Return the receives by boundary: one computation before the one that uses them, or earlier if the channel requires it.

        A channel is first in, first out. If several boundaries between stages share one, the message that arrives first may
        be used last; its receive is still posted first.
        """
        channels: dict[tuple[Op, int], list[tuple[int, int, int, int, Action]]] = defaultdict(list)
        early_by_time: list[list[tuple[int, int, int, Action]]] = [[] for _ in self.before]
        for place, (receives, (_, stage, microbatch, _, _)) in enumerate(zip(self.receives, self.steps)):
            for op, wait, part, peer, _, times, early in receives:
                turn = stage if op is Op.RECV_F else -stage  # as `sent_by` orders what one computation sends
                index = self.boundaries[place] if early is None else early[microbatch]
                channels[op, peer].append((times[microbatch], part, turn, index, _action((op, stage, microbatch, part, peer))))
                completion = _action((wait, stage, microbatch, part, peer))
                if early is None:
                    self.arriving[index].append(completion)
                else:  # what is made first is waited for first, so that its sender need not wait for anything later
                    early_by_time[index].append((times[microbatch], peer, len(early_by_time[index]), completion))
        self.early = [[completion for *_, completion in sorted(found)] for found in early_by_time]
        posted: list[list[Action]] = [[] for _ in self.before]
        for arrivals in channels.values():
            turn = len(self.steps)
            for _, _, _, index, action in sorted(arrivals, reverse=True):
                if index <= turn:
                    turn = self.boundaries[max(index - 1, 0)]
                posted[turn].insert(0, action)
        return posted

    def _completions(self) -> list[list[Action]]:
        """Return the completions of sends by boundary: the first at which they are due and their receives have completed."""
        completed: list[list[Action]] = [[] for _ in self.before]
        begins, end = self.begins, len(self.begins)
        for (_, stage, microbatch, _, _), (op, wait, part, peer, _, times, _), boundary in self._due():
            received = times[microbatch]
            if received < 0:
                send = Action(op, stage, microbatch, part)
                other = self.plan.other_end(send)[1]
                raise PlanError(f"{send.text(self.plan.units)} sends a message that no computation of stage {other} uses")
            received -= peer < self.rank  # of computations at one time, the one of the lower rank comes first
            while boundary < end and begins[boundary] <= received:
                boundary += 1
            boundary += boundary < end and self.boundaries[boundary] < boundary  # not inside a pair
            completed[boundary].append(_action((wait, stage, microbatch, part, peer)))
        return completed

    def _due(self) -> Iterator[tuple[Action, _Route, int]]:
        """Yield for each send, the latest first: its computation, its route, and the boundary by which it should be complete."""
        end, evicted, pairs = len(self.steps), Op.WAIT_EVICT, self.plan.overlapped
        moves = [(i, a) for i, before in enumerate(self.before) for a in before]
        # For a forward's result.
        latest = {step[1:3]: boundary for step, boundary in zip(self.steps, self.boundaries) if step[0] in BACKWARD}
        for index, action in moves:
            if action[0] is evicted:
                latest[action[1:3]] = min(index, latest.get(action[1:3], end))
        following: dict[tuple[Op, int], int] = {}
        for index, step, sends in zip(range(end, 0, -1), reversed(self.steps), reversed(self.sends)):
            for send in reversed(sends):
                channel = send[0], send[3]
                due = following.get(channel, end)
                following[channel] = index + (step[1:3] in pairs and step[0] is Op.F)  # what a pair makes is sent behind it
                yield step, send, min(due, latest.get(step[1:3], end)) if send.returns else due


def without_transfers(plan: Plan) -> Plan:
    """Return a plan without its transfers, recomputations and budgets."""
    lanes = tuple(tuple(a for a in lane if a[0] in KEPT and a[4] is None) for lane in plan.actions)
    return replace(plan, actions=lanes, served=((),) * plan.num_ranks, slots=(None,) * plan.num_ranks, budgets=None)


def computations_only(plan: Plan) -> Plan:
    """Return a plan without its transfers, recomputations, budgets and sizes."""
    return replace(without_transfers(plan), sizes=None)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan in their order, for evaluation; `communicate` adds the transfers again."""
    forwards = tuple(tuple(a for a in plan.compute(rank) if a.op is Op.F) for rank in range(plan.num_ranks))
    plain = without_transfers(replace(plan, actions=forwards))
    flow = with_other(plan.flow, has_backward=False)
    return replace(plain, name=f"{plan.name}/forward", sizes=None, flow=flow, overlapped=frozenset())
