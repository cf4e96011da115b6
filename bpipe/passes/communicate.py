"""The communicate pass: give every computation the transfers that bring its inputs and carry its outputs away.

At the boundary before each computation, in this order: send what the last one made; post the receive of the computation
after this one, so that it arrives while this one runs (earlier where its channel's order asks for it); complete older sends;
complete and start evictions and loads; and complete this computation's own receive.

    SEND_F2  RECV_B1  WAIT_SEND_F1  WAIT_EVICT0 ... EVICT1  WAIT_RECV_B0  B0

A send is completed once the next one of its channel has started, before its microbatch has been evicted or runs backward,
but not before its receive has completed in one global order of the computations (`order.clock`). All lists are
projections of that order, so they cannot deadlock; `verify` proves it of the result all the same.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import BACKWARD, COMPUTE, SHARDING, WAIT_OF, Action, Op
from bpipe.plan.order import RESULT, Moments, clock, num_microbatches_of
from bpipe.plan.plan import Plan

__all__: list[str] = []

KEPT = (COMPUTE - {Op.R}) | SHARDING  # by a pass that decides again what moves and what is recomputed

Moment = tuple[int, int]  # place in the global order: (time, rank)


class _Sent(NamedTuple):
    """A send under way, the moment at which its receive has completed, and the boundary by which it should be complete."""

    action: Action
    received: Moment
    due: int


def communicate(plan: Plan) -> Plan:
    """Insert sends and receives into a plan of computations, with or without evictions.

    Neighbouring stages on one rank hand their tensors over without a transfer.

    Raises:
        PlanError: the computations wait for each other in a cycle.
    """
    lanes = [plan.compute(rank) for rank in range(plan.num_ranks)]
    begins = Moments(plan.num_stages, num_microbatches_of(lanes, plan.num_stages))
    for lane, starts in zip(lanes, clock(lanes, plan.num_stages)):
        for (op, stage, microbatch, *_), start in zip(lane, starts):
            begins[RESULT[op], stage, microbatch] = start
    del lanes
    return replace(plan, actions=tuple(_Lane(plan, rank, begins).emit() for rank in range(plan.num_ranks)))


def sent_by(plan: Plan, action: Action) -> Action | None:
    """Return the send that follows a computation if its result goes to another rank, else None."""
    if action.op is Op.F and action.stage + 1 < plan.num_stages:
        return _remote(plan, action, Op.SEND_F, action.stage + 1)
    if action.op in BACKWARD and action.stage:
        return _remote(plan, action, Op.SEND_B, action.stage - 1)
    return None


def received_by(plan: Plan, action: Action) -> Action | None:
    """Return the receive that a computation needs if its input comes from another rank, else None."""
    if action.op is Op.F and action.stage:
        return _remote(plan, action, Op.RECV_F, action.stage - 1)
    if action.op in BACKWARD and action.stage + 1 < plan.num_stages:
        return _remote(plan, action, Op.RECV_B, action.stage + 1)
    return None


def _remote(plan: Plan, action: Action, op: Op, other_stage: int) -> Action | None:
    peer = plan.stage_ranks[other_stage]
    return None if peer == plan.stage_ranks[action.stage] else Action(op, action.stage, action.microbatch, peer=peer)


class _Lane:
    """One rank's list: its computations, and the transfers at the boundary before each of them."""

    def __init__(self, plan: Plan, rank: int, begins: Moments) -> None:
        self.ranks, self.begins = plan.stage_ranks, begins
        self.steps: list[Action] = []
        self.before: list[list[Action]] = [[]]  # evictions and loads at each boundary
        self.inside: list[list[Action]] = []  # the first piece of each computation, with what stands between its pieces
        for action in plan.actions[rank]:
            if action.op not in COMPUTE:
                self.before[-1].append(action)
            elif action.part and plan.goes_on(action):
                self.inside[-1] += [*self.before[-1], action]
                self.before[-1] = []
            else:
                self.steps.append(action._replace(part=0) if action.part else action)
                self.inside.append([action])
                self.before.append([])
        self.sends = [sent_by(plan, step) for step in self.steps]
        self.receives = [received_by(plan, step) for step in self.steps]
        self.posted = self._posts()
        self.completed = self._completions()

    def emit(self) -> tuple[Action, ...]:
        lane: list[Action | None] = []
        for index, moves in enumerate(self.before):
            lane += self.sends[max(index - 1, 0) : index]
            lane += self.posted.get(index, ())
            lane += self.completed.get(index, ())
            lane += moves
            if index < len(self.steps):
                lane += [_completion(self.receives[index]), *self.inside[index]]
        return tuple(action for action in lane if action is not None)

    def _posts(self) -> dict[int, list[Action]]:
        """Return the receives by boundary: one computation before the one that uses them, or earlier if the channel's order asks.

        A channel is first in, first out. Where several boundaries between stages share one, the message that arrives first may
        be used last; its receive is posted first all the same.
        """
        channels: dict[tuple[Op, int | None], list[tuple[int, int, Action]]] = defaultdict(list)
        for index, receive in enumerate(self.receives):
            if receive is not None:
                channels[receive.op, receive.peer].append((self._made(receive), index, receive))
        posted: dict[int, list[Action]] = defaultdict(list)
        for arrivals in channels.values():
            turn = len(self.steps)
            for _, index, receive in sorted(arrivals, reverse=True):
                turn = min(turn, max(index - 1, 0))
                posted[turn].insert(0, receive)
        return posted

    def _completions(self) -> dict[int, list[Action | None]]:
        """Return the completions of sends by boundary."""
        moments = [self._moment(RESULT[op], stage, microbatch) for op, stage, microbatch, *_ in self.steps]
        completed: dict[int, list[Action | None]] = defaultdict(list)
        for sent in self._sends():
            boundary = sent.due
            while boundary < len(moments) and moments[boundary] <= sent.received:
                boundary += 1
            completed[boundary].append(_completion(sent.action))
        return completed

    def _sends(self) -> Iterator[_Sent]:
        end = len(self.steps)
        inside = [(i, a) for i, pieces in enumerate(self.inside) for a in pieces]
        moves = [(i, a) for i, before in enumerate(self.before) for a in before]
        evicted: dict[tuple[int, int], int] = {}
        for index, action in (*moves, *inside):
            if action.op is Op.WAIT_EVICT:
                evicted[action[1:3]] = min(index, evicted.get(action[1:3], end))
        backward = {step[1:3]: i for i, step in enumerate(self.steps) if step.op in BACKWARD}
        following: dict[tuple[Op, int | None], int] = {}
        for index, send in reversed(list(enumerate(self.sends))):
            if send is not None:
                channel, microbatch = (send.op, send.peer), send[1:3]
                due = following.get(channel, end)
                if send.op is Op.SEND_F:
                    due = min(due, evicted.get(microbatch, end), backward.get(microbatch, end))
                following[channel] = index + 1
                yield _Sent(send, self._received(send), due)

    def _made(self, receive: Action) -> int:
        """Return when the computation that makes what is received runs."""
        result, stage = (Op.F, receive.stage - 1) if receive.op is Op.RECV_F else (Op.B, receive.stage + 1)
        return self.begins[result, stage, receive.microbatch]

    def _received(self, send: Action) -> Moment:
        """Return when the computation that uses what was sent runs."""
        result, stage = (Op.F, send.stage + 1) if send.op is Op.SEND_F else (Op.B, send.stage - 1)
        moment = self._moment(result, stage, send.microbatch)
        if moment[0] < 0:
            raise PlanError(f"{send} carries what no computation of stage {stage} uses")
        return moment

    def _moment(self, result: Op, stage: int, microbatch: int) -> Moment:
        return self.begins[result, stage, microbatch], self.ranks[stage]


def _completion(start: Action | None) -> Action | None:
    return None if start is None else Action(WAIT_OF[start.op], *start[1:])


def without_transfers(plan: Plan) -> Plan:
    """Return a plan without its transfers, recomputations and budgets, pieces of computations kept: where a balance pass starts."""
    lanes = tuple(tuple(a for a in lane if a.op in KEPT) for lane in plan.actions)
    return replace(plan, actions=lanes, served=((),) * plan.num_ranks, slots=(None,) * plan.num_ranks, budgets=None)


def computations_only(plan: Plan) -> Plan:
    """Return a plan without its transfers, recomputations, budgets and sizes, with all computations whole."""
    whole = tuple(
        tuple(a._replace(part=0) if a.part else a for a in lane if a.op not in COMPUTE or not plan.goes_on(a))
        for lane in plan.actions
    )
    return replace(without_transfers(replace(plan, actions=whole)), sizes=None)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan in their order, for evaluation; `communicate` adds the transfers again."""
    forwards = tuple(tuple(a for a in plan.compute(rank) if a.op is Op.F) for rank in range(plan.num_ranks))
    plain = without_transfers(replace(plan, actions=forwards))
    return replace(plain, name=f"{plan.name}/forward", sizes=None, has_backward=False)
