"""Where a rank stands: written by those who run its lanes, at the price of an assignment an action, and read by whoever asks."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from bpipe.errors import CommError
from bpipe.schedules import Action, Plan
from bpipe.schedules.action import HOST, RECEIVES, WAIT_OF

__all__: list[str] = []

HEAD = struct.Struct("<BHqqdH")
GUESTS = struct.Struct("<Iq")
WAITS = frozenset(WAIT_OF.values())
HOLDING_UP = WAITS | RECEIVES.keys()  # which may wait for a header
MOST_GUESTS = 2**12


class State(IntEnum):
    """What a rank does with a pipeline."""

    OUTSIDE = 0  # nothing: the user's code between steps
    MEETING = 1  # it waits for the others in a collective call
    PREPARING = 2  # it makes the plan of a step
    RUNNING = 3  # a step


class Status(NamedTuple):
    """What a rank tells of itself.

    Args:
        rank: in the plan.
        step: the number of the one it runs, or would run next.
        position: in its lane of the plan, when it runs one.
        seconds: for how long it has been there.
        guests: the position in each evictor's chain of what it serves, by evictor.
    """

    state: State
    rank: int
    step: int
    position: int
    seconds: float = 0.0
    guests: tuple[tuple[int, int], ...] = ()

    def pack(self) -> bytes:
        head = HEAD.pack(self.state, self.rank, self.step, self.position, self.seconds, len(self.guests))
        return head + b"".join(GUESTS.pack(*guest) for guest in self.guests)

    @classmethod
    def unpack(cls, data: bytes) -> Status:
        """Read what `pack` wrote.

        Raises:
            CommError: the bytes are no status.
        """
        if len(data) < HEAD.size:
            raise CommError(f"{len(data)} bytes are no status")
        state, rank, step, position, seconds, count = HEAD.unpack_from(data)
        if state not in State.__members__.values() or len(data) != HEAD.size + count * GUESTS.size or not 0 <= seconds < 1e9:
            raise CommError(f"no status: state {state}, {count} guests, {seconds} s, {len(data)} bytes")
        guests = tuple(GUESTS.iter_unpack(data[HEAD.size :]))
        return cls(State(state), rank, step, position, seconds, guests)


class Activity:
    """Where this rank stands now.

    Attributes:
        position: of the action under way in this rank's lane of the plan.
        guests: likewise in the chains that this rank serves, by evictor.
        under_way: the action under way, where one thread issues all of them in another order than the lane's.
    """

    def __init__(self) -> None:
        self.state = State.OUTSIDE
        self.step = 0
        self.call = 0  # the number of the latest collective call
        self.rank = 0
        self.plan: Plan | None = None
        self.position = 0
        self.guests: dict[int, int] = {}
        self.under_way: Action | None = None
        self.group_ranks: Sequence[int] = ()

    def begin(self, plan: Plan, rank: int, step: int, group_ranks: Sequence[int], evictors: Iterable[int] = ()) -> None:
        """A step starts.

        Args:
            plan: what it runs, and `rank` this rank's place in it.
            step: its number.
            group_ranks: the rank of the group that is each rank of the plan.
            evictors: whose guests this rank keeps.
        """
        self.plan, self.rank, self.step, self.group_ranks = plan, rank, step, group_ranks
        self.position = 0
        self.guests, self.under_way = dict.fromkeys(evictors, 0), None
        self.state = State.RUNNING

    def end(self, num_steps: int) -> None:
        self.state, self.plan, self.step, self.under_way = State.OUTSIDE, None, num_steps, None

    def group_rank(self, plan_rank: int | None) -> int | None:
        """The rank of the group that is a rank of the plan."""
        return self.group_ranks[plan_rank] if plan_rank is not None and plan_rank < len(self.group_ranks) else plan_rank

    def status(self) -> Status:
        guests = tuple(self.guests.items()) if self.state is State.RUNNING else ()
        return Status(self.state, self.rank, self.step, self.position, 0.0, guests[:MOST_GUESTS])

    def action(self) -> Action | None:
        """The action under way; None outside of a step, or when only guests keep it."""
        return self.under_way or action_at(self.plan, self.status())

    def place(self) -> str:
        """The stage, microbatch, action and step; empty outside of a step."""
        action = self.action()
        return "" if action is None else place_of(action)

    def is_waiting(self) -> bool:
        """Whether this rank cannot go on without another one."""
        if self.state is not State.RUNNING:
            return self.state is State.MEETING
        action = self.action()
        return action is None or (action.op in HOLDING_UP and action.peer != HOST)


def action_at(plan: Plan | None, status: Status) -> Action | None:
    """The action of a rank that runs a plan; None if it runs none, or has come to the end of its lane."""
    if plan is None or status.state is not State.RUNNING or not status.rank < plan.num_ranks:
        return None
    lane = plan.actions[status.rank]
    return lane[status.position] if 0 <= status.position < len(lane) else None


def place_of(action: Action) -> str:
    """An action in words."""
    return f"stage {action.stage}, microbatch {action.microbatch}, action {action}"
