"""A rank's lanes while a step runs: the computations in the caller's thread, and a thread for each rank whose activations it keeps.

Where only the device waits for transfers, the caller's thread issues all actions, in an order that does not stall for lack of
hardware queues.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from bpipe.comm.health.activity import Activity
from bpipe.comm.health.control_plane import ControlPlane
from bpipe.comm.transport.base import Transport
from bpipe.device import Stream, on_stream, serving
from bpipe.engine.acceptor import AcceptorThread
from bpipe.engine.run import Run
from bpipe.plan.action import SERVED
from bpipe.plan.issue_order import issue_orders
from bpipe.schedules import Action, Plan

__all__: list[str] = []

MOST_PLANS = 8  # whose order is kept


class Lanes:
    """Runs steps of one rank.

    Args:
        transport: carries its messages.
    """

    def __init__(self, transport: Transport) -> None:
        self._device, self._streams, self._is_issuing = transport.device, transport.streams, transport.waits_on_device
        self._servers: list[AcceptorThread] = []
        self._issued: deque[tuple[Plan, list[tuple[int, Action]]]] = deque(maxlen=MOST_PLANS)

    def drive(self, run: Run, control: ControlPlane, group_ranks: Sequence[int]) -> None:
        """Do all actions of a step; `group_ranks` are those of the group, by rank of the plan.

        Raises:
            BaseException: whatever one of them raised, or the reason why another rank cannot go on.
        """
        chains, activity = run.plan.chains(run.rank), control.activity
        activity.begin(run.plan, run.rank, run.step, group_ranks, chains)
        lane: Iterator[tuple[int, Action]] = enumerate(run.plan.actions[run.rank])
        execute: Callable[[Action], None] = run.execute
        if self._is_issuing:
            lane, execute = iter(self._issue_order(run.plan, run.rank)), partial(self._issue, run, activity)
        else:
            for peer, chain in chains.items():
                self._servers.append(AcceptorThread(run.execute, chain, self._side_stream(run.rank, peer), control))

        def advance(piece: Action) -> None:
            for activity.position, action in lane:
                if action == piece:
                    break
                execute(action)
            self._stand(run, activity, piece)

        with run.advancing(advance):
            for activity.position, action in lane:
                if control.failure is not None:
                    control.check()
                execute(action)
        activity.position, activity.under_way = len(run.plan.actions[run.rank]), None
        self.join()
        control.check()

    def prepare(self, plan: Plan, rank: int) -> None:
        """Compute the order in which actions are issued, if it is one of its own.

        Raises:
            PlanError: not every device can carry out the plan.
        """
        if self._is_issuing:
            self._issue_order(plan, rank)

    def _issue_order(self, plan: Plan, rank: int) -> list[tuple[int, Action]]:
        """Return what the caller's thread issues, in order: each action with its place in the lane, or where the lane is then."""
        for known, order in self._issued:
            if known is plan:
                return order
        places: dict[Action, deque[int]] = defaultdict(deque)
        for place, action in enumerate(plan.actions[rank]):
            places[action].append(place)  # gathers and reductions of weights come again
        order, place = [], 0
        for action in issue_orders(plan)[rank]:
            place = places[action].popleft() if action.op not in SERVED else place
            order.append((place, action))
        self._issued.append((plan, order))
        return order

    def _stand(self, run: Run, activity: Activity, action: Action) -> None:
        """Note the action that is issued, because the place in the lane alone does not tell it."""
        if self._is_issuing:
            activity.under_way, run.position = action, activity.position

    def _issue(self, run: Run, activity: Activity, action: Action) -> None:
        """Do an action of the issue order; one for an evictor runs on that evictor's stream."""
        self._stand(run, activity, action)
        if action.op not in SERVED or action.peer is None:
            run.execute(action)
            return
        with on_stream(self._side_stream(run.rank, action.peer)):
            run.execute(action)
        activity.serving[action.peer] += 1

    def join(self, most_s: float | None = None) -> None:
        """Wait until nothing is served any more, or at most `most_s` seconds for each server."""
        for server in self._servers:
            server.join(most_s)
        self._servers = []

    def _side_stream(self, rank: int, evictor: int) -> Stream | None:
        """Return the stream on which an evictor's buffers live and its transfers run; it is the same in every step."""
        return self._streams.of(serving(rank, evictor), self._device)
