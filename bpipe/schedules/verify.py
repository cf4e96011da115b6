"""The proof before the first transfer: a table of rules, every violation reported at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bpipe.errors import PlanError
from bpipe.schedules.action import COMPUTE, RECEIVES, SENDS, SERVED, WAIT_OF, Action, Channel, Op
from bpipe.schedules.communicate import received_by, sent_by
from bpipe.schedules.grid import excerpt
from bpipe.schedules.order import linearise
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


class _Index:
    """Every action of a plan by its key, made once for all rules."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.places: dict[Key, Place] = {}
        self.repeated: list[Place] = []
        for served, lanes in ((False, plan.actions), (True, plan.served)):
            for rank, lane in enumerate(lanes):
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
    violations = list(violations_of(plan))
    if violations:
        lines = [f"plan {plan.name!r} breaks {len(violations)} rule{'s' * (len(violations) > 1)}: {violations[0].text}"]
        lines += [f"  {v.rule}: {_at(v.place)}{v.text}" for v in violations[:MOST_SHOWN]]
        lines += [f"  ... and {len(violations) - MOST_SHOWN} more"] * (len(violations) > MOST_SHOWN)
        place = next((v.place for v in violations if v.place is not None), None)
        if place is not None:
            lines += ["", excerpt(plan, *place)]
        raise PlanError("\n".join(lines))


def violations_of(plan: Plan) -> Iterator[Violation]:
    """Yield every violation of every rule; the rules after a broken shape need a sound one and are left out."""
    shape = list(_shape(plan))
    yield from shape
    if not shape:
        index = _Index(plan)
        for name, rule in RULES.items():
            yield from (Violation(name, place, text) for place, text in rule(index))


def _at(place: Place | None) -> str:
    return "" if place is None else f"rank {place[0]}, {'served' if place[1] else 'action'} {place[2]}: "


def _shape(plan: Plan) -> Iterator[Violation]:
    p, ranks = plan.num_stages, range(plan.num_ranks)
    if p < 1 or plan.num_microbatches < 1:
        yield Violation("shape", None, f"{p} stages and {plan.num_microbatches} microbatches: both must be at least 1")
    count = sum(map(len, plan.actions))
    if 2 * count < p * plan.num_microbatches:  # far from complete: the rules need not list what is missing, one by one
        yield Violation("shape", None, f"{count} actions cannot run {p} stages and {plan.num_microbatches} microbatches")
    if len(plan.served) != plan.num_ranks or len(plan.slots) != plan.num_ranks:
        yield Violation("shape", None, f"{plan.num_ranks} compute lanes, {len(plan.served)} served, {len(plan.slots)} budgets")
    for stage, rank in enumerate(plan.stage_ranks):
        if rank not in ranks:
            yield Violation("shape", None, f"stage {stage} is on rank {rank}, and there are ranks 0 to {plan.num_ranks - 1}")


Finding = tuple[Place | None, str]


def _belongs(index: _Index) -> Iterator[Finding]:
    """Each action stands once, on the rank of its stage, in the lane of its kind, and transfers name the right peer."""
    plan = index.plan
    for place in index.repeated:
        yield place, f"{index.action(place)} stands a second time"
    for (op, stage, microbatch), place in index.places.items():
        rank, served, _ = place
        action = index.action(place)
        if not (0 <= stage < plan.num_stages and 0 <= microbatch < plan.num_microbatches):
            yield place, f"{action} is outside {plan.num_stages} stages and {plan.num_microbatches} microbatches"
            continue
        if served is not (op in SERVED):
            yield place, f"{action} stands in the wrong lane"
        expected = _expected_place(index, action)
        if (rank, action.peer) != expected:
            yield place, f"{action} on rank {rank} with peer {action.peer}: expected rank {expected[0]} and peer {expected[1]}"


def _expected_place(index: _Index, action: Action) -> tuple[int, int | None]:
    """The rank on which an action belongs, and the rank at its other end."""
    op, stage, microbatch, _ = action
    ranks, owner = index.plan.stage_ranks, index.plan.stage_ranks[stage]
    if op in COMPUTE:
        return owner, None
    if op in _FORWARD_PEER:
        neighbour = stage + _FORWARD_PEER[op]
        return owner, ranks[neighbour] if 0 <= neighbour < len(ranks) else None
    evict = index.places.get((Op.EVICT, stage, microbatch))
    acceptor = None if evict is None else index.action(evict).peer
    if op in SERVED:
        return -1 if acceptor is None else acceptor, owner
    in_range = acceptor is not None and 0 <= acceptor < index.plan.num_ranks and acceptor != owner
    return owner, acceptor if in_range else None


_FORWARD_PEER = {
    op: offset
    for start, offset in ((Op.SEND_F, 1), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 1))
    for op in (start, WAIT_OF[start])
}


EVICTION = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD}) | SERVED


def _complete(index: _Index) -> Iterator[Finding]:
    """Every microbatch runs forward and backward on every stage, with the transfers its neighbours need."""
    plan, places = index.plan, index.places
    bits = {op: 1 << i for i, op in enumerate(Op)}
    present: dict[tuple[int, int], int] = defaultdict(int)
    for op, stage, microbatch in places:
        present[stage, microbatch] |= bits[op]
    for stage in range(plan.num_stages):
        accepted = {sum(bits[op] for op in ops) for ops in _complete_sets(plan, stage)}
        for microbatch in range(plan.num_microbatches):
            if present[stage, microbatch] not in accepted:
                yield from _lacking(index, stage, microbatch)


def _complete_sets(plan: Plan, stage: int) -> list[frozenset[Op]]:
    """The sets of operations that make a microbatch of a stage complete: with a whole or a split backward, evicted or not."""
    backwards = (frozenset({Op.B}), frozenset({Op.I, Op.W})) if plan.has_backward else (frozenset[Op](),)
    return [_required(plan, stage, backward) | moved for backward in backwards for moved in (frozenset[Op](), EVICTION)]


def _required(plan: Plan, stage: int, backward: frozenset[Op]) -> frozenset[Op]:
    computations = [Action(op, stage, 0) for op in (Op.F, *backward)]
    transfers = [t.op for c in computations for t in (received_by(plan, c), sent_by(plan, c)) if t is not None]
    return frozenset({Op.F, *backward, *transfers, *(WAIT_OF[op] for op in transfers)})


def _lacking(index: _Index, stage: int, microbatch: int) -> Iterator[Finding]:
    """What a microbatch misses or has too much of, compared with the complete set that fits it best."""
    there = frozenset(op for op in Op if (op, stage, microbatch) in index.places)
    nearest = min(_complete_sets(index.plan, stage), key=lambda ops: len(ops ^ there))
    here = index.places.get((Op.F, stage, microbatch))
    for op in sorted(nearest ^ there):
        where = index.places.get((op, stage, microbatch), here)
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

# Operations that take a stage's microbatches in one order together: a whole backward is both of its halves.
KIN = {Op.F: (Op.F,), Op.B: (Op.B, Op.I, Op.W), Op.I: (Op.I, Op.B), Op.W: (Op.W, Op.B)}


def _ordered(index: _Index) -> Iterator[Finding]:
    """Nothing runs before what it needs, and each stage takes its microbatches in ascending order.

    Ascending, because the sum of gradients, dropout and BatchNorm depend on the order.
    """
    places, plan = index.places, index.plan
    followers: dict[Op, list[Op]] = defaultdict(list)
    for earlier, later in PRECEDENCE:
        followers[later].append(earlier)
    for (op, stage, microbatch), place in places.items():
        for earlier in followers.get(op, ()):
            before = places.get((earlier, stage, microbatch))
            if before is not None and before[:2] == place[:2] and before[2] > place[2]:
                yield place, f"{stage}{op}{microbatch} stands before {stage}{earlier}{microbatch}"
        for kin in KIN.get(op, ()):
            previous = places.get((kin, stage, microbatch - 1))
            if previous is not None and previous[:2] == place[:2] and previous[2] > place[2]:
                yield place, f"{stage}{op}{microbatch} stands before {stage}{kin}{microbatch - 1}"
    for stage in range(1, plan.num_stages):
        if plan.stage_ranks[stage] == plan.stage_ranks[stage - 1]:
            yield from _handed_over(index, stage)


def _handed_over(index: _Index, stage: int) -> Iterator[Finding]:
    """Neighbouring stages on one rank need each other's results in the order of its list."""
    pairs = [((Op.F, stage - 1), (Op.F, stage))]
    pairs += [((a, stage), (b, stage - 1)) for a in (Op.B, Op.I) for b in (Op.B, Op.I)]
    for microbatch in range(index.plan.num_microbatches):
        for earlier, later in pairs:
            first, second = index.places.get((*earlier, microbatch)), index.places.get((*later, microbatch))
            if first is not None and second is not None and first[2] > second[2]:
                yield second, f"{later[1]}{later[0]}{microbatch} stands before {earlier[1]}{earlier[0]}{microbatch}"


def _matched(index: _Index) -> Iterator[Finding]:
    """The k-th send of a channel names what its k-th receive names."""
    plan = index.plan
    queues: dict[Channel, tuple[list[tuple[int, int]], list[tuple[int, int]], list[Place]]] = defaultdict(lambda: ([], [], []))
    for served, lanes in ((False, plan.actions), (True, plan.served)):
        for rank, lane in enumerate(lanes):
            for position, action in enumerate(lane):
                if action.op in SENDS:
                    queues[action.channel(rank)][0].append(_message(action))
                elif action.op in RECEIVES:
                    _, receives, places = queues[action.channel(rank)]
                    receives.append(_message(action))
                    places.append((rank, served, position))
    for channel, (sends, receives, places) in queues.items():
        if len(sends) != len(receives):
            yield None, f"{_name(channel)} sends {len(sends)} messages and receives {len(receives)}"
        differing = (k for k, (sent, received) in enumerate(zip(sends, receives)) if sent != received)
        k = next(differing, None)
        if k is not None:
            yield places[k], f"{_name(channel)}: message {k} is sent as {_tell(sends[k])} and received as {_tell(receives[k])}"


def _message(action: Action) -> tuple[int, int]:
    """What a transfer carries, the same on both ends: what crosses the boundary after a stage, or a stage's saved bytes."""
    return action.stage - (action.op in (Op.RECV_F, Op.SEND_B)), action.microbatch


def _tell(message: tuple[int, int]) -> str:
    return f"microbatch {message[1]} of stage {message[0]}"


def _name(channel: Channel) -> str:
    return f"{channel.purpose.value} channel {channel.src} -> {channel.dst}"


def _progresses(index: _Index) -> Iterator[Finding]:
    """No circle of waits, even if every transfer were an unbuffered rendezvous."""
    _, stuck = linearise(index.plan)
    for rank, action, missing in stuck:
        yield index.places.get(action[:3]), f"rank {rank} waits for ever at {action}, for {missing[1]}{missing[0]}{missing[2]}"


def _affordable(index: _Index) -> Iterator[Finding]:
    """At no action does a rank occupy more slots than its budget, rooms for guests included."""
    plan = index.plan
    for rank, budget in enumerate(plan.slots):
        rooms = sum(plan.rooms(rank).values())
        occupied = enumerate(occupancy(plan.actions[rank]))
        over = next(((i, own) for i, own in occupied if budget is not None and own + rooms > budget), None)
        if over is not None:
            yield (
                (rank, False, over[0]),
                f"rank {rank} occupies {over[1]} slots and {rooms} rooms for guests of a budget of {budget}",
            )
        if budget is not None and rooms > budget:
            yield None, f"rank {rank} reserves {rooms} rooms for guests of a budget of {budget}"


RULES: dict[str, Callable[[_Index], Iterator[Finding]]] = {
    "belongs": _belongs,
    "complete": _complete,
    "ordered": _ordered,
    "matched": _matched,
    "progresses": _progresses,
    "affordable": _affordable,
}
