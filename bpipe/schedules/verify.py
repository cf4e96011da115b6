"""The proof before the first transfer: a table of rules, every violation reported at once."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.schedules.action import COMPUTE, RECEIVES, SENDS, SERVED, WAIT_OF, Action, Channel, Op, Purpose
from bpipe.schedules.communicate import received_by, sent_by
from bpipe.schedules.grid import excerpt
from bpipe.schedules.order import run_greedily
from bpipe.schedules.plan import Plan, occupancy

__all__ = ["Violation", "verify"]

MOST_SHOWN = 20

Key = tuple[Op, int, int]


Place = tuple[int, bool, int]  # rank, whether in its served lane, position


class Violation(NamedTuple):
    """A rule that a plan breaks, where, and how."""

    rule: str
    place: Place | None
    text: str


class _Rank:
    """The actions of one rank by key, and the stages it holds: made once for all rules, and dropped before the next rank's."""

    def __init__(self, plan: Plan, rank: int, stages: Sequence[int]) -> None:
        self.plan, self.rank, self.stages = plan, rank, stages
        self.places: dict[Key, Place] = {}
        self.repeated: list[Place] = []
        for served, lane in ((False, plan.actions[rank]), (True, plan.served[rank])):
            for position, action in enumerate(lane):
                place = (rank, served, position)
                if self.places.setdefault(action[:3], place) is not place:
                    self.repeated.append(place)

    def action(self, place: Place) -> Action:
        rank, served, position = place
        return (self.plan.served if served else self.plan.actions)[rank][position]


def verify(plan: Plan) -> None:
    """Prove a plan: complete, in order, its messages matched, its memory within budget, and free of deadlock.

    Takes a few microseconds an action: the plan of 64 stages and 1024 microbatches with evictions has 750,000 of them.

    Raises:
        PlanError: every violation of every rule (the first 20 in full), with the place of the first one.
    """
    violations = sorted(violations_of(plan), key=lambda violation: _TURN[violation.rule])
    if violations:
        lines = [f"plan {plan.name!r} breaks {len(violations)} rule{'s' * (len(violations) > 1)}: {violations[0].text}"]
        lines += [f"  {v.rule}: {_at(v.place)}{v.text}" for v in violations[:MOST_SHOWN]]
        lines += [f"  ... and {len(violations) - MOST_SHOWN} more"] * (len(violations) > MOST_SHOWN)
        place = next((v.place for v in violations if v.place is not None), None)
        if place is not None:
            lines += ["", excerpt(plan, *place)]
        raise PlanError("\n".join(lines))


def violations_of(plan: Plan) -> Iterator[Violation]:
    """Yield every violation of every rule.

    The rules of all ranks together need ranks that are complete by themselves, and all need a sound shape.
    """
    shape = [Violation("shape", None, text) for text in _shape(plan)]
    yield from shape
    if shape:
        return
    is_whole = True
    held: list[list[int]] = [[] for _ in range(plan.num_ranks)]
    for stage, rank in enumerate(plan.stage_ranks):
        held[rank].append(stage)
    for rank, stages in enumerate(held):
        own = _Rank(plan, rank, stages)
        for name, rule in RULES_OF_A_RANK.items():
            for place, text in rule(own):
                is_whole &= name not in ("belongs", "complete")
                yield Violation(name, place, text)
    if is_whole:
        for name, whole in RULES_OF_ALL.items():
            yield from (Violation(name, place, text) for place, text in whole(plan))


def _at(place: Place | None) -> str:
    return "" if place is None else f"rank {place[0]}, {'served' if place[1] else 'action'} {place[2]}: "


def _shape(plan: Plan) -> Iterator[str]:
    p, ranks = plan.num_stages, range(plan.num_ranks)
    if p < 1 or plan.num_microbatches < 1:
        yield f"{p} stages and {plan.num_microbatches} microbatches: both must be at least 1"
    count = sum(map(len, plan.actions))
    if 2 * count < p * plan.num_microbatches:  # far from complete: the rules need not list what is missing, one by one
        yield f"{count} actions cannot run {p} stages and {plan.num_microbatches} microbatches"
    if len(plan.served) != plan.num_ranks or len(plan.slots) != plan.num_ranks:
        yield f"{plan.num_ranks} compute lanes, {len(plan.served)} served, {len(plan.slots)} budgets"
    for stage, rank in enumerate(plan.stage_ranks):
        if rank not in ranks:
            yield f"stage {stage} is on rank {rank}, and there are ranks 0 to {plan.num_ranks - 1}"


Finding = tuple[Place | None, str]


def _belongs(own: _Rank) -> Iterator[Finding]:
    """Each action stands once, on the rank of its stage, in the lane of its kind, and transfers name the right peer."""
    plan = own.plan
    for place in own.repeated:
        yield place, f"{own.action(place)} stands a second time"
    for (op, stage, microbatch), place in own.places.items():
        rank, served, _ = place
        action = own.action(place)
        if not (0 <= stage < plan.num_stages and 0 <= microbatch < plan.num_microbatches):
            yield place, f"{action} is outside {plan.num_stages} stages and {plan.num_microbatches} microbatches"
            continue
        if served is not (op in SERVED):
            yield place, f"{action} stands in the wrong lane"
        expected = _expected_place(own, action)
        if (rank, action.peer) != expected:
            yield place, f"{action} on rank {rank} with peer {action.peer}: expected rank {expected[0]} and peer {expected[1]}"


def _expected_place(own: _Rank, action: Action) -> tuple[int, int | None]:
    """The rank on which an action belongs, and the rank at its other end."""
    op, stage, microbatch, _ = action
    ranks, owner = own.plan.stage_ranks, own.plan.stage_ranks[stage]
    if op in COMPUTE:
        return owner, None
    if op in _FORWARD_PEER:
        neighbour = stage + _FORWARD_PEER[op]
        return owner, ranks[neighbour] if 0 <= neighbour < len(ranks) else None
    if op in SERVED:
        return own.rank if owner != own.rank else -1, owner
    evict = own.places.get((Op.EVICT, stage, microbatch))
    acceptor = None if evict is None else own.action(evict).peer
    in_range = acceptor is not None and 0 <= acceptor < own.plan.num_ranks and acceptor != owner
    return owner, acceptor if in_range else None


_FORWARD_PEER = {
    op: offset
    for start, offset in ((Op.SEND_F, 1), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 1))
    for op in (start, WAIT_OF[start])
}


EVICTION = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD})
BITS = {op: 1 << i for i, op in enumerate(Op)}


def _complete(own: _Rank) -> Iterator[Finding]:
    """Every microbatch runs forward and backward on every stage, with the transfers its neighbours need; guests come and go."""
    plan = own.plan
    present: dict[tuple[int, int], int] = defaultdict(int)
    for op, stage, microbatch in own.places:
        present[stage, microbatch] |= BITS[op]
    accepted = {stage: {_mask(ops) for ops in _complete_sets(plan, stage)} for stage in own.stages}
    for stage in own.stages:
        for microbatch in range(plan.num_microbatches):
            if present[stage, microbatch] not in accepted[stage]:
                yield from _lacking(own, stage, microbatch, _complete_sets(plan, stage))
    for (stage, microbatch), found in present.items():
        if stage not in accepted and found != _mask(SERVED):
            yield from _lacking(own, stage, microbatch, [SERVED])


def _mask(ops: Iterable[Op]) -> int:
    return sum(BITS[op] for op in ops)


def _complete_sets(plan: Plan, stage: int) -> list[frozenset[Op]]:
    """The sets of operations that make a microbatch of a stage complete: with a whole or a split backward, evicted or not."""
    backwards = (frozenset({Op.B}), frozenset({Op.I, Op.W})) if plan.has_backward else (frozenset[Op](),)
    return [_required(plan, stage, backward) | moved for backward in backwards for moved in (frozenset[Op](), EVICTION)]


def _required(plan: Plan, stage: int, backward: frozenset[Op]) -> frozenset[Op]:
    computations = [Action(op, stage, 0) for op in (Op.F, *backward)]
    transfers = [t.op for c in computations for t in (received_by(plan, c), sent_by(plan, c)) if t is not None]
    return frozenset({Op.F, *backward, *transfers, *(WAIT_OF[op] for op in transfers)})


def _lacking(own: _Rank, stage: int, microbatch: int, complete: list[frozenset[Op]]) -> Iterator[Finding]:
    """What a microbatch misses or has too much of, compared with the complete set that fits it best."""
    there = frozenset(op for op in Op if (op, stage, microbatch) in own.places)
    nearest = min(complete, key=lambda ops: len(ops ^ there))
    here = own.places.get((Op.F, stage, microbatch))
    for op in sorted(nearest ^ there):
        where = own.places.get((op, stage, microbatch), here)
        yield where, f"{stage}{op}{microbatch} is {'missing' if op in nearest else 'not part of this plan'}"


# What must stand before what in the lane of one microbatch of one stage.
PRECEDENCE = (
    (Op.RECV_F, Op.WAIT_RECV_F),
    (Op.WAIT_RECV_F, Op.F),
    (Op.F, Op.SEND_F),
    (Op.SEND_F, Op.WAIT_SEND_F),
    (Op.WAIT_SEND_F, Op.B),  # an output on its way keeps its slot
    (Op.WAIT_SEND_F, Op.W),
    (Op.RECV_B, Op.WAIT_RECV_B),
    (Op.F, Op.B),
    (Op.F, Op.I),
    (Op.I, Op.W),
    (Op.WAIT_RECV_B, Op.B),
    (Op.WAIT_RECV_B, Op.I),
    (Op.B, Op.SEND_B),
    (Op.I, Op.SEND_B),
    (Op.SEND_B, Op.WAIT_SEND_B),
    (Op.F, Op.EVICT),
    (Op.EVICT, Op.WAIT_EVICT),
    (Op.WAIT_SEND_F, Op.WAIT_EVICT),
    (Op.WAIT_EVICT, Op.LOAD),
    (Op.LOAD, Op.WAIT_LOAD),
    (Op.WAIT_LOAD, Op.B),
    (Op.WAIT_LOAD, Op.I),
    (Op.ACCEPT, Op.WAIT_ACCEPT),
    (Op.WAIT_ACCEPT, Op.RETURN),
    (Op.RETURN, Op.WAIT_RETURN),
)

EARLIER = {op: [earlier for earlier, later in PRECEDENCE if later is op] for op in Op}

# Operations that take a stage's microbatches in one order together: a whole backward is both of its halves.
KIN = {Op.F: (Op.F,), Op.B: (Op.B, Op.I, Op.W), Op.I: (Op.I, Op.B), Op.W: (Op.W, Op.B)}


def _ordered(own: _Rank) -> Iterator[Finding]:
    """Nothing runs before what it needs, and each stage takes its microbatches in ascending order.

    Ascending, because the sum of gradients, dropout and BatchNorm depend on the order.
    """
    places = own.places
    for (op, stage, microbatch), place in places.items():
        for earlier in EARLIER[op]:
            before = places.get((earlier, stage, microbatch))
            if before is not None and before[1] == place[1] and before[2] > place[2]:
                yield place, f"{stage}{op}{microbatch} stands before {stage}{earlier}{microbatch}"
        for kin in KIN.get(op, ()):
            previous = places.get((kin, stage, microbatch - 1))
            if previous is not None and previous[1] == place[1] and previous[2] > place[2]:
                yield place, f"{stage}{op}{microbatch} stands before {stage}{kin}{microbatch - 1}"
    for stage in own.stages:
        if stage - 1 in own.stages:
            yield from _handed_over(own, stage)


def _handed_over(own: _Rank, stage: int) -> Iterator[Finding]:
    """Neighbouring stages on one rank need each other's results in the order of its list."""
    pairs = [((Op.F, stage - 1), (Op.F, stage))]
    pairs += [((a, stage), (b, stage - 1)) for a in (Op.B, Op.I) for b in (Op.B, Op.I)]
    for microbatch in range(own.plan.num_microbatches):
        for earlier, later in pairs:
            first, second = own.places.get((*earlier, microbatch)), own.places.get((*later, microbatch))
            if first is not None and second is not None and first[2] > second[2]:
                yield second, f"{later[1]}{later[0]}{microbatch} stands before {earlier[1]}{earlier[0]}{microbatch}"


def _affordable(own: _Rank) -> Iterator[Finding]:
    """At no action does a rank occupy more slots than its budget, rooms for guests included."""
    rank, budget = own.rank, own.plan.slots[own.rank]
    if budget is None:
        return
    rooms = sum(own.plan.rooms(rank).values())
    over = next(((i, slots) for i, slots in enumerate(occupancy(own.plan.actions[rank])) if slots + rooms > budget), None)
    if over is not None:
        yield (rank, False, over[0]), f"rank {rank} occupies {over[1]} slots and {rooms} rooms for guests of a budget of {budget}"
    if rooms > budget:
        yield None, f"rank {rank} reserves {rooms} rooms for guests of a budget of {budget}"


def _matched(plan: Plan) -> Iterator[Finding]:
    """The k-th send of a channel names what its k-th receive names."""
    sent: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
    received: dict[Channel, array[int]] = defaultdict(lambda: array("q"))
    for rank, lane in _lanes(plan):
        for action in lane:
            if action.op in SENDS:
                sent[action.channel(rank)].append(_message(plan, action))
            elif action.op in RECEIVES:
                received[action.channel(rank)].append(_message(plan, action))
    for channel in sent.keys() | received.keys():
        if sent[channel] != received[channel]:
            yield from _differing(plan, channel, sent[channel], received[channel])


def _lanes(plan: Plan) -> Iterator[tuple[int, tuple[Action, ...]]]:
    yield from enumerate(plan.actions)
    yield from enumerate(plan.served)


def _message(plan: Plan, action: Action) -> int:
    """What a transfer carries, the same on both ends: what crosses the boundary after a stage, or a stage's saved bytes."""
    return (action.stage - (action.op in _FROM_THE_STAGE_BEFORE)) * plan.num_microbatches + action.microbatch


_FROM_THE_STAGE_BEFORE = frozenset({Op.RECV_F, Op.SEND_B})


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
    stage, microbatch = divmod(message, plan.num_microbatches)
    return f"microbatch {microbatch} of stage {stage}"


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
        yield place, f"rank {rank} waits for ever at {action}, for {missing[1]}{missing[0]}{missing[2]}"


RULES_OF_A_RANK: dict[str, Callable[[_Rank], Iterator[Finding]]] = {
    "belongs": _belongs,
    "complete": _complete,
    "ordered": _ordered,
    "affordable": _affordable,
}
RULES_OF_ALL: dict[str, Callable[[Plan], Iterator[Finding]]] = {"matched": _matched, "progresses": _progresses}
_TURN = {rule: turn for turn, rule in enumerate(("shape", *RULES_OF_A_RANK, *RULES_OF_ALL))}
