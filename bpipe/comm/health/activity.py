"""This rank's position in the plan. Writing costs one assignment per action; the control thread reads it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple

from bpipe.comm.wire.codec import decode, encode
from bpipe.errors import CommError
from bpipe.flow.units import WHOLE, Units
from bpipe.plan.action import HOST, RECEIVES, SHARDING, WAIT_OF
from bpipe.schedules import Action, Plan

__all__: list[str] = []

WAITS = frozenset(WAIT_OF.values())
HOLDING_UP = WAITS | RECEIVES.keys()  # which may wait for a header
MAX_SERVED = 2**12


class State(IntEnum):
    """The state of a rank in a pipeline."""

    OUTSIDE = 0  # nothing: the user's code between steps
    MEETING = 1  # it waits for the others in a collective call
    PREPARING = 2  # it connects to the others for a step on which all agree
    RUNNING = 3  # a step
    SHARING = 4  # it exchanges gradients or states with other replicas of its stage
    AGREEING = 5  # it reads what all ranks gave, and so may find that they disagree, as the others do


class Status(NamedTuple):
    """A rank's report about itself.

    Args:
        rank: its rank in the plan.
        step: the number of the step that it runs, or would run next.
        position: its position in its lane of the plan, while it runs a step.
        seconds: how long it has been there.
        serving: for each evictor that it serves, the evictor and the position in its chain.
        call: the number of its latest collective call.
        filling: the name of the fill job that it runs now; empty if it runs none.
    """

    state: State
    rank: int
    step: int
    position: int
    seconds: float = 0.0
    serving: tuple[tuple[int, int], ...] = ()
    call: int = 0
    filling: str = ""

    def pack(self) -> bytes:
        return encode(self)

    @classmethod
    def unpack(cls, data: bytes) -> Status:
        """Read what `pack` wrote.

        Raises:
            CommError: the bytes are not a status.
        """
        status = decode(cls, data, "status")
        ranks = [status.rank, *(evictor for evictor, _ in status.serving)]
        if min(ranks) < 0 or len(ranks) > MAX_SERVED + 1 or not 0 <= status.seconds < 1e9:
            raise CommError(f"not a valid status: rank {status.rank}, {len(status.serving)} evictors, {status.seconds} s")
        return status


class Activity:
    """This rank's current position.

    Attributes:
        position: the position of the action under way in this rank's lane of the plan.
        serving: likewise in the chain of each evictor that this rank serves.
        under_way: the action under way, if one thread issues all actions in a different order from the lane's.
        beside: the backward that runs side by side with the forward at the position, if there is one.
        filling: the name of the fill job that this rank runs while it waits; empty if it runs none.
        unit: what the actions are about, if not the microbatches of a step, such as "tick 5": then every step runs the same plan,
            and ranks may be in different ones. Empty if they are about microbatches.
    """

    def __init__(self) -> None:
        self.state = State.OUTSIDE
        self.step = 0
        self.call = 0  # the number of the latest collective call
        self.rank = 0
        self.plan: Plan | None = None
        self.position = 0
        self.serving: dict[int, int] = {}
        self.under_way: Action | None = None
        self.beside: Action | None = None
        self.filling = self.unit = ""
        self.group_ranks: Sequence[int] = ()

    def begin(self, plan: Plan, rank: int, step: int, group_ranks: Sequence[int], evictors: Iterable[int] = ()) -> None:
        """Record that a step starts.

        Args:
            plan: what it runs; `rank` is this rank's place in it.
            step: its number.
            group_ranks: for each rank of the plan, its rank in the group.
            evictors: the ranks whose activations this rank stores.
        """
        self.plan, self.rank, self.step, self.group_ranks = plan, rank, step, group_ranks
        self.position = 0
        self.serving, self.under_way, self.beside = dict.fromkeys(evictors, 0), None, None
        self.state = State.RUNNING

    def end(self, num_steps: int) -> None:
        self.state, self.plan, self.step = State.OUTSIDE, None, num_steps
        self.under_way = self.beside = None
        self.unit = ""

    def group_rank(self, plan_rank: int | None) -> int | None:
        """Convert a rank of the plan to its rank in the group."""
        return self.group_ranks[plan_rank] if plan_rank is not None and plan_rank < len(self.group_ranks) else plan_rank

    def status(self) -> Status:
        serving = tuple(self.serving.items()) if self.state is State.RUNNING else ()
        return Status(self.state, self.rank, self.step, self.position, 0.0, serving[:MAX_SERVED], self.call, self.filling)

    def action(self) -> Action | None:
        """Return the action under way; None outside a step, or when only the activations of others keep this rank in it."""
        return self.under_way or action_at(self.plan, self.status())

    @property
    def units(self) -> Units:
        """Those of the plan under way."""
        return WHOLE if self.plan is None else self.plan.units

    def place(self) -> str:
        """Describe the stage, microbatch and action under way; empty outside a step."""
        action = self.action()
        place = "" if action is None else self.place_of(action)
        if self.beside is not None and action != self.beside:
            place += f" beside {self.beside.text(self.units)}"
        return f"fill job {self.filling}, {place}".removesuffix(", ") if self.filling else place

    def place_of(self, action: Action) -> str:
        """Describe an action of this rank in words."""
        return f"stage {action.stage}, {self.unit}, action {action}" if self.unit else place_of(action, self.units)

    def is_waiting(self) -> bool:
        """Return whether this rank cannot go on without another one."""
        if self.filling:
            return False
        if self.state is not State.RUNNING:
            return self.state in (State.MEETING, State.SHARING)
        action = self.action()
        return action is None or (action.op in HOLDING_UP and action.peer != HOST)


def action_at(plan: Plan | None, status: Status) -> Action | None:
    """Return the action at the position in a rank's status; None if it does not run a plan or has reached the end of its lane."""
    if plan is None or status.state is not State.RUNNING or not status.rank < plan.num_ranks:
        return None
    lane = plan.actions[status.rank]
    return lane[status.position] if 0 <= status.position < len(lane) else None


def place_of(action: Action, units: Units = WHOLE) -> str:
    """Describe an action of a plan with these units in words."""
    which = "" if action.op in SHARDING else f" {units.name(action.microbatch)},"
    return f"stage {action.stage},{which} action {action.text(units)}"
