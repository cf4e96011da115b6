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

from collections.abc import Iterator, Sequence
from dataclasses import replace
from heapq import heappush
from operator import itemgetter

from bpipe.errors import PlanError
from bpipe.plan.action import COMPUTE, HOST, MIRROR, POSTS, RECEIVES, SHARDING, START_OF, WAIT_OF, Action, Identity, Op
from bpipe.plan.order import UNITS, Agenda, clock_of, run_greedily, run_in_time
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
    stuck = run_greedily(replace(plan, actions=tuple(map(_blocking, orders)), served=((),) * plan.num_ranks))
    where = [f"rank {rank} at {action._replace(op=START_OF.get(action.op, action.op))}" for rank, action, _ in sorted(stuck)]
    if where:
        raise PlanError(f"plan {plan.name!r}: with one hardware queue per device, {', '.join(where)} wait for each other forever")


def _blocking(order: Sequence[Action]) -> tuple[Action, ...]:
    """Return the transfers with other ranks in an order, each of which ends before anything else begins."""
    posts = (action for action in order if action.is_post and action.peer != HOST)
    return tuple(end for post in posts for end in (post, post._replace(op=WAIT_OF[post.op])))


class _Issuing:
    """Runs all lanes in the order of the clock; a transfer is issued when both its ends have reached it.

    The completion of a remote activation's transfer is issued only before the next transfer with its peer, because a device with
    few queues can then run other work in between.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._orders: list[list[Action]] = [[] for _ in plan.actions]
        self._chains = {(rank, peer): iter(chain) for rank in range(plan.num_ranks) for peer, chain in plan.chains(rank).items()}
        self._reached: dict[Transfer | None, tuple[int, Action]] = {}  # transfers that one end has reached so far
        self._issued: set[Transfer | None] = set()
        self._blocked: dict[Transfer | None, tuple[int, int, Action]] = {}  # lanes that wait for a transfer: when, who, and where
        self._agenda: Agenda = [(0, rank) for rank in range(plan.num_ranks)]

    def run(self) -> list[list[Action]]:
        starts, _ = clock_of(self._plan, list(map(self._plan.compute, range(self._plan.num_ranks))))
        run_in_time([self._lane(rank, own) for rank, own in enumerate(starts)], self._agenda)
        if self._blocked:
            stuck = [f"rank {rank} at {action}" for _, rank, action in sorted(self._blocked.values(), key=itemgetter(1))]
            raise PlanError(f"plan {self._plan.name!r}: {', '.join(stuck)} wait for each other forever")
        for (rank, _), chain in self._chains.items():
            self._orders[rank] += chain
        return self._orders

    def _lane(self, rank: int, starts: Sequence[int]) -> Iterator[int | None]:
        """Issue a rank's actions one after the other; the first one, and the second one of a pair, at once."""
        plan, pair = self._plan, UNITS[Op.B]  # what a pair takes more than its forward
        ends = (start + UNITS[one.op] + pair * plan.begins_pair(one) for start, one in zip(starts, plan.compute(rank)))
        goes_on, now, end = True, 0, next(ends, 0)  # the end times of the previous computation and of the next one
        for action in plan.actions[rank]:
            # A computation is issued when it ends, so that transfers before that are issued first.
            moment = end if action.op in _WITH_COMPUTATION else now
            if not goes_on:
                yield moment
            is_own, transfer = action.peer is None or action.peer == HOST, _transfer(plan, action)
            if action.op in START_OF and not is_own and transfer not in self._issued:
                self._blocked[transfer] = moment, rank, action
                yield None
            if action.is_post and action.op not in MIRROR:
                self._come(rank, action, transfer)
            else:
                self._orders[rank].append(action)
                if action.op in POSTS and not is_own:
                    self._serve(rank, action)
                    self._issued.add(transfer)
            if action.op in COMPUTE:
                now, end = end, next(ends, end)
            goes_on = plan.begins_pair(action)

    def _come(self, rank: int, action: Action, transfer: Transfer | None) -> None:
        """Note that one end of a message has reached its transfer; if it is the second, issue both, and wake who waits for it."""
        if transfer not in self._reached:
            self._reached[transfer] = (rank, action)
            return
        for end, post in (self._reached.pop(transfer), (rank, action)):
            self._orders[end].append(post)
        self._issued.add(transfer)
        if transfer in self._blocked:
            heappush(self._agenda, self._blocked.pop(transfer)[:2])

    def _serve(self, evictor: int, action: Action) -> None:
        """Issue an acceptor's end, and the actions before it in its chain."""
        assert action.peer is not None
        served = (MIRROR[action.op], *action.part_key)
        for each in self._chains[action.peer, evictor]:
            self._orders[action.peer].append(each)
            if each.identity == served:
                break


def _transfer(plan: Plan, action: Action) -> Transfer | None:
    """Return the transfer that an action starts or completes, as its sender names it; of an exchange, the lower stage."""
    start = START_OF.get(action.op, action.op)
    if start is Op.REDUCE_GRAD and action.peer is not None:
        return min((start, *action[1:4]), plan.other_end(action._replace(op=start)))
    if start not in POSTS:
        return None
    post = action._replace(op=start)
    return plan.other_end(post) if start in RECEIVES else post.identity
