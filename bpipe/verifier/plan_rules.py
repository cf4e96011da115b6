"""The rules that involve several ranks of a plan, checked once each rank is complete by itself."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from functools import cache, partial
from typing import Any

from bpipe.plan.action import HOST, POSTS, RECEIVES, SENDS, SERVED, Action, Channel, Op, Purpose
from bpipe.plan.order import run_greedily
from bpipe.plan.plan import Plan
from bpipe.plan.roles import Roles
from bpipe.verifier.rank_index import Finding, Kind

__all__: list[str] = []

_Receives = dict[Channel, "array[int]"]


def _matched(plan: Plan) -> Iterator[Finding]:
    """Check that the k-th send of a channel names the same message as its k-th receive."""
    sent: dict[Channel, array[int]] = {}
    received: dict[Channel, array[int]] = {}
    names = _Names(plan)
    for rank, lane in (*enumerate(plan.actions), *enumerate(plan.served)):
        for (op, peer), messages in names.posted(lane).items():
            (sent if op in SENDS else received)[Action(op, 0, 0, peer=peer).channel(rank)] = messages
    none: array[int] = array("q")
    receives = cache(partial(_receives, plan))
    for channel in sent.keys() | received.keys():
        ends = sent.get(channel, none), received.get(channel, none)
        if ends[0] != ends[1]:
            yield from _differing(names, channel, *ends, receives)


class _Names(dict[Kind, int]):
    """Numbers for what transfers move, the same at both ends: each stands for the first unit, and the others follow it."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._roles, self._numbers = plan, Roles(plan.flow), dict[Hashable, int]()

    def __missing__(self, kind: Kind) -> int:
        number = self[kind] = self._numbers.setdefault(self._roles.moved(*kind), len(self._numbers)) * self._plan.num_units
        return number

    def posted(self, lane: tuple[Action, ...]) -> dict[tuple[Op, int | None], array[int]]:
        """Return what the sends and receives of a lane move, in order, by operation and peer."""
        posted: dict[tuple[Op, int | None], array[int]] = defaultdict(lambda: array("q"))
        for op, stage, microbatch, part, peer in lane:
            if op in POSTS and peer != HOST:
                posted[op, peer].append(self[op, stage, part] + microbatch)
        return posted

    def tell(self, message: int, purpose: Purpose) -> str:
        """Describe what a transfer moves."""
        number, unit = divmod(message, self._plan.num_units)
        moved: Any = next(moved for moved, other in self._numbers.items() if other == number)
        name = f"microbatch {self._plan.units.text(unit)} of stage"
        if purpose not in (Purpose.FORWARD, Purpose.BACKWARD):
            stage, part = moved
            return f"part {part} of {name} {stage}" if part else f"{name} {stage}"
        is_aside, ends = moved
        return f"{name} {min(ends)} to stage {max(ends)}" if is_aside else f"{name} {min(ends)}"


def _differing(
    names: _Names, channel: Channel, sent: array[int], received: array[int], receives: Callable[[int, bool], _Receives]
) -> Iterator[Finding]:
    """Yield the first message at which the two ends of a channel disagree."""
    name = f"{channel.purpose.value} channel {channel.src} -> {channel.dst}"
    if len(sent) != len(received):
        yield None, f"{name} sends {len(sent)} messages and receives {len(received)}"
    k = next((k for k, pair in enumerate(zip(sent, received)) if pair[0] != pair[1]), None)
    if k is not None:
        a, b = (names.tell(messages[k], channel.purpose) for messages in (sent, received))
        served = channel.purpose is Purpose.EVICT
        place = channel.dst, served, receives(channel.dst, served)[channel][k]
        yield place, f"{name}: message {k} is sent as {a} and received as {b}"


def _receives(plan: Plan, rank: int, served: bool) -> _Receives:
    """Return the positions of the receives in a lane, by channel."""
    found: _Receives = defaultdict(lambda: array("q"))
    for position, action in enumerate((plan.served if served else plan.actions)[rank]):
        if action.op in RECEIVES:
            found[action.channel(rank)].append(position)
    return found


def _progresses(plan: Plan) -> Iterator[Finding]:
    """Check that no waits form a cycle, even if every transfer were an unbuffered rendezvous."""
    positions = cache(partial(_positions, plan))
    for rank, action, missing in run_greedily(plan):
        served = action.op in SERVED
        yield (
            (rank, served, positions(rank, served)[action]),
            f"rank {rank} waits forever at {plan.show(action)}, for {plan.show(missing)}",
        )


def _positions(plan: Plan, rank: int, served: bool) -> dict[Action, int]:
    """Return where each action stands first in a lane."""
    lane = (plan.served if served else plan.actions)[rank]
    return {action: position for position, action in reversed(list(enumerate(lane)))}


def _meeting(plan: Plan) -> Iterator[Finding]:
    """Check that two ranks exchange the gradients of their stages in the same order."""
    exchanges: dict[tuple[int, int], list[object]] = defaultdict(list)
    for rank, lane in enumerate(plan.actions if plan.flow.sums else ()):
        for op, stage, _, part, peer in lane:
            if op is Op.REDUCE_GRAD and peer is not None:
                exchanges[rank, peer].append(sorted((stage, part - 1)) if part else plan.flow.parts[stage])
    for (rank, peer), stages in exchanges.items():
        theirs = exchanges.get((peer, rank), [])
        if (rank < peer or not theirs) and stages != theirs:
            order = f"those of stages {stages}, and rank {peer} those of {theirs}"
            yield None, f"rank {rank} exchanges gradients with rank {peer} in another order: {order} of a direction"


RULES_OF_ALL: dict[str, Callable[[Plan], Iterator[Finding]]] = {
    "matched": _matched,
    "meeting": _meeting,
    "progresses": _progresses,
}
