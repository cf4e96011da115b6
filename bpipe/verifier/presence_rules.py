"""The rules of completeness: each action on its rank, and a complete set of actions for each microbatch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import filterfalse
from operator import itemgetter

from bpipe.passes.communicate import received_by, sent_by
from bpipe.plan.action import COMPUTE, HOST, MESSAGES, SERVED, SHARDING, WAIT_OF, Action, Op, PartKey, unit_text
from bpipe.plan.plan import Plan
from bpipe.verifier.rank_index import Finding, RankIndex, mask, ops_in

__all__: list[str] = []

EVICTION = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD})
IN_PARTS = EVICTION | SERVED | {Op.F, Op.B}
NEIGHBOURS = {
    op: offset
    for start, offset in ((Op.SEND_F, 1), (Op.RECV_F, -1), (Op.SEND_B, -1), (Op.RECV_B, 1))
    for op in (start, WAIT_OF[start])
}
NOWHERE = -2
EXCHANGE = frozenset({Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD})
WithPeer = tuple[Op, int, int | None]
_WITH_PEER: Callable[[Action], WithPeer] = itemgetter(0, 1, 4)  # an action's operation, stage and peer


def belongs(own: RankIndex) -> Iterator[Finding]:
    """Check that each action occurs once, on its stage's rank, in the lane of its kind, and that transfers name the right peer."""
    plan = own.plan
    peers = {(op, stage): _peer(plan, op, stage) for op in (*COMPUTE, *SHARDING, *NEIGHBOURS) for stage in own.stages}
    if plan.directions == 1:
        peers = {kind: peer for kind, peer in peers.items() if kind[0] is not Op.WAIT_REDUCE_GRAD}
    for index in own.repeated:
        yield own.place(index), f"{own.show(own.lane[index])} stands a second time"
    lanes: list[Iterable[Action]] = [plan.actions[own.rank], plan.served[own.rank]]
    if plan.skips or plan.paths:  # these messages have rules of their own
        lanes = [filterfalse(_is_routed if plan.paths else _is_of_skips, lane) for lane in lanes]
    computing, serving = (set(map(_WITH_PEER, lane)) for lane in lanes)
    kinds = computing | serving
    odd = {kind for kind in kinds if kind[2] != peers.get(kind[:2], NOWHERE) and not _moves_as_one(own, kind, kinds)}
    is_mixed = any(op in SERVED for op, _, _ in computing) or any(op not in SERVED for op, _, _ in serving)
    for index, action in enumerate(own.lane if odd or is_mixed else ()):
        if own.is_served(index) is not (action[0] in SERVED):
            yield own.place(index), f"{own.show(action)} stands in the wrong lane"
        if odd and _WITH_PEER(action) in odd and not _is_moved(own, action):
            yield own.place(index), _misplaced(own, action)


def whole(own: RankIndex) -> Iterator[Finding]:
    """Check that computations are of whole microbatches: only their activations may move in parts."""
    for op, stage, part in sorted(kind for kind in own.at if kind[2] and (kind[0] in COMPUTE or kind[0] is Op.R)):
        for index in own.at[op, stage, part].values():
            action = own.show(own.lane[index])
            yield own.place(index), f"{action} computes a part of a microbatch, of which only activations move in parts"


def _moves_as_one(own: RankIndex, kind: WithPeer, kinds: set[WithPeer]) -> bool:
    """Return whether all moves of a kind are right, because the moves of the stage have one peer, and the right one."""
    op, stage, peer = kind
    owner = own.plan.stage_ranks[stage]
    if op in SERVED:
        return peer == owner != own.rank
    is_valid = peer is not None and HOST <= peer < own.plan.num_ranks and peer != own.rank
    return (
        op in EVICTION and owner == own.rank and is_valid and {k[2] for k in kinds if k[0] in EVICTION and k[1] == stage} == {peer}
    )


def _peer(plan: Plan, op: Op, stage: int) -> int | None:
    """Return the rank at the other end of a message between stages, or between twins; None if there is none."""
    other = plan.twin(stage) if op in EXCHANGE else plan.neighbour(stage, NEIGHBOURS[op]) if op in NEIGHBOURS else None
    return None if other is None else plan.stage_ranks[other]


def _is_moved(own: RankIndex, action: Action) -> bool:
    """Return whether an eviction's or an acceptor's action is on the right rank and names the right peer."""
    owner = own.plan.stage_ranks[action.stage]
    if action.op in SERVED:
        return action.peer == owner != own.rank
    return action.op in EVICTION and owner == own.rank and action.peer is not None and action.peer == _acceptor(own, action)


def _acceptor(own: RankIndex, action: Action) -> int | None:
    """Return the rank to which a part is evicted, or HOST; None if that is not a valid acceptor."""
    acceptor = own.acceptor(action.part_key)
    return acceptor if acceptor is not None and HOST <= acceptor < own.plan.num_ranks and acceptor != own.rank else None


def _misplaced(own: RankIndex, action: Action) -> str:
    owner = own.plan.stage_ranks[action.stage]
    rank, peer = owner, _peer(own.plan, action.op, action.stage)
    if action.op in SERVED:
        rank, peer = own.rank if owner != own.rank else -1, owner
    elif action.op in EVICTION:
        peer = _acceptor(own, action)
    return f"{own.show(action)} on rank {own.rank} with {_named(action.peer)}: expected rank {rank} and {_named(peer)}"


def _named(peer: int | None) -> str:
    return "no peer" if peer is None else "the host" if peer == HOST else f"peer {peer}"


def complete(own: RankIndex) -> Iterator[Finding]:
    """Check that every microbatch runs forward and backward on every stage, with all transfers, and that evictions return."""
    sets = {stage: [mask(ops) for ops in _complete_sets(own.plan, stage)] for stage in own.stages}
    for stage, accepted in sets.items():
        for microbatch, found in enumerate(own.present[stage, 0]):
            if found not in accepted and own.plan.passes(stage, microbatch):
                yield from _lacking(own, (stage, microbatch, 0), accepted)
            elif found and not own.plan.passes(stage, microbatch):
                yield from _lacking(own, (stage, microbatch, 0), [0])
    for (stage, part), bits in own.present.items():
        for microbatch, found in enumerate(bits) if part or stage not in sets else ():
            if stage in sets:
                yield from _moves_once(own, (stage, microbatch, part), found & ~mask(COMPUTE | MESSAGES))
            elif found not in (0, mask(SERVED)):
                yield from _lacking(own, (stage, microbatch, part), [mask(SERVED)])


def _moves_once(own: RankIndex, which: PartKey, found: int) -> Iterator[Finding]:
    """Check that a part is evicted and loaded, or stays, and that it does not move both by itself and with the whole."""
    if found not in (0, mask(EVICTION)):
        yield from _lacking(own, which, [mask(EVICTION)])
    if found and own.there((*which[:2], 0)) & mask(EVICTION):
        yield (
            own.place(own.find(Op.EVICT, which)),
            f"part {which[2]} of microbatch {unit_text(which[1], own.plan.slices)} moves by itself and with the whole",
        )


def _complete_sets(plan: Plan, stage: int) -> list[frozenset[Op]]:
    """Return the sets of operations that complete a microbatch of a stage: a whole or split backward; kept, moved or recomputed."""
    backwards = (frozenset({Op.B}), frozenset({Op.I, Op.W})) if plan.has_backward else (frozenset[Op](),)
    spared = (frozenset[Op](), EVICTION, *([frozenset({Op.R})] if plan.has_backward else []))
    return [_required(plan, stage, backward) | how for backward in backwards for how in spared]


def _required(plan: Plan, stage: int, backward: frozenset[Op]) -> frozenset[Op]:
    unit = next(iter(plan.flow.turns_of(stage)), 0) * plan.slices
    computations = [Action(op, stage, unit) for op in (Op.F, *backward)]
    transfers = [t.op for c in computations for t in (*received_by(plan, c), *sent_by(plan, c)) if not t.part]
    return frozenset({Op.F, *backward, *transfers, *(WAIT_OF[op] for op in transfers)})


def skipping(own: RankIndex) -> Iterator[Finding]:
    """Check that each microbatch has the messages that the plan's skips ask for, with the right peers, and no others."""
    plan = own.plan
    ends = ((plan.routes.sent, (Op.SEND_F, Op.RECV_B)), (plan.routes.received, (Op.RECV_F, Op.SEND_B)))
    expected = {
        (stage, other + 1): mask(op for start in starts[: 1 + plan.has_backward] for op in (start, WAIT_OF[start]))
        for others, starts in ends
        for stage in own.stages
        for other in others.get(stage, ())
    }
    found = {(stage, part) for op, stage, part in own.at if part and op in MESSAGES and stage in own.stages}
    for stage, part in sorted(expected.keys() | found):
        for unit in range(plan.num_units):
            right = expected.get((stage, part), 0) * plan.passes(stage, unit)
            if (there := own.there((stage, unit, part))) & mask(MESSAGES) != right:
                yield from _lacking(own, (stage, unit, part), [right | there & ~mask(MESSAGES)])
    for index, action in enumerate(own.lane if found else ()):
        if _is_of_skips(action) and (action.peer != plan.stage_ranks[action.part - 1] or own.is_served(index)):
            rank = plan.stage_ranks[action.part - 1]
            yield own.place(index), f"{own.show(action)} with {_named(action.peer)}: stage {action.part - 1} is on rank {rank}"


def routed(own: RankIndex) -> Iterator[Finding]:
    """Check that each message goes to, and comes from, the stage before or behind on the path of its microbatch."""
    plan = own.plan
    for index, action in enumerate(own.lane if plan.paths else ()):
        if not _is_routed(action):
            continue
        expected = plan.neighbour(action.stage, NEIGHBOURS[action.op], action.microbatch)
        if own.is_served(index) or action.stage not in own.stages or expected is None or action.peer != plan.stage_ranks[expected]:
            where = "nowhere" if expected is None else f"to stage {expected} on rank {plan.stage_ranks[expected]}"
            yield own.place(index), f"{own.show(action)} on rank {own.rank} with {_named(action.peer)}: the path leads {where}"


def _is_routed(action: Action) -> bool:
    """Return whether an action is one end of a message between stages."""
    return action[0] in MESSAGES


def _is_of_skips(action: Action) -> bool:
    """Return whether an action is one end of a message between stages that are no neighbours."""
    return action[3] != 0 and action[0] in MESSAGES


def _lacking(own: RankIndex, which: PartKey, complete: list[int]) -> Iterator[Finding]:
    """Yield the actions that a microbatch lacks or has in excess, compared with the complete set that fits it best."""
    there = own.there(which) & ~(mask(COMPUTE) if which[2] else 0)
    nearest = min(complete, key=lambda ops: (ops ^ there).bit_count())
    here = own.find(Op.F, (*which[:2], 0))
    for op in ops_in(nearest ^ there):
        where = own.find(op, which)
        text = f"{own.show(Action(op, *which))} is {'missing' if op in ops_in(nearest) else 'not part of this plan'}"
        yield own.place(here if where is None else where), text
