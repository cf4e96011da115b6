"""The rules of completeness: each action on its rank, and a complete set of actions for each microbatch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from operator import itemgetter

from bpipe.plan.action import COMPUTE, HOST, MESSAGES, SERVED, SHARDING, Action, Op, PartKey
from bpipe.verifier.rank_index import Finding, Kind, RankIndex, mask, ops_in

__all__: list[str] = []

EVICTION = frozenset({Op.EVICT, Op.WAIT_EVICT, Op.LOAD, Op.WAIT_LOAD})
IN_PARTS = EVICTION | SERVED | {Op.F, Op.B}
EXCHANGE = frozenset({Op.REDUCE_GRAD, Op.WAIT_REDUCE_GRAD})
NO_RANK = -1
_PEER: Callable[[Action], int | None] = itemgetter(4)


def belongs(own: RankIndex) -> Iterator[Finding]:
    """Check that each action occurs once, on its stage's rank, in the lane of its kind, and that transfers name the right peer."""
    for index in own.repeated:
        yield own.place(index), f"{own.show(own.lane[index])} stands a second time"
    is_odd = not all(_are_right(own, kind, found) for kind, found in own.at.items())
    is_sharded = any(op in SHARDING for op, *_ in own.at)
    for index, action in enumerate(own.lane if is_odd or is_sharded else ()):
        if not is_odd and action[0] not in SHARDING:
            continue
        if own.is_served(index) is not (action[0] in SERVED):
            yield own.place(index), f"{own.show(action)} stands in the wrong lane"
        rank, peer = _expected(own, action)
        if (own.rank, action.peer) != (rank, peer):
            expected = f"expected rank {rank} and {_named(peer)}"
            yield own.place(index), f"{own.show(action)} on rank {own.rank} with {_named(action.peer)}: {expected}"


def _are_right(own: RankIndex, kind: Kind, found: Mapping[int, int]) -> bool:
    """Return whether all actions of a kind belong where they stand; False if that is to be seen one by one."""
    op, stage, part = kind
    is_served = op in SERVED
    if op in SHARDING:
        return True  # these are few, and are seen one by one anyway
    indices = list(found.values())  # in the order of the lane, the served one last
    if (indices[0] < own.num_computing) if is_served else (indices[-1] >= own.num_computing):
        return False
    owner, peers = own.plan.stage_ranks[stage], set(map(_PEER, map(own.lane.__getitem__, indices)))
    if is_served or owner != own.rank:
        return is_served and peers == {owner} and owner != own.rank
    if op in EVICTION:
        evicted = own.at[Op.EVICT, stage, part].values()
        return peers == set(map(_PEER, map(own.lane.__getitem__, evicted))) and len(peers) == 1 and _is_acceptor(own, *peers)
    if op in MESSAGES:
        expected = {own.messages[stage, turn].get((op, part)) for turn in own.flow.turns_of(stage)}
        return len(expected) == 1 and expected == peers
    return peers == {None}


def _expected(own: RankIndex, action: Action) -> tuple[int, int | None]:
    """Return the rank on which an action belongs, and its peer."""
    op, stage, unit, part, peer = action
    owner = own.plan.stage_ranks[stage]
    if op in SERVED:
        return (own.rank if owner != own.rank else NO_RANK), owner
    if op in EVICTION:
        acceptor = own.acceptor(action.part_key)
        return (owner if peer is not None else NO_RANK), acceptor if _is_acceptor(own, acceptor) else None
    if op in EXCHANGE:
        exchange = own.flow.exchanges.get((stage, part))
        if exchange is not None:
            return owner, own.plan.stage_ranks[exchange.other]
        return (owner if op is Op.REDUCE_GRAD and not part else NO_RANK), None
    if op in MESSAGES:
        return owner, own.messages.get((stage, own.flow.turn_of(unit)), {}).get((op, part))
    return owner, None


def _is_acceptor(own: RankIndex, rank: int | None) -> bool:
    """Return whether this rank can evict to another one, or to the host."""
    return rank is not None and HOST <= rank < own.plan.num_ranks and rank != own.rank


def _named(peer: int | None) -> str:
    return "no peer" if peer is None else "the host" if peer == HOST else f"peer {peer}"


def whole(own: RankIndex) -> Iterator[Finding]:
    """Check that computations are of whole microbatches: only their activations may move in parts."""
    for op, stage, part in sorted(kind for kind in own.at if kind[2] and kind[0] in COMPUTE):
        for index in own.at[op, stage, part].values():
            action = own.show(own.lane[index])
            yield own.place(index), f"{action} computes a part of a microbatch, of which only activations move in parts"


def complete(own: RankIndex) -> Iterator[Finding]:
    """Check that every microbatch runs where the flow says, with all its messages, and that evictions return."""
    for stage in own.stages:
        accepted = {turn: _complete_sets(own, stage, turn) for turn in own.flow.turns_of(stage)}
        for unit, found in enumerate(own.present[stage, 0]):
            if found not in (sets := accepted.get(own.flow.turn_of(unit), [0])):
                yield from _lacking(own, (stage, unit, 0), sets)
    for (stage, part), bits in own.present.items():
        for unit, found in enumerate(bits) if part or stage not in own.stages else ():
            if stage in own.stages:
                yield from _moves_once(own, (stage, unit, part), found & ~mask(COMPUTE | MESSAGES))
            elif found not in (0, mask(SERVED)):
                yield from _lacking(own, (stage, unit, part), [mask(SERVED)])
    yield from _aside(own)


def _complete_sets(own: RankIndex, stage: int, turn: int) -> list[int]:
    """Return the operations that complete a microbatch of a stage: a whole or split backward; kept, moved or recomputed."""
    messages = mask(op for op, part in own.messages[stage, turn] if not part)
    has_backward = own.flow.has_backward
    backwards = [frozenset({Op.B}), frozenset({Op.I, Op.W})] if has_backward else [frozenset[Op]()]
    spared = [frozenset[Op](), EVICTION, *([frozenset({Op.R})] if has_backward else [])]
    return [mask({Op.F, *backward, *how}) | messages for backward in backwards for how in spared]


def _moves_once(own: RankIndex, which: PartKey, found: int) -> Iterator[Finding]:
    """Check that a part is evicted and loaded, or stays, and that it does not move both by itself and with the whole."""
    if found not in (0, mask(EVICTION)):
        yield from _lacking(own, which, [mask(EVICTION)])
    if found and own.there((*which[:2], 0)) & mask(EVICTION):
        yield (
            own.place(own.find(Op.EVICT, which)),
            f"part {which[2]} of microbatch {own.plan.units.text(which[1])} moves by itself and with the whole",
        )


def _aside(own: RankIndex) -> Iterator[Finding]:
    """Check the messages beside outputs: those that the flow asks for, and no others."""
    expected: defaultdict[tuple[int, int], dict[int, int]] = defaultdict(dict)  # by stage and part, then turn
    for (stage, turn), messages in own.messages.items():
        for op, part in messages if own.flow.has_asides else ():
            if part:
                expected[stage, part][turn] = expected[stage, part].get(turn, 0) | mask({op})
    found = {(stage, part) for op, stage, part in own.at if part and op in MESSAGES and stage in own.stages}
    for stage, part in sorted(expected.keys() | found):
        right_of = expected.get((stage, part), {})
        for unit, there in enumerate(own.present[stage, part]):
            right = right_of.get(own.flow.turn_of(unit), 0)
            if there & mask(MESSAGES) != right:
                yield from _lacking(own, (stage, unit, part), [right | there & ~mask(MESSAGES)])


def _lacking(own: RankIndex, which: PartKey, complete: list[int]) -> Iterator[Finding]:
    """Yield the actions that a microbatch lacks or has in excess, compared with the complete set that fits it best."""
    there = own.there(which) & ~(mask(COMPUTE) if which[2] else 0)
    nearest = min(complete, key=lambda ops: (ops ^ there).bit_count())
    here = own.find(Op.F, (*which[:2], 0))
    for op in ops_in(nearest ^ there):
        where = own.find(op, which)
        text = f"{own.show(Action(op, *which))} is {'missing' if op in ops_in(nearest) else 'not part of this plan'}"
        yield own.place(here if where is None else where), text
