"""The rules that the ranks of a plan keep together: each must be complete by itself before."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import islice

from bpipe.schedules.action import HOST, POSTS, RECEIVES, SENDS, SERVED, Action, Channel, Op, Purpose
from bpipe.schedules.order import run_greedily
from bpipe.schedules.plan import Plan
from bpipe.schedules.rank_rules import Finding, Place

__all__: list[str] = []


def _matched(plan: Plan) -> Iterator[Finding]:
    """The k-th send of a channel names what its k-th receive names."""
    sent: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
    received: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
    for rank, lane in _lanes(plan):
        for action in lane:
            if action.op in POSTS and action.peer != HOST:
                ends = sent if action.op in SENDS else received
                ends[action.channel(rank)].append(_message(plan, action))
    for channel in sent.keys() | received.keys():
        if sent[channel] != received[channel]:
            yield from _differing(plan, channel, sent[channel], received[channel])


def _lanes(plan: Plan) -> Iterator[tuple[int, tuple[Action, ...]]]:
    yield from enumerate(plan.actions)
    yield from enumerate(plan.served)


def _message(plan: Plan, action: Action) -> int:
    """What a transfer carries, the same on both ends: what crosses the boundary after a stage, or a stage's saved bytes."""
    stage = action.stage - (action.op in _FROM_THE_STAGE_BEFORE)
    return (stage * plan.num_microbatches + action.microbatch) * _MOST_PARTS + action.part


_FROM_THE_STAGE_BEFORE = frozenset({Op.RECV_F, Op.SEND_B})
_MOST_PARTS = 2**10


def _differing(plan: Plan, channel: Channel, sent: array[int], received: array[int]) -> Iterator[Finding]:
    """Where the two ends of a channel disagree first."""
    name = f"{channel.purpose.value} channel {channel.src} -> {channel.dst}"
    if len(sent) != len(received):
        yield None, f"{name} sends {len(sent)} messages and receives {len(received)}"
    k = next((k for k, pair in enumerate(zip(sent, received)) if pair[0] != pair[1]), None)
    if k is not None:
        a, b = (_tell(plan, messages[k]) for messages in (sent, received))
        yield _receive(plan, channel, k), f"{name}: message {k} is sent as {a} and received as {b}"


def _tell(plan: Plan, message: int) -> str:
    microbatch, part = divmod(message, _MOST_PARTS)
    stage, microbatch = divmod(microbatch, plan.num_microbatches)
    return f"{f'part {part} of ' if part else ''}microbatch {microbatch} of stage {stage}"


def _receive(plan: Plan, channel: Channel, k: int) -> Place:
    """Where the k-th receive of a channel stands."""
    rank, served = channel.dst, channel.purpose is Purpose.EVICT
    lane = (plan.served if served else plan.actions)[rank]
    places = (i for i, action in enumerate(lane) if action.op in RECEIVES and action.channel(rank) == channel)
    return rank, served, next(islice(places, k, None))


def _progresses(plan: Plan) -> Iterator[Finding]:
    """No circle of waits, even if every transfer were an unbuffered rendezvous."""
    for rank, action, missing in run_greedily(plan):
        served = action.op in SERVED
        place = (rank, served, (plan.served if served else plan.actions)[rank].index(action))
        yield place, f"rank {rank} waits for ever at {action}, for {missing}"


RULES_OF_ALL: dict[str, Callable[[Plan], Iterator[Finding]]] = {"matched": _matched, "progresses": _progresses}
