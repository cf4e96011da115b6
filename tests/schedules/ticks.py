"""A second simulator, which shares no code with the first: it looks at every rank and every link once in each unit of time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from bpipe.schedules import Action, Plan

RECEIVER = {"SEND_F": ("RECV_F", 1), "SEND_B": ("RECV_B", -1), "EVICT": ("ACCEPT", 0), "RETURN": ("LOAD", 0)}

HOST = -1

Duration = Callable[[Action], int]
Name = tuple[str, int, int, int]


class _Message:
    """A transfer: posted at both ends, then carried for some units of time."""

    def __init__(self) -> None:
        self.posted: set[str] = set()
        self.ready_at: int | None = None
        self.left: int | None = None
        self.is_done = False


def run(plan: Plan, computing: Duration, carrying: Duration, limit: int = 100_000) -> dict[str, int]:
    """When each action has ended, by its text.

    Computations take `computing(action)` units of time, transfers `carrying(send)`; both at least 1.
    """
    lanes = [(rank, list(lane)) for rank in range(plan.num_ranks) for lane in (plan.actions[rank], *plan.chains(rank).values())]
    position = [0] * len(lanes)
    work: dict[int, int] = {}
    messages: dict[Name, _Message] = defaultdict(_Message)
    links: dict[tuple[int, int], list[tuple[Name, int]]] = defaultdict(list)
    ended: dict[str, int] = {}

    def name(action: Action) -> Name:
        """A transfer is called after its sending end."""
        op = str(action.op).removeprefix("WAIT_")
        for send, (receive, offset) in RECEIVER.items():
            if op == receive:
                return send, action.stage - offset, action.microbatch, action.part
        return op, action.stage, action.microbatch, action.part

    def go_on(index: int, now: int) -> bool:
        rank, lane = lanes[index]
        if position[index] == len(lane):
            return False
        action = lane[position[index]]
        op = str(action.op)
        if op in ("F", "B", "I", "W"):
            if work.setdefault(index, computing(action)) > 0:
                return False
            del work[index]
        elif op.startswith("WAIT_"):
            if not messages[name(action)].is_done:
                return False
        elif op not in ("UNSHARD", "RESHARD", "REDUCE_GRAD"):
            message = messages[name(action)]
            message.posted.add(op)
            if op in RECEIVER:
                links[rank, action.peer].append((name(action), carrying(action)))
            elif action.peer == HOST:
                links[HOST, rank].append((name(action), carrying(action)))
            if len(message.posted) == 2 or action.peer == HOST:
                message.ready_at = now
        ended[str(action)] = now
        position[index] += 1
        return True

    for now in range(limit):
        while any(go_on(index, now) for index in range(len(lanes))):
            pass
        if all(position[index] == len(lane) for index, (_, lane) in enumerate(lanes)):
            return ended
        for queue in links.values():
            ready = sorted((m.ready_at, turn) for turn, (key, _) in enumerate(queue) if (m := messages[key]).ready_at is not None)
            if ready:
                key, duration = queue[ready[0][1]]
                message = messages[key]
                message.left = (duration if message.left is None else message.left) - 1
                if message.left == 0:
                    message.is_done = True
                    queue.pop(ready[0][1])
        for index in work:
            work[index] -= 1
    raise AssertionError("the plan never ends")
