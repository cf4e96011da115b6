"""The rules of the order of actions in one rank's list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from bpipe.plan.action import BACKWARD, COMPUTE, MESSAGES, SHARDING, Action, Op, PartKey
from bpipe.verifier.rank_index import BITS, Finding, RankIndex, mask, ops_in

__all__: list[str] = []

# For one microbatch of one stage.
PRECEDENCE = (
    (Op.RECV_F, Op.WAIT_RECV_F),
    (Op.WAIT_RECV_F, Op.F),
    (Op.F, Op.SEND_F),
    (Op.SEND_F, Op.WAIT_SEND_F),
    (Op.RECV_B, Op.WAIT_RECV_B),
    (Op.F, Op.B),
    (Op.F, Op.I),
    (Op.I, Op.W),
    (Op.F, Op.R),
    (Op.R, Op.B),
    (Op.R, Op.I),
    (Op.WAIT_RECV_B, Op.B),
    (Op.WAIT_RECV_B, Op.I),
    (Op.B, Op.SEND_B),
    (Op.I, Op.SEND_B),
    (Op.SEND_B, Op.WAIT_SEND_B),
    (Op.F, Op.EVICT),
    (Op.WAIT_SEND_F, Op.WAIT_EVICT),
)
# An output in flight keeps its slot, and its bytes. If gradients stay in their stage, it has its own bytes until it has arrived.
PRECEDENCE_OF_OUTPUTS = {
    False: ((Op.WAIT_SEND_F, Op.B), (Op.WAIT_SEND_F, Op.I), (Op.WAIT_SEND_F, Op.W)),
    True: ((Op.B, Op.WAIT_SEND_F),),
}
# For one part of it, or for all of it.
PRECEDENCE_OF_PARTS = (
    (Op.EVICT, Op.WAIT_EVICT),
    (Op.WAIT_EVICT, Op.LOAD),
    (Op.LOAD, Op.WAIT_LOAD),
    (Op.WAIT_LOAD, Op.B),
    (Op.WAIT_LOAD, Op.I),
    (Op.ACCEPT, Op.WAIT_ACCEPT),
    (Op.WAIT_ACCEPT, Op.RETURN),
    (Op.RETURN, Op.WAIT_RETURN),
)
EARLIER = {
    local: {op: mask(earlier for earlier, later in (*PRECEDENCE, *of_outputs) if later is op) for op in Op}
    for local, of_outputs in PRECEDENCE_OF_OUTPUTS.items()
}
EARLIER_OF_PART = {op: mask(earlier for earlier, later in PRECEDENCE_OF_PARTS if later is op) for op in Op}

# Operations that take a stage's microbatches in the same order: a whole backward counts as I and W. R may take any order.
COMPUTING, PASSING = mask(COMPUTE), mask(MESSAGES)
KIN = {Op.F: mask({Op.F}), Op.B: mask({Op.B, Op.I, Op.W}), Op.I: mask({Op.I, Op.B}), Op.W: mask({Op.W, Op.B})}
BACKWARDS = mask(BACKWARD)


def ordered(own: RankIndex) -> Iterator[Finding]:
    """Check that each action runs after the actions it depends on, and that each stage takes its microbatches in ascending order.

    The order matters because the sum of gradients, dropout and BatchNorm depend on it. Slices of a microbatch run forward in the
    order of the sequence, and backward against it, because each reads what the one before left (`order.previous_unit`).
    """
    seen: defaultdict[PartKey, int] = defaultdict(int)
    in_parts = {stage for _, stage, part in own.at if part}
    routes = own.plan.routes
    skipping = routes.sent.keys() | routes.received.keys()
    involved = {s for _, s, _ in own.at if s in in_parts | skipping or own.plan.num_parts(s) > 1 or _neighbours(own, s)}
    for stage in {stage for _, stage, _ in own.at} - involved:
        yield from _simply_ordered(own, stage)
    for index, action in enumerate(own.lane if involved else ()):
        op, which = action[0], action.part_key
        if which[0] in involved and op not in SHARDING:
            for other, needed in _needs(own, action):
                if own.there(other) & needed & ~seen[other]:
                    yield from _early(own, index, other, needed & ~seen[other])
            seen[which] |= BITS[op]


def _simply_ordered(own: RankIndex, stage: int) -> Iterator[Finding]:
    """Check the order of a stage whose microbatches have no parts, and whose neighbours are on other ranks: nearly all stages."""
    for earlier, later in (*PRECEDENCE, *PRECEDENCE_OF_OUTPUTS[own.plan.local], *PRECEDENCE_OF_PARTS):
        first, second = own.at.get((earlier, stage, 0), {}), own.at.get((later, stage, 0), {})
        for unit, index in second.items() if first else ():
            if first.get(unit, -1) > index:
                yield _before(own, index, Action(earlier, stage, unit))
    for later, earlier in ((op, kin) for op, kins in KIN.items() for kin in ops_in(kins)):
        first, second = own.at.get((earlier, stage, 0), {}), own.at.get((later, stage, 0), {})
        previous = own.plan.flow.previous(later, stage)
        for unit, index in second.items() if first else ():
            if first.get(previous[unit], -1) > index:
                yield _before(own, index, Action(earlier, stage, previous[unit]))


def _before(own: RankIndex, index: int, other: Action) -> Finding:
    return own.place(index), f"{own.show(own.lane[index])} stands before {own.show(other)}"


def _early(own: RankIndex, index: int, which: PartKey, unseen: int) -> Iterator[Finding]:
    for op in ops_in(own.there(which) & unseen):
        yield _before(own, index, Action(op, *which))


def _neighbours(own: RankIndex, stage: int) -> list[int]:
    """Return the previous and next stage if they are on this rank as well: they exchange tensors without a message."""
    return [near for offset in (-1, +1) if stage in own.stages and (near := own.plan.neighbour(stage, offset)) in own.stages]


def _needs(own: RankIndex, action: Action) -> Iterator[tuple[PartKey, int]]:
    """Yield the actions that must come before an action if they exist at all, by microbatch and part."""
    op, stage, microbatch, part, _ = action
    num_parts = own.plan.num_parts(stage)
    has_output = part in (0, num_parts)  # the output lies in the last part
    earlier = EARLIER[own.plan.local][op]
    if part and op in MESSAGES:
        yield (stage, microbatch, 0), earlier & COMPUTING
        yield (stage, microbatch, part), earlier & PASSING
        return
    if op in COMPUTE or (op is Op.WAIT_EVICT and has_output):
        for other in (*own.plan.routes.sent.get(stage, ()), *own.plan.routes.received.get(stage, ())):
            yield (stage, microbatch, other + 1), earlier & PASSING
    yield (stage, microbatch, 0), earlier & ~(0 if has_output else BITS[Op.WAIT_SEND_F] * (op is Op.WAIT_EVICT))
    yield (stage, microbatch, part), EARLIER_OF_PART[op]
    if op in COMPUTE:
        yield (stage, own.plan.flow.previous(op, stage)[microbatch], 0), KIN.get(op, 0)
        for other in range(1, num_parts + 1):  # what has moved by itself
            yield (stage, microbatch, other), EARLIER_OF_PART[op]
    for near in _neighbours(own, stage):
        handed_over = (op is Op.F and near < stage) or (op is Op.WAIT_EVICT and near > stage and has_output)
        yield (near, microbatch, 0), BITS[Op.F] * handed_over | BACKWARDS * (op in BACKWARD and near > stage)


def overlapped(own: RankIndex) -> Iterator[Finding]:
    """Check that each forward of a pair is directly followed by a whole backward of another microbatch.

    Then both have their inputs before the pair begins, and it does not matter in which order they run.
    """
    plan = own.plan
    for stage, unit in sorted(key for key in plan.overlapped if key[0] in own.stages):
        index = own.find(Op.F, (stage, unit, 0))
        forward = Action(Op.F, stage, unit)
        beside = own.lane[index + 1] if index is not None and index + 1 < own.num_computing else forward
        if index is None or beside.op is not Op.B:
            yield own.place(index), f"{own.show(forward)} runs side by side with the whole backward that follows it, and none does"
        elif beside.microbatch // plan.slices == unit // plan.slices:
            yield own.place(index), f"{own.show(forward)} and {own.show(beside)} cannot run side by side: one needs the other"
        elif own.find(Op.R, (stage, unit, 0)) is not None:
            yield own.place(index), f"{own.show(forward)} runs side by side with a backward and is recomputed"


def recomputed(own: RankIndex) -> Iterator[Finding]:
    """Check that recomputed microbatches run on a stage whose neighbours are on other ranks."""
    for index in sorted(index for kind, found in own.at.items() if kind[0] is Op.R for index in found.values()):
        action = own.lane[index]
        if _neighbours(own, action.stage) or action.stage in own.plan.routes.shared:
            yield own.place(index), f"{own.show(action)} recomputes a stage that shares memory with another one of rank {own.rank}"


def local(own: RankIndex) -> Iterator[Finding]:
    """Check that a rank whose gradients stay in their stage runs each forward, then its backward, and moves and repeats nothing."""
    plan = own.plan
    if not plan.local:
        return
    ops = (Op.F, Op.B) if plan.has_backward else (Op.F,)
    expected = (Action(op, stage, unit) for stage in own.stages for unit in range(plan.num_units) for op in ops)
    for index, action in enumerate(own.lane):
        if action.op in MESSAGES or action.op in SHARDING:
            continue
        right = next(expected, None)
        if action != right:
            instead = "nothing more" if right is None else own.show(right)
            yield own.place(index), f"{own.show(action)} stands where {instead} is expected, because gradients stay in their stage"
            return


def twins(own: RankIndex) -> Iterator[Finding]:
    """Check that each stage with a twin exchanges its gradients with it once, after its last backward, and adds them up."""
    if own.plan.directions == 1:
        return
    expected = (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD) if own.plan.has_backward else ()
    seen: dict[int, list[Op]] = {stage: [] for stage in own.stages}
    for index, action in enumerate(own.lane[: own.num_computing]):
        done = seen.get(action.stage, [])
        if action.op in SHARDING and action.peer is not None:
            if action.op not in expected[len(done) : len(done) + 1]:
                yield own.place(index), f"{own.show(action)} does not follow {' '.join(done) or 'the backwards of its stage'}"
            done.append(action.op)
        elif action.op in COMPUTE and action.op is not Op.F and done:
            yield own.place(index), f"{own.show(action)} comes after {action.stage}REDUCE_GRAD"
    for stage, done in seen.items():
        for op in expected[len(done) :]:
            yield None, f"{stage}{op} is missing on rank {own.rank}: the gradients of its twin would not be added"


def sharded(own: RankIndex) -> Iterator[Finding]:
    """Check that a stage with weights gathered by the plan computes only while they are, and reduces once, after its backwards."""
    stages = {action.stage for action in own.lane if action[0] in SHARDING and action.peer is None}
    gathered: set[int] = set()
    reduced: set[int] = set()
    for index, action in enumerate(own.lane if stages else ()):
        op, stage = action.op, action.stage
        if stage not in stages or op not in COMPUTE | SHARDING:
            continue
        is_gathered = stage in gathered
        if op in COMPUTE and not is_gathered:
            yield own.place(index), f"{own.show(action)} runs before {stage}UNSHARD"
        if stage in reduced and op in COMPUTE - {Op.F} | {Op.REDUCE_GRAD}:
            yield own.place(index), f"{own.show(action)} comes after {stage}REDUCE_GRAD"
        if is_gathered if op is Op.UNSHARD else op is Op.RESHARD and not is_gathered:
            yield own.place(index), f"{own.show(action)} finds the weights {'gathered' if is_gathered else 'not gathered'}"
        if op is Op.UNSHARD:
            gathered.add(stage)
        elif op is Op.RESHARD:
            gathered.discard(stage)
        elif op is Op.REDUCE_GRAD:
            reduced.add(stage)
    for stage in sorted(gathered):
        yield None, f"{stage}UNSHARD without a {stage}RESHARD on rank {own.rank}"
    for stage in sorted(stages - reduced if own.plan.has_backward else ()):
        yield None, f"{stage}UNSHARD without a {stage}REDUCE_GRAD on rank {own.rank}: its gradients would never be added up"
