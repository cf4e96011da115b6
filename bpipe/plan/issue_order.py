"""Compute the order in which one thread issues all work of a rank's device, so that devices can never deadlock.

On NCCL a wait blocks the device and not the host, which issues far ahead. In the worst case the device then runs everything in the
order of issue: if streams share a hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS`), or if no second transfer fits beside one that
waits for its other end. A receive that is issued early would then block the work that its sender is waiting for.

So both ends of each transfer are issued at one moment of a global order, when both ranks have reached it; a rank's actions for
its remote activations are issued there too, by the same thread. Then the first unfinished transfer of that order is the next work
at both its ends, even if there are few queues. Everything else, including memory, is as in the plan: no transfer starts earlier
than there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from bpipe.errors import PlanError
from bpipe.plan.action import COMPUTE, HOST, MIRROR, POSTS, RECEIVES, SHARDING, START_OF, Action, Identity, Op
from bpipe.plan.order import UNITS, clock_of
from bpipe.plan.plan import Plan

__all__ = ["check_issue_orders", "issue_orders"]

Transfer = Identity  # of the action that its sender starts

_WITH_COMPUTATION = COMPUTE | SHARDING | {Op.WAIT_RECV_F, Op.WAIT_RECV_B}


def issue_orders(plan: Plan) -> list[list[Action]]:
    """Return each rank's actions, including its acceptor actions, in the order in which its host issues them to its device.

    Args:
        plan: a verified plan.

    Raises:
        PlanError: its ranks wait for each other in a cycle.
    """
    orders = _Issuing(plan).run()
    check_issue_orders(plan, orders)
    return orders


def check_issue_orders(plan: Plan, orders: Sequence[Sequence[Action]]) -> None:
    """Prove that all ranks finish even if each device does one thing at a time and a transfer takes both of its ends at once.

    Args:
        plan: the plan of the actions.
        orders: for each rank, its actions in the order in which they are issued.

    Raises:
        PlanError: they do not finish, an action is missing, or one is issued before the action that it completes.
    """
    for rank, order in enumerate(orders):
        if sorted(order) != sorted((*plan.actions[rank], *plan.served[rank])):
            raise PlanError(f"plan {plan.name!r}: the issue order of rank {rank} does not consist of its actions")
        started: set[tuple[Op, int, int, int]] = set()
        for action in order:
            started.add(action.identity)
            if action.op in START_OF and action.start_identity not in started:
                raise PlanError(f"plan {plan.name!r}: rank {rank} issues {action} before the transfer that it completes")
    positions = [0] * plan.num_ranks
    there: dict[Transfer | None, int] = {}  # the rank that has reached a transfer
    runnable = list(range(plan.num_ranks))
    while runnable:
        rank = runnable.pop()
        while positions[rank] < len(orders[rank]):
            action = orders[rank][positions[rank]]
            if action.is_post and action.peer != HOST:
                transfer = _transfer(plan, action)
                other = there.pop(transfer, None)
                if other is None:
                    there[transfer] = rank
                    break
                positions[other] += 1
                runnable.append(other)
            positions[rank] += 1
    stuck = [f"rank {r} at {orders[r][at]}" for r, at in enumerate(positions) if at < len(orders[r])]
    if stuck:
        raise PlanError(f"plan {plan.name!r}: with one hardware queue per device, {', '.join(stuck)} wait for each other forever")


class _Lane:
    """A rank's lane, and when each of its computations ends."""

    def __init__(self, actions: Sequence[Action], ends: Iterator[int]) -> None:
        self.actions, self._ends = actions, ends
        self.position = 0
        self._now, self._end = 0, next(ends, 0)  # the end times of the previous computation and of the next one

    def is_done(self) -> bool:
        return self.position == len(self.actions)

    def moment(self) -> int:
        """Return when the next action is issued: a computation when it ends, so that transfers before that are issued first."""
        return self._end if self.actions[self.position].op in _WITH_COMPUTATION else self._now

    def computed(self) -> None:
        """Note that a computation has been issued."""
        self._now, self._end = self._end, next(self._ends, self._end)


class _Issuing:
    """Runs all lanes in the order of the clock; a transfer is issued when both its ends have reached it.

    The completion of a remote activation's transfer is issued only before the next transfer with its peer, because a device with
    few queues can then run other work in between.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._ranks = plan, range(plan.num_ranks)
        self._orders: list[list[Action]] = [[] for _ in self._ranks]
        computed = [plan.compute(rank) for rank in self._ranks]
        starts, _ = clock_of(plan, computed)
        self._lanes = [
            _Lane(plan.actions[r], (start + _units(plan, one) for start, one in zip(starts[r], computed[r]))) for r in self._ranks
        ]
        self._chains = {(rank, peer): iter(chain) for rank in self._ranks for peer, chain in plan.chains(rank).items()}
        self._reached: dict[Transfer | None, tuple[int, Action]] = {}  # transfers that one end has reached so far
        self._issued: set[Transfer | None] = set()
        self._waiting: dict[Transfer | None, list[int]] = defaultdict(list)

    def run(self) -> list[list[Action]]:
        ready = [(0, rank) for rank in self._ranks if self._plan.actions[rank]]
        while ready:
            _, rank = heappop(ready)
            for each in self._advance(rank):
                if not self._lanes[each].is_done():
                    heappush(ready, (self._lanes[each].moment(), each))
        stuck = [f"rank {r} at {lane.actions[lane.position]}" for r, lane in enumerate(self._lanes) if not lane.is_done()]
        if stuck:
            raise PlanError(f"plan {self._plan.name!r}: {', '.join(stuck)} wait for each other forever")
        for (rank, _), chain in self._chains.items():
            self._orders[rank] += chain
        return self._orders

    def _advance(self, rank: int) -> list[int]:
        """Issue the next action of a rank, or both of a pair; return the ranks that may go on."""
        lane, able = self._lanes[rank], [rank]
        while True:
            action = lane.actions[lane.position]
            woken = self._issue(rank, action)
            if woken is None:
                return []
            able += woken
            lane.position += 1
            if action.op in COMPUTE:
                lane.computed()
            if not self._plan.begins_pair(action):
                return able

    def _issue(self, rank: int, action: Action) -> list[int] | None:
        """Issue an action, or note that a rank has reached it; return the ranks that waited for it, or None if it must wait."""
        is_own, transfer = action.peer is None or action.peer == HOST, _transfer(self._plan, action)
        if action.op in START_OF and not is_own and transfer not in self._issued:
            self._waiting[transfer].append(rank)
            return None
        if action.is_post and action.op not in MIRROR:
            return self._come(rank, action, transfer)
        self._orders[rank].append(action)
        if action.op in POSTS and not is_own:
            self._serve(rank, action)
            self._issued.add(transfer)
        return []

    def _come(self, rank: int, action: Action, transfer: Transfer | None) -> list[int]:
        """Note that one end of a message has reached its transfer; if it is the second, issue both and return the ranks woken."""
        if transfer not in self._reached:
            self._reached[transfer] = (rank, action)
            return []
        for end, post in (self._reached.pop(transfer), (rank, action)):
            self._orders[end].append(post)
        self._issued.add(transfer)
        return self._waiting.pop(transfer, [])

    def _serve(self, evictor: int, action: Action) -> None:
        """Issue an acceptor's end, and the actions before it in its chain."""
        assert action.peer is not None
        served = (MIRROR[action.op], *action.part_key)
        for each in self._chains[action.peer, evictor]:
            self._orders[action.peer].append(each)
            if each.identity == served:
                break


def _units(plan: Plan, action: Action) -> int:
    """Return how long a computation takes, or a pair from its forward on."""
    return UNITS[action.op] + UNITS[Op.B] * plan.begins_pair(action)


def _transfer(plan: Plan, action: Action) -> Transfer | None:
    """Return the transfer that an action starts or completes, as its sender names it; of twins, the one of the first direction."""
    start = START_OF.get(action.op, action.op)
    if start is Op.REDUCE_GRAD and action.peer is not None:
        return (start, action.stage % plan.depth, 0, 0)
    if start not in POSTS:
        return None
    post = action._replace(op=start)
    return plan.other_end(post) if start in RECEIVES else post.identity
