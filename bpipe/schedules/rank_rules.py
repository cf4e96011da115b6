"""The rules that each rank of a plan keeps by itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile

from bpipe.schedules.action import COMPUTE, HOST, SERVED, SHARDING, WAIT_OF, Action, Op
from bpipe.schedules.communicate import received_by, sent_by
from bpipe.schedules.meter import SLOTS, Meter, occupancy
from bpipe.schedules.plan import Plan

__all__: list[str] = []

Key = tuple[Op, int, int, int]  # operation, stage, microbatch, part
Place = tuple[int, bool, int]  # rank, whether in its served lane, position
Finding = tuple[Place | None, str]


class Rank:
    """The actions of one rank by key, and the stages it holds: made once for all rules, and dropped before the next rank's."""

    def __init__(self, plan: Plan, rank: int, stages: Sequence[int]) -> None:
        self.plan, self.rank, self.stages = plan, rank, stages
        self.places: dict[Key, Place] = {}
        self.repeated: list[Place] = []
        self.sharding: list[Place] = []
        self.begun: list[Place] = []  # the first pieces of computations in pieces
        for served, lane in ((False, plan.actions[rank]), (True, plan.served[rank])):
            for position, action in enumerate(lane):
                place = (rank, served, position)
                if action.op in SHARDING:
                    self.sharding.append(place)
                elif self.places.setdefault(action[:4], place) is not place:
                    self.repeated.append(place)
                elif action.part and action.op in COMPUTE and not plan.goes_on(action):
                    self.begun.append(place)
                    self.places.setdefault((*action[:3], 0), place)

    def action(self, place: Place) -> Action:
        rank, served, position = place
        return (self.plan.served if served else self.plan.actions)[rank][position]


def _belongs(own: Rank) -> Iterator[Finding]:
    """Each action stands once, on the rank of its stage, in the lane of its kind, and transfers name the right peer."""
    plan = own.plan
    for place in own.repeated:
        yield place, f"{own.action(place)} stands a second time"
    for place in (*own.places.values(), *own.sharding):
        rank, served, _ = place
        action = own.action(place)
        op, stage, microbatch, part, peer = action
        if not (0 <= stage < plan.num_stages and 0 <= microbatch < plan.num_microbatches):
            yield place, f"{action} is outside {plan.num_stages} stages and {plan.num_microbatches} microbatches"
            continue
        if part and (op not in IN_PARTS or part > plan.num_parts(stage)):
            yield place, f"{action} names a part that there is not: a microbatch of this stage has {plan.num_parts(stage)}"
        if served is not (op in SERVED):
            yield place, f"{action} stands in the wrong lane"
        expected = _expected_place(own, action)
        if (rank, peer) != expected:
            yield place, f"{action} on rank {rank} with peer {peer}: expected rank {expected[0]} and peer {expected[1]}"


def _expected_place(own: Rank, action: Action) -> tuple[int, int | None]:
    """The rank on which an action belongs, and the rank at its other end."""
    op, stage, microbatch, part, _ = action
    ranks, owner = own.plan.stage_ranks, own.plan.stage_ranks[stage]
    if op in COMPUTE or op in SHARDING:
        return owner, None
    if op in _FORWARD_PEER:
        neighbour = stage + _FORWARD_PEER[op]
        return owner, ranks[neighbour] if 0 <= neighbour < len(ranks) else None
    if op in SERVED:
        return own.rank if owner != own.rank else -1, owner
    evict = own.places.get((Op.EVICT, stage, microbatch, part))
    acceptor = None if evict is None else own.action(evict).peer
    is_there = acceptor is not None and HOST <= acceptor < own.plan.num_ranks and acceptor != owner
    return owner, acceptor if is_there else None


_FORWARD_PEER = {
    op: offset
    for start, offset in ((Op.SEND_F, 1), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 1))
    for op in (start, WAIT_OF[start])
}


EVICTION = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD})
PARTED = EVICTION | SERVED
IN_PARTS = PARTED | {Op.F, Op.B}
BITS = {op: 1 << i for i, op in enumerate(Op)}


def _complete(own: Rank) -> Iterator[Finding]:
    """Every microbatch runs forward and backward on every stage, with the transfers its neighbours need; guests come and go."""
    plan = own.plan
    present: dict[tuple[int, int, int], int] = defaultdict(int)
    for op, *which in own.places:
        present[*which] |= BITS[op]  # type: ignore[index]
    accepted = {stage: {_mask(ops) for ops in _complete_sets(plan, stage)} for stage in own.stages}
    for stage in own.stages:
        for microbatch in range(plan.num_microbatches):
            if present[stage, microbatch, 0] not in accepted[stage]:
                yield from _lacking(own, (stage, microbatch, 0), _complete_sets(plan, stage))
    for (stage, microbatch, part), found in present.items():
        if stage not in accepted and found != _mask(SERVED):
            yield from _lacking(own, (stage, microbatch, part), [SERVED])
        if stage in accepted and part and found & ~_mask(COMPUTE):
            if found & ~_mask(COMPUTE) != _mask(EVICTION):
                yield from _lacking(own, (stage, microbatch, part), [EVICTION | {op for op in COMPUTE if found & BITS[op]}])
            whole = own.places.get((Op.EVICT, stage, microbatch, 0))
            if whole is not None:
                yield whole, f"{own.action(whole)} moves a microbatch of which part {part} moves by itself"


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


def _lacking(own: Rank, which: tuple[int, int, int], complete: list[frozenset[Op]]) -> Iterator[Finding]:
    """What a microbatch misses or has too much of, compared with the complete set that fits it best."""
    there = frozenset(op for op in Op if (op, *which) in own.places)
    nearest = min(complete, key=lambda ops: len(ops ^ there))
    here = own.places.get((Op.F, *which))
    for op in sorted(nearest ^ there):
        where = own.places.get((op, *which), here)
        yield where, f"{Action(op, *which)} is {'missing' if op in nearest else 'not part of this plan'}"


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
LATER = {op: [later for earlier, later in PRECEDENCE if earlier is op and later not in PARTED] for op in PARTED}

# Operations that take a stage's microbatches in one order together: a whole backward is both of its halves.
KIN = {Op.F: (Op.F,), Op.B: (Op.B, Op.I, Op.W), Op.I: (Op.I, Op.B), Op.W: (Op.W, Op.B)}


def _ordered(own: Rank) -> Iterator[Finding]:
    """Nothing runs before what it needs, and each stage takes its microbatches in ascending order.

    Ascending, because the sum of gradients, dropout and BatchNorm depend on the order.
    """
    plan, places = own.plan, own.places
    for key, place in places.items():
        op, stage, microbatch, part = key
        _, served, position = place
        for before in EARLIER[op]:
            if before is Op.WAIT_SEND_F and 0 < part < plan.num_parts(stage):
                continue  # the output lies in the last part
            other = places.get((before, stage, microbatch, part if before in PARTED else 0))
            if part and before in COMPUTE:  # the last piece of a forward, if it has some
                other = places.get((before, stage, microbatch, plan.num_parts(stage)), other)
            if other is not None and other[2] > position and other[1] is served:
                yield place, f"{Action(*key)} stands before {stage}{before}{microbatch}"
        for kin in KIN.get(op, ()):
            other = places.get((kin, stage, microbatch - 1, 0))
            if other is not None and other[2] > position and other[1] is served:
                yield place, f"{Action(*key)} stands before {stage}{kin}{microbatch - 1}"
        for later in LATER.get(op, ()) if part else ():
            piece = (later, stage, microbatch, part)
            yield from _in_order(own, key, piece if piece in places else (later, stage, microbatch, 0))
    for stage in own.stages:
        if stage - 1 in own.stages:
            yield from _handed_over(own, stage)


def _in_order(own: Rank, earlier: Key, later: Key) -> Iterator[Finding]:
    """Two actions of one lane stand in this order, if both are there."""
    first, second = own.places.get(earlier), own.places.get(later)
    if first is not None and second is not None and first[1] == second[1] and first[2] > second[2]:
        yield second, f"{Action(*later)} stands before {Action(*earlier)}"


def _handed_over(own: Rank, stage: int) -> Iterator[Finding]:
    """Neighbouring stages on one rank need each other's results in the order of its list.

    What is handed over is held for the next stage, so it is not evicted before that has run.
    """
    pairs = [((Op.F, stage - 1), (Op.F, stage)), ((Op.F, stage), (Op.WAIT_EVICT, stage - 1))]
    pairs += [((a, stage), (b, stage - 1)) for a in (Op.B, Op.I) for b in (Op.B, Op.I)]
    for microbatch in range(own.plan.num_microbatches):
        for earlier, later in pairs:
            yield from _in_order(own, (*earlier, microbatch, 0), (*later, microbatch, 0))
        last_part = own.plan.num_parts(stage - 1)
        yield from _in_order(own, (Op.F, stage, microbatch, 0), (Op.WAIT_EVICT, stage - 1, microbatch, last_part))


def _in_pieces(own: Rank) -> Iterator[Finding]:
    """A computation in pieces has them all, in order, with nothing but evictions and loads between them."""
    lane = own.plan.actions[own.rank]
    for place in own.begun:
        first = own.action(place)
        last, step = (own.plan.num_parts(first.stage), 1) if first.op is Op.F else (1, -1)
        expected = [first._replace(part=part) for part in range(first.part, last + step, step)]
        following = takewhile(lambda action: action.op in EVICTION or action.op in COMPUTE, islice(lane, place[2], None))
        if list(islice((action for action in following if action.op in COMPUTE), len(expected))) != expected:
            yield place, f"{first} begins a computation in pieces and is not followed by {' '.join(map(str, expected[1:]))} alone"
    for key, place in own.places.items():
        if key[0] in COMPUTE and key[3] and (*key[:3], 0) not in own.places:
            yield place, f"{Action(*key)} goes on with what never began"


def _sharded(own: Rank) -> Iterator[Finding]:
    """A stage whose weights are gathered by the plan computes only while they are, and reduces after its last backward."""
    stages = {own.action(place).stage for place in own.sharding}
    gathered: set[int] = set()
    reduced: set[int] = set()
    for position, action in enumerate(own.plan.actions[own.rank] if stages else ()):
        if action.stage not in stages or action.op not in COMPUTE | SHARDING:
            continue
        place = (own.rank, False, position)
        is_gathered = action.stage in gathered
        if action.op in COMPUTE and not is_gathered:
            yield place, f"{action} runs before {action.stage}UNSHARD"
        if action.op in COMPUTE - {Op.F} | {Op.REDUCE_GRAD} and action.stage in reduced:
            yield place, f"{action} comes after {action.stage}REDUCE_GRAD"
        if is_gathered if action.op is Op.UNSHARD else action.op is Op.RESHARD and not is_gathered:
            yield place, f"{action} finds the weights {'gathered' if is_gathered else 'not gathered'}"
        if action.op is Op.UNSHARD:
            gathered.add(action.stage)
        elif action.op is Op.RESHARD:
            gathered.discard(action.stage)
        elif action.op is Op.REDUCE_GRAD:
            reduced.add(action.stage)
    for stage in sorted(gathered):
        yield None, f"{stage}UNSHARD without a {stage}RESHARD on rank {own.rank}"


def _affordable(own: Rank) -> Iterator[Finding]:
    """At no action does a rank occupy more than its budgets of slots and of bytes, rooms for guests included."""
    plan, rank = own.plan, own.rank
    yield from _within(own, SLOTS, sum(map(len, plan.rooms(rank).values())), plan.slots[rank], "slots")
    if plan.sizes is not None and plan.budgets is not None:
        yield from _within(own, plan.meter(), plan.idle_bytes(rank), plan.budgets[rank], "bytes")


def _within(own: Rank, meter: Meter, idle: int, budget: int | None, unit: str) -> Iterator[Finding]:
    if budget is None:
        return
    rank, limit = own.rank, budget - idle
    over = next(((i, live) for i, live in enumerate(occupancy(own.plan.actions[rank], meter)) if live > limit), None)
    if over is not None:
        yield (
            (rank, False, over[0]),
            (f"rank {rank} occupies {over[1]} {unit} of its own and {idle} for guests and what stays, of a budget of {budget}"),
        )
    elif limit < 0:
        yield None, f"rank {rank} reserves {idle} {unit} for guests and what stays, of a budget of {budget}"


RULES_OF_A_RANK: dict[str, Callable[[Rank], Iterator[Finding]]] = {
    "belongs": _belongs,
    "complete": _complete,
    "ordered": _ordered,
    "in pieces": _in_pieces,
    "sharded": _sharded,
    "affordable": _affordable,
}
