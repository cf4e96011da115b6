"""The rules of the order of actions in one rank's list."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator

from bpipe.flow.flow import End
from bpipe.plan.action import COMPUTE, SHARDING, WAIT_OF, Action, Op
from bpipe.verifier.rank_index import Finding, Kind, RankIndex

__all__: list[str] = []

# Operations on one microbatch of one stage, and what each comes after.
COMPUTATIONS = ((Op.F, Op.B), (Op.F, Op.I), (Op.I, Op.W), (Op.F, Op.R), (Op.R, Op.B), (Op.R, Op.I))
# For all that it saved, or for one part of it.
EVICTIONS = (
    (Op.F, Op.EVICT),
    (Op.EVICT, Op.WAIT_EVICT),
    (Op.WAIT_EVICT, Op.LOAD),
    (Op.LOAD, Op.WAIT_LOAD),
    (Op.WAIT_LOAD, Op.B),
    (Op.WAIT_LOAD, Op.I),
)
SERVING = ((Op.ACCEPT, Op.WAIT_ACCEPT), (Op.WAIT_ACCEPT, Op.RETURN), (Op.RETURN, Op.WAIT_RETURN))
# Operations that take a stage's microbatches in the same order: a whole backward counts as I and W. R may take any order.
KIN = {Op.F: (Op.F,), Op.B: (Op.B, Op.I, Op.W), Op.I: (Op.I, Op.B), Op.W: (Op.W, Op.B)}
# The operations that need what a computation of the flow needs, and make what it makes.
HALVES = {Op.F: (Op.F,), Op.B: (Op.B, Op.I)}

Pair = tuple[Kind, Kind]  # of one microbatch, the first comes before the second


def ordered(own: RankIndex) -> Iterator[Finding]:
    """Check that each action runs after the actions it depends on, and that each stage takes its microbatches in order.

    The order matters because the sum of gradients, dropout and BatchNorm depend on it. Slices of a microbatch run forward in the
    order of the sequence, and backward against it, because each reads what the one before left (`Flow.previous`).
    """
    period, turn_of = own.flow.period, own.flow.turn_of
    for earlier, later, turns in _pairs(own):
        first, second = own.at.get(earlier), own.at.get(later)
        if first and second:
            for unit, index in second.items():
                if first.get(unit, -1) > index and (len(turns) == period or turn_of(unit) in turns):
                    yield _before(own, index, earlier, unit)
    for stage in own.stages:
        for op, kin in KIN.items():
            second, previous = own.at.get((op, stage, 0)), own.flow.previous(op, stage)
            for other in kin if second else ():
                first = own.at.get((other, stage, 0), {})
                for unit, index in second.items() if first and second else ():
                    if first.get(previous[unit], -1) > index:
                        yield _before(own, index, (other, stage, 0), previous[unit])


def _before(own: RankIndex, index: int, other: Kind, unit: int) -> Finding:
    op, stage, part = other
    return own.place(index), f"{own.show(own.lane[index])} stands before {own.show(Action(op, stage, unit, part))}"


def _pairs(own: RankIndex) -> Iterator[tuple[Kind, Kind, Collection[int]]]:
    """Yield what comes before what on this rank, and in which turns of the flow."""
    every = range(own.flow.period)
    parts: defaultdict[int, set[int]] = defaultdict(set)
    for op, stage, part in own.at:
        if op in (Op.EVICT, Op.ACCEPT):
            parts[stage].add(part)
    for stage, of_stage in parts.items():
        for earlier, later in SERVING if stage not in own.stages else EVICTIONS:
            yield from ((_kind(earlier, stage, part), _kind(later, stage, part), every) for part in of_stage)
    for stage in own.stages:
        for earlier, later in COMPUTATIONS:
            yield (earlier, stage, 0), (later, stage, 0), every
        turns: defaultdict[Pair, list[int]] = defaultdict(list)
        for turn in own.flow.turns_of(stage):
            for pair in dict.fromkeys(_around(own, stage, turn)):
                turns[pair].append(turn)
        for (before, behind), when in turns.items():
            yield before, behind, frozenset(when)


def _kind(op: Op, stage: int, part: int) -> Kind:
    return op, stage, 0 if op in COMPUTE else part  # only what is saved has parts


def _around(own: RankIndex, stage: int, turn: int) -> Iterator[Pair]:
    """Yield what the flow says: computations come behind their inputs and before their outputs.

    An output in flight keeps its slot, and its bytes, until it has arrived; if no gradient comes back for it, only its bytes.
    """
    # The output lies in the part of what is saved that comes last.
    evicted = [(Op.WAIT_EVICT, stage, part) for part in {0, own.plan.num_parts(stage)}]
    for op, halves in HALVES.items():
        for half in halves:
            ends = [end for end in own.flow.needs(op, stage, turn) if end.stage != stage]
            yield from ((source, (half, stage, 0)) for end in ends for source in _handed(own, end))
        for transfer in own.transfers(op, stage, turn):
            start, wait = ((one, stage, transfer.part) for one in (transfer.op, WAIT_OF[transfer.op]))
            yield start, wait
            if transfer.op in (Op.RECV_F, Op.RECV_B):
                yield from ((wait, (half, stage, 0)) for half in halves)
            else:
                yield from (((half, stage, 0), start) for half in halves)
        for message in own.flow.sent(op, stage, turn):
            if not message.is_gradient:
                arrived = Op.WAIT_SEND_F, stage, message.stage + 1 if message.is_aside else 0
                backwards = [(back, stage, 0) for back in (Op.B, Op.I, Op.W)] if message.returns else []
                yield from ((arrived, later) for later in [*backwards, *evicted])
    for end in own.flow.gives(Op.F, stage, turn):
        if end.op == Op.F and not end.name:
            yield from ((user, later) for user in _handed(own, end) for later in evicted)


def _handed(own: RankIndex, end: End) -> Iterator[Kind]:
    """Yield the computations at the other end of an edge, if they are on this rank, too."""
    if end.stage in own.stages:
        yield from ((half, end.stage, 0) for half in HALVES[Op(end.op)])


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
        elif beside.microbatch // plan.units == unit // plan.units:
            yield own.place(index), f"{own.show(forward)} and {own.show(beside)} cannot run side by side: one needs the other"
        elif own.find(Op.R, (stage, unit, 0)) is not None:
            yield own.place(index), f"{own.show(forward)} runs side by side with a backward and is recomputed"


def recomputed(own: RankIndex) -> Iterator[Finding]:
    """Check that recomputed microbatches run on a stage whose neighbours are on other ranks."""
    for index in sorted(index for kind, found in own.at.items() if kind[0] is Op.R for index in found.values()):
        action = own.lane[index]
        if own.flow.shares_memory(action.stage):
            yield own.place(index), f"{own.show(action)} recomputes a stage that shares memory with another one of rank {own.rank}"


def sums(own: RankIndex) -> Iterator[Finding]:
    """Check that each exchange of gradients happens once, after the last backward of all that it is of, and is added up."""
    expected = (Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD)
    seen: dict[tuple[int, int], list[Op]] = {key: [] for key in own.flow.exchanges if key[0] in own.stages}
    for index, action in enumerate(own.lane[: own.num_computing] if seen else ()):
        if action.op in SHARDING and action.peer is not None:
            done = seen.get((action.stage, action.part))
            if done is None:
                yield own.place(index), f"{own.show(action)} exchanges gradients that no stage of rank {own.rank} has to exchange"
                continue
            if action.op not in expected[len(done) : len(done) + 1]:
                yield own.place(index), f"{own.show(action)} does not follow {' '.join(done) or 'the backwards of its stage'}"
            done.append(action.op)
        elif (action.op in COMPUTE and action.op is not Op.F) or action.op is Op.REDUCE_GRAD:
            for (stage, part), done in seen.items():
                if done and action.stage in own.flow.exchanges[stage, part].after:
                    yield own.place(index), f"{own.show(action)} comes after {Action(Op.REDUCE_GRAD, stage, 0, part)}"
    for (stage, part), done in seen.items():
        for op in expected[len(done) :]:
            other = "those of its twin" if not part else f"those of stage {part - 1}"
            yield None, f"{Action(op, stage, 0, part)} is missing on rank {own.rank}: {other} would not be added to its gradients"


def sharded(own: RankIndex) -> Iterator[Finding]:
    """Check that a stage with weights gathered by the plan computes only while they are, and reduces once, after its backwards."""
    firsts = (own.lane[index] for (op, *_), found in own.at.items() if op in SHARDING for index in found.values())
    stages = {action.stage for action in firsts if action.peer is None}  # of a stage's operations of a kind, the first shows it
    gathered: set[int] = set()
    reduced: set[int] = set()
    for index, action in enumerate(own.lane if stages else ()):
        op, stage = action.op, action.stage
        if stage not in stages or op not in COMPUTE | SHARDING or action.peer is not None:
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
