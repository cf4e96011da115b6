"""What each action waits for at the other end of its transfer, and what waits for it there.

Every transfer is an unbuffered rendezvous: a receive completes once its send has started, a send once its receive has completed.
An ACCEPT starts once its EVICT has, because the sizes arrive with it. An exchange of gradients completes once both ends have
started it.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from bpipe.flow.flow import BACKWARD, FORWARD, Flow
from bpipe.plan.action import MESSAGES, RECEIVER_OF, START_OF, WAIT_OF, Action, Op

__all__: list[str] = []


def _enablers() -> dict[Op, Op]:
    """Return for each operation the one at the other end that must happen before it can go on."""
    enabled_by = {Op.ACCEPT: Op.EVICT, Op.WAIT_REDUCE_GRAD: Op.REDUCE_GRAD}
    for send, receive in RECEIVER_OF.items():
        enabled_by[WAIT_OF[receive]] = send
        enabled_by[WAIT_OF[send]] = WAIT_OF[receive]
    return enabled_by


ENABLED_BY = _enablers()
ENABLERS = frozenset(ENABLED_BY.values())
LINKED = ENABLERS | ENABLED_BY.keys()

Kind = tuple[Op, int, int]  # operation, stage and part
Event = tuple[Op, Hashable]  # an operation, and what it moves


class Role(NamedTuple):
    """The part that actions of one kind have in their transfers; whether something has happened is one byte per unit."""

    awaited: Event | None  # what must have happened at the other end
    has_happened: bytearray | None  # whether it has
    event: Event | None  # what the action is to the other end
    happening: bytearray | None


class Roles(dict[Kind, Role]):
    """The roles of the actions of a plan, each made when it is first asked for.

    Both ends of a message name the parts of the model between which it goes, so that it is one event whichever replicas of the
    parts' stages send and receive it.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._states: dict[Event, bytearray] = {}

    def __missing__(self, kind: Kind) -> Role:
        op, stage, part = kind
        moved = self.moved(*kind) if op in LINKED else None
        awaited: Event | None = (ENABLED_BY[op], moved) if op in ENABLED_BY else None
        if op is Op.WAIT_REDUCE_GRAD:
            awaited = ENABLED_BY[op], self._at_other_end(stage, part)
        event = (op, moved) if op in ENABLERS else None
        role = self[kind] = Role(awaited, self._state(awaited), event, self._state(event))
        return role

    def missing(self, action: Action) -> Action:
        """Return what must happen at the other end before an action can go on."""
        op, stage, unit, part, _ = action
        enabler = ENABLED_BY[op]
        if op in MESSAGES:
            other = part - 1 if part else self._neighbour(op, stage, unit)
            return Action(enabler, stage if other is None else other, unit, part and stage + 1)
        if op is Op.WAIT_REDUCE_GRAD:
            other, back = self._at_other_end(stage, part)
            return Action(enabler, other, unit, back)
        return Action(enabler, stage, unit, part)

    def _state(self, event: Event | None) -> bytearray | None:
        return None if event is None else self._states.setdefault(event, bytearray(self._flow.num_units))

    def moved(self, op: Op, stage: int, part: int) -> Hashable:
        """Return what an action moves, in words that are the same at both ends."""
        if op not in MESSAGES:
            return stage, part
        flow = self._flow
        other = part - 1 if part else self._neighbour(op, stage, flow.units.of(flow.turns_of(stage)[0])[0])
        ends = flow.parts[stage], -1 if other is None else flow.parts[other]
        return bool(part), ends if START_OF.get(op, op) in RECEIVER_OF else ends[::-1]

    def _at_other_end(self, stage: int, part: int) -> tuple[int, int]:
        """Return the stage and the part at the other end of an exchange of gradients."""
        found = self._flow.exchanges.get((stage, part))
        return -1 if found is None else found.other, part and stage + 1

    def _neighbour(self, op: Op, stage: int, unit: int) -> int | None:
        """Return the stage at the other end of a message that names none."""
        flow, start = self._flow, START_OF.get(op, op)
        find = flow.sent if start in RECEIVER_OF else flow.received
        messages = find(FORWARD if start in (Op.SEND_F, Op.RECV_F) else BACKWARD, stage, flow.turn_of(unit))
        return next((message.stage for message in messages if not message.is_aside), None)
