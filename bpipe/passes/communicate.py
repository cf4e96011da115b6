"""The communicate pass: give every computation the transfers that bring its inputs and carry its outputs away.

At the boundary before each computation, in this order: send the previous result; post the receive of the computation
after this one, so that it arrives while this one runs (earlier if its channel's order requires it); complete older sends;
complete and start evictions and loads; and complete this computation's own receive.

    SEND_F2  RECV_B1  WAIT_SEND_F1  WAIT_EVICT0 ... EVICT1  WAIT_RECV_B0  B0

Where a plan has two directions, each stage exchanges gradients with its twin as soon as its last backward has run, and adds them up
when its rank has computed everything.

A send is completed once the next one of its channel has started, before its microbatch has been evicted or runs backward,
but not before its receive has completed in one global order of the computations (`order.clock`). All lists are
projections of that order, so they cannot deadlock; `verify` nevertheless proves it for the result.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.plan.action import BACKWARD, COMPUTE, SHARDING, WAIT_OF, Action, Op
from bpipe.plan.order import UNITS, Moments, clock_by_result
from bpipe.plan.plan import Plan

__all__: list[str] = []

KEPT = (COMPUTE - {Op.R}) | SHARDING  # kept by a pass that makes new evictions and recomputations


class _Route(NamedTuple):
    """The source of each microbatch's input of a computation, or the destination of its result."""

    op: Op  # the transfer
    wait: Op  # its completion
    peer: int  # the rank at the other end
    times: Sequence[int]  # when the computation at the other end begins, by microbatch


# The computation at the other end of a stage's transfer.
OTHER_END: dict[Op, Callable[[int], tuple[Op, int]]] = {
    Op.SEND_F: lambda stage: (Op.F, stage + 1),
    Op.RECV_F: lambda stage: (Op.F, stage - 1),
    Op.SEND_B: lambda stage: (Op.B, stage - 1),
    Op.RECV_B: lambda stage: (Op.B, stage + 1),
}

# Makes an action from its fields in half the time of `Action(...)`, because plans have millions of them.
_action: Callable[[tuple[Op, int, int, int, int]], Action] = partial(tuple.__new__, Action)

Routes = dict[tuple[Op, int], _Route | None]  # for each computation of each stage


def communicate(plan: Plan, times: tuple[Sequence[array[int]], Moments] | None = None) -> Plan:
    """Insert sends and receives into a plan of computations, with or without evictions.

    Neighbouring stages on one rank hand their tensors over without a transfer.

    Args:
        times: when the computations start, if known, as `clock_by_result` returns it.

    Raises:
        PlanError: the computations wait for each other in a cycle.
    """
    computed = [plan.compute(rank) for rank in range(plan.num_ranks)]
    starts, begins = times or clock_by_result(computed, plan.num_stages, plan.slices, plan.directions)
    sent, received = (_routes(plan, begins, find) for find in (sent_by, received_by))
    exchanges = _exchanges(plan, computed, starts)
    return replace(
        plan,
        actions=tuple(_Lane(plan, rank, times, sent, received, exchanges[rank]).emit() for rank, times in enumerate(starts)),
    )


def sent_by(plan: Plan, action: Action) -> Action | None:
    """Return the send that follows a computation if its result goes to another rank, else None."""
    if action.op is Op.F:
        return _remote(plan, action, Op.SEND_F, +1)
    return _remote(plan, action, Op.SEND_B, -1) if action.op in BACKWARD else None


def received_by(plan: Plan, action: Action) -> Action | None:
    """Return the receive that a computation needs if its input comes from another rank, else None."""
    if action.op is Op.F:
        return _remote(plan, action, Op.RECV_F, -1)
    return _remote(plan, action, Op.RECV_B, +1) if action.op in BACKWARD else None


def _remote(plan: Plan, action: Action, op: Op, offset: int) -> Action | None:
    other_stage = plan.neighbour(action.stage, offset)
    peer = None if other_stage is None else plan.stage_ranks[other_stage]
    return None if peer in (None, plan.stage_ranks[action.stage]) else Action(op, action.stage, action.microbatch, peer=peer)


def _routes(plan: Plan, begins: Moments, find: Callable[[Plan, Action], Action | None]) -> Routes:
    """Return the routes of the results of all computations, or of their inputs."""
    routes: Routes = {}
    for op in COMPUTE:
        for stage in range(plan.num_stages):
            transfer = find(plan, Action(op, stage, 0))
            if transfer is None or transfer.peer is None:
                routes[op, stage] = None
            else:
                times = begins.of(*OTHER_END[transfer.op](stage))
                routes[op, stage] = _Route(transfer.op, WAIT_OF[transfer.op], transfer.peer, times)
    return routes


def _exchanges(plan: Plan, computed: Sequence[Sequence[Action]], starts: Sequence[Sequence[int]]) -> list[list[tuple[int, Action]]]:
    """Return for each rank the exchanges of gradients with twins, each with the number of computations after which it starts.

    Two ranks exchange those of their stages in one order: that in which the later of both twins runs its last backward.
    """
    exchanges: list[list[tuple[int, Action]]] = [[] for _ in computed]
    if plan.directions == 1 or not plan.has_backward:
        return exchanges
    last: dict[int, tuple[int, int]] = {}  # of each stage: when its last backward has ended, and after how many computations
    for lane, times in zip(computed, starts):
        done = enumerate(zip(lane, times), start=1)
        last |= {action.stage: (start + UNITS[action.op], index) for index, (action, start) in done if action.op is not Op.F}
    for stage in sorted(range(plan.depth), key=lambda stage: max(last[stage][0], last[stage + plan.depth][0])):
        for one, other in ((stage, stage + plan.depth), (stage + plan.depth, stage)):
            own = exchanges[plan.stage_ranks[one]]
            after = max([last[one][1], *(index for index, _ in own)])
            own.append((after, Action(Op.REDUCE_GRAD, one, 0, peer=plan.stage_ranks[other])))
    return exchanges


class _Lane:
    """One rank's list: its computations, and the transfers at the boundary before each of them."""

    def __init__(
        self,
        plan: Plan,
        rank: int,
        begins: Sequence[int],
        sent: Routes,
        received: Routes,
        exchanges: Sequence[tuple[int, Action]] = (),
    ) -> None:
        self.rank, self.begins, self.slices, self.exchanges = rank, begins, plan.slices, exchanges
        self.steps: list[Action] = []
        self.before: list[list[Action]] = [[]]  # evictions and loads at each boundary
        self.inside: list[list[Action]] = []  # the first piece of each computation, with the actions between its pieces
        for action in plan.actions[rank]:
            if action[0] not in COMPUTE:
                self.before[-1].append(action)
            elif action[3] and plan.goes_on(action):
                self.inside[-1] += [*self.before[-1], action]
                self.before[-1] = []
            else:
                self.steps.append(action._replace(part=0) if action[3] else action)
                self.inside.append([action])
                self.before.append([])
        self.sends = [sent[step[:2]] for step in self.steps]
        self.receives = [received[step[:2]] for step in self.steps]
        self.posted = self._posts()
        self.completed = self._completions()

    def emit(self) -> tuple[Action, ...]:
        at_boundary = zip(self.posted, self.completed, self.before)
        lane = [action for actions in next(at_boundary) for action in actions]
        exchanged: list[list[Action]] = [[] for _ in self.steps]
        for after, action in self.exchanges:
            exchanged[after - 1].append(action)
        for step, inside, receive, send, exchanges, (posted, completed, moves) in zip(
            self.steps, self.inside, self.receives, self.sends, exchanged, at_boundary
        ):
            _, stage, microbatch, _, _ = step
            if receive is not None:
                lane.append(_action((receive[1], stage, microbatch, 0, receive[2])))
            lane += inside
            if send is not None:
                lane.append(_action((send[0], stage, microbatch, 0, send[2])))
            lane += exchanges
            lane += posted
            lane += completed
            lane += moves
        return (*lane, *(action._replace(op=Op.WAIT_REDUCE_GRAD) for _, action in self.exchanges))

    def _posts(self) -> list[list[Action]]:
        """Return the receives by boundary: one computation before the one that uses them, or earlier if the channel requires it.

        A channel is first in, first out. If several boundaries between stages share one, the message that arrives first may
        be used last; its receive is still posted first.
        """
        channels: dict[tuple[Op, int], list[tuple[int, int, Action]]] = defaultdict(list)
        for index, (receive, (_, stage, microbatch, _, _)) in enumerate(zip(self.receives, self.steps)):
            if receive is not None:
                op, _, peer, times = receive
                channels[op, peer].append((times[microbatch], index, _action((op, stage, microbatch, 0, peer))))
        posted: list[list[Action]] = [[] for _ in self.before]
        for arrivals in channels.values():
            turn = len(self.steps)
            for _, index, action in sorted(arrivals, reverse=True):
                if index <= turn:
                    turn = max(index - 1, 0)
                posted[turn].insert(0, action)
        return posted

    def _completions(self) -> list[list[Action]]:
        """Return the completions of sends by boundary: the first at which they are due and their receives have completed."""
        completed: list[list[Action]] = [[] for _ in self.before]
        begins, end = self.begins, len(self.begins)
        for (_, stage, microbatch, _, _), (op, wait, peer, times), boundary in self._due():
            received = times[microbatch]
            if received < 0:
                user = OTHER_END[op](stage)[1]
                raise PlanError(
                    f"{Action(op, stage, microbatch).text(self.slices)} sends a message that no computation of stage {user} uses"
                )
            received -= peer < self.rank  # of computations at one time, the one of the lower rank comes first
            while boundary < end and begins[boundary] <= received:
                boundary += 1
            completed[boundary].append(_action((wait, stage, microbatch, 0, peer)))
        return completed

    def _due(self) -> Iterator[tuple[Action, _Route, int]]:
        """Yield for each send, the latest first: its computation, its route, and the boundary by which it should be complete."""
        end, backward, evicted = len(self.steps), Op.SEND_B, Op.WAIT_EVICT
        inside = [(i, a) for i, pieces in enumerate(self.inside) if len(pieces) > 1 for a in pieces]
        moves = [(i, a) for i, before in enumerate(self.before) for a in before]
        latest = {step[1:3]: i for i, step in enumerate(self.steps) if step[0] in BACKWARD}  # for a forward's result
        for index, action in (*moves, *inside):
            if action[0] is evicted:
                latest[action[1:3]] = min(index, latest.get(action[1:3], end))
        following: dict[tuple[Op, int], int] = {}
        for index, step, send in zip(range(end, 0, -1), reversed(self.steps), reversed(self.sends)):
            if send is not None:
                channel = send[0], send[2]
                due = following.get(channel, end)
                following[channel] = index
                yield step, send, due if send[0] is backward else min(due, latest.get(step[1:3], end))


def without_transfers(plan: Plan, *, keeps_recomputed: bool = False) -> Plan:
    """Return a plan without its transfers, recomputations and budgets, but with its pieces: the input of a balance pass."""
    kept = KEPT | {Op.R} if keeps_recomputed else KEPT
    lanes = tuple(tuple(a for a in lane if a[0] in kept and a[4] is None) for lane in plan.actions)
    return replace(plan, actions=lanes, served=((),) * plan.num_ranks, slots=(None,) * plan.num_ranks, budgets=None)


def computations_only(plan: Plan) -> Plan:
    """Return a plan without its transfers, recomputations, budgets and sizes, with all computations whole."""
    whole = tuple(
        tuple(a._replace(part=0) if a[3] else a for a in lane if not (a[3] and a[0] in COMPUTE and plan.goes_on(a)))
        for lane in plan.actions
    )
    return replace(without_transfers(replace(plan, actions=whole)), sizes=None)


def forward_only(plan: Plan) -> Plan:
    """Return the forwards of a plan in their order, for evaluation; `communicate` adds the transfers again."""
    forwards = tuple(tuple(a for a in plan.compute(rank) if a.op is Op.F) for rank in range(plan.num_ranks))
    plain = without_transfers(replace(plan, actions=forwards))
    return replace(plain, name=f"{plan.name}/forward", sizes=None, has_backward=False)
