"""The rules that involve several ranks of a plan, checked once each rank is complete by itself."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache, partial

from bpipe.plan.action import HOST, MESSAGES, POSTS, RECEIVES, SENDS, SERVED, Action, Channel, Op, Purpose, unit_text
from bpipe.plan.order import run_greedily
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import MOST_PARTS
from bpipe.verifier.rank_index import Finding

__all__: list[str] = []

_Receives = dict[Channel, "array[int]"]


def _matched(plan: Plan) -> Iterator[Finding]:
    """Check that the k-th send of a channel names the same message as its k-th receive."""
    sent: dict[Channel, array[int]] = {}
    received: dict[Channel, array[int]] = {}
    for rank, lane in (*enumerate(plan.actions), *enumerate(plan.served)):
        for (op, peer), messages in _posted(plan, lane).items():
            (sent if op in SENDS else received)[Action(op, 0, 0, peer=peer).channel(rank)] = messages
    none: array[int] = array("q")
    receives = cache(partial(_receives, plan))
    for channel in sent.keys() | received.keys():
        ends = sent.get(channel, none), received.get(channel, none)
        if ends[0] != ends[1]:
            yield from _differing(plan, channel, *ends, receives)


def _posted(plan: Plan, lane: tuple[Action, ...]) -> dict[tuple[Op, int | None], array[int]]:
    """Return the sends and receives of a lane, in order, by operation and peer, as numbers that are the same on both ends.

    They name the message at the boundary after a stage, or a stage's saved bytes.
    """
    posted: dict[tuple[Op, int | None], array[int]] = defaultdict(lambda: array("q"))
    m, most, num_own = plan.num_units, _most(plan), plan.depth if plan.paths else plan.num_stages  # replicas have one name
    for op, stage, microbatch, part, peer in lane:
        before = _STAGES_BEFORE.get(op)
        if before is not None and peer != HOST:
            first, other = stage % num_own - before, part
            if part and before and op in MESSAGES:  # between stages that are no neighbours: the later one names the earlier one
                first, other = part - 1, stage + 1
            posted[op, peer].append((first * m + microbatch) * most + other)
    return posted


def _most(plan: Plan) -> int:
    """Return more than any part and any stage of a plan."""
    return max(MOST_PARTS, plan.num_stages) + 2


# How many stages before the one that an action names the boundary lies that its message crosses.
_STAGES_BEFORE = {op: int(op in (Op.RECV_F, Op.SEND_B)) for op in POSTS}


def _differing(
    plan: Plan, channel: Channel, sent: array[int], received: array[int], receives: Callable[[int, bool], _Receives]
) -> Iterator[Finding]:
    """Yield the first message at which the two ends of a channel disagree."""
    name = f"{channel.purpose.value} channel {channel.src} -> {channel.dst}"
    if len(sent) != len(received):
        yield None, f"{name} sends {len(sent)} messages and receives {len(received)}"
    k = next((k for k, pair in enumerate(zip(sent, received)) if pair[0] != pair[1]), None)
    if k is not None:
        a, b = (_tell(plan, messages[k], channel.purpose) for messages in (sent, received))
        served = channel.purpose is Purpose.EVICT
        place = channel.dst, served, receives(channel.dst, served)[channel][k]
        yield place, f"{name}: message {k} is sent as {a} and received as {b}"


def _tell(plan: Plan, message: int, purpose: Purpose) -> str:
    microbatch, part = divmod(message, _most(plan))
    stage, unit = divmod(microbatch, plan.num_units)
    name = f"microbatch {unit_text(unit, plan.slices)} of stage {stage}"
    if purpose in (Purpose.FORWARD, Purpose.BACKWARD):
        return f"{name} to stage {part - 1}" if part else name
    return f"part {part} of {name}" if part else name


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
    exchanges: dict[tuple[int, int], list[int]] = defaultdict(list)
    for rank, lane in enumerate(plan.actions if plan.directions > 1 else ()):
        for op, stage, _, _, peer in lane:
            if op is Op.REDUCE_GRAD and peer is not None:
                exchanges[rank, peer].append(stage % plan.depth)
    for (rank, peer), stages in exchanges.items():
        if rank < peer and stages != exchanges[peer, rank]:
            order = f"those of stages {stages}, and rank {peer} those of {exchanges[peer, rank]}"
            yield None, f"rank {rank} exchanges gradients with rank {peer} in another order: {order} of a direction"


RULES_OF_ALL: dict[str, Callable[[Plan], Iterator[Finding]]] = {
    "matched": _matched,
    "meeting": _meeting,
    "progresses": _progresses,
}
