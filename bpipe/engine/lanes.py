"""Run a rank's lanes during a step: computations in the caller's thread, and one thread per evictor that it serves.

If only the device waits for transfers, the caller's thread issues all actions, in an order that does not stall when hardware
queues run out.
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

Pair = Callable[[Run, Callable[[Action], None], Action, Action], None]

MOST_PLANS = 8  # plans whose issue order is kept


class Lanes:
    """Runs steps of one rank.

    Args:
        transport: carries its messages.
    """

    def __init__(self, transport: Transport) -> None:
        self._device, self._streams, self._is_issuing = transport.device, transport.streams, transport.waits_on_device
        self._servers: list[AcceptorThread] = []
        self._issued: deque[tuple[Plan, list[tuple[int, Action]]]] = deque(maxlen=MOST_PLANS)

    def drive(self, run: Run, control: ControlPlane, group_ranks: Sequence[int], pair: Pair | None) -> None:
        """Run all actions of a step.

        Args:
            run: the step.
            control: of the pipeline.
            group_ranks: the ranks of the group, by rank of the plan.
            pair: runs a forward and the backward behind it side by side, where the plan says so; None: one after the other.

        Raises:
            BaseException: the error of one of the actions, or the reason why another rank cannot go on.
        """
        chains, activity = run.chains(), control.activity
        activity.begin(run.plan, run.rank, run.step, group_ranks, chains)
        lane: Iterator[tuple[int, Action]] = enumerate(run.plan.actions[run.rank])
        execute: Callable[[Action], None] = run.execute
        if self._is_issuing:
            lane, execute = iter(self._issue_order(run.plan, run.rank)), partial(self._issue, run, activity)
        else:
            for peer, chain in chains.items():
                self._servers.append(AcceptorThread(run.execute, chain, self._side_stream(run.rank, peer), control))

        def half(action: Action) -> None:
            try:
                execute(action)
            except BaseException:
                activity.under_way = action  # the position is the forward's
                raise

        for activity.position, action in lane:
            if control.failure is not None:
                control.check()
            if pair is not None and run.plan.begins_pair(action):
                activity.beside = next(lane)[1]
                pair(run, half, action, activity.beside)
                activity.beside = None
            else:
                execute(action)
        activity.position, activity.under_way = len(run.plan.actions[run.rank]), None
        self.join()
        control.check()

    def prepare(self, plan: Plan, rank: int) -> None:
        """Compute the order in which actions are issued, if it differs from the order of the lanes.

        Raises:
            PlanError: not every device can run the plan.
        """
        if self._is_issuing:
            self._issue_order(plan, rank)

    def _issue_order(self, plan: Plan, rank: int) -> list[tuple[int, Action]]:
        """Return the actions that the caller's thread issues, in order, each with the position of the lane at that time."""
        for known, order in self._issued:
            if known is plan:
                return order
        places: dict[Action, deque[int]] = defaultdict(deque)
        for place, action in enumerate(plan.actions[rank]):
            places[action].append(place)  # gathers and reductions of weights occur several times
        order, place = [], 0
        for action in issue_orders(plan)[rank]:
            place = places[action].popleft() if action.op not in SERVED else place
            order.append((place, action))
        self._issued.append((plan, order))
        return order

    def _stand(self, run: Run, activity: Activity, action: Action) -> None:
        """Note the action that is issued, because the lane's position alone does not show it."""
        if self._is_issuing:
            activity.under_way, run.position = action, activity.position

    def _issue(self, run: Run, activity: Activity, action: Action) -> None:
        """Run an action of the issue order; one for an evictor runs on that evictor's stream."""
        self._stand(run, activity, action)
        if action.op not in SERVED or action.peer is None:
            run.execute(action)
            return
        if not run.serves(action.peer):
            return
        with on_stream(self._side_stream(run.rank, action.peer)):
            run.execute(action)
        activity.serving[action.peer] += 1

    def join(self, most_s: float | None = None) -> None:
        """Wait until all acceptor threads have ended, or at most `most_s` seconds for each of them."""
        for server in self._servers:
            server.join(most_s)
        self._servers = []

    def _side_stream(self, rank: int, evictor: int) -> Stream | None:
        """Return the stream on which an evictor's buffers live and its transfers run; it is the same in every step."""
        return self._streams.of(serving(rank, evictor), self._device)
