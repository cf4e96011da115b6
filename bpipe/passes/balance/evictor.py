"""The search for what one rank evicts: sweeps with different settings, of which the cheapest wins."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bpipe.passes.balance.eager import evict_eagerly
from bpipe.passes.balance.evict import Decision, Shortage, Sweep, are_uneven
from bpipe.passes.balance.pace import Pace
from bpipe.passes.balance.rank_steps import RankSteps
from bpipe.passes.balance.remote_capacity import Offer
from bpipe.passes.balance.weave import mirrored, woven
from bpipe.plan.action import HOST, Action
from bpipe.plan.meter import Amount
from bpipe.plan.rooms import reserve

__all__: list[str] = []

THRIFTS = (1.0, 0.5, 1.5, 0.0, 0.75, 2.0, 3.0)  # what a candidate's size counts against it; each finds what others miss


PATIENCE = 1_000_000  # candidates to look at in vain before a rank gives up


class Effort:
    """A limit on the candidates that a search looks at to find something cheaper than what it found first.

    Args:
        allowance: how many candidates; a number and not a time, so that all ranks find the same.
    """

    def __init__(self, allowance: int) -> None:
        self._left = allowance

    @property
    def is_spent(self) -> bool:
        return self._left <= 0

    @property
    def is_beyond_patience(self) -> bool:
        """Whether a rank that has found nothing has looked at so many candidates that it must give up."""
        return self._left <= -PATIENCE

    def spend(self, num_candidates: int) -> None:
        self._left -= num_candidates


class Settled(NamedTuple):
    """What a rank evicts, its list with these evictions, and the rooms that it needs, by acceptor."""

    decision: Decision
    lane: tuple[Action, ...]
    rooms: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Evictor:
    """A rank that may have to evict.

    Args:
        rank: its number.
        steps: its steps.
        paces: the times of its steps, the best first.
        sizes: for each of its stages, the size of each part of a microbatch that can move.
        moved: what an eviction moves.
    """

    rank: int
    steps: RankSteps
    paces: Sequence[Pace]
    sizes: Mapping[int, Sequence[int]]
    moved: Amount

    def has_choice(self, decision: Decision) -> bool:
        """Return whether a thorough search may find something cheaper than a decision."""
        is_simple = not are_uneven(self.sizes) and max(map(len, self.sizes.values())) == 1
        return not is_simple or decision.was_refused or decision.cost[0] > 0

    def decide_eagerly(self, limit: int, offer: Offer) -> Settled | Shortage:
        """Decide what to evict by the paper's rule."""
        found = evict_eagerly(self.steps, limit, offer.peer)
        if isinstance(found, Shortage):
            return found
        settled = self._settled(found)
        if offer.room is not None and settled.rooms.get(offer.peer, 0) > offer.room:
            return Shortage(f"needs {settled.rooms[offer.peer]} rooms on rank {offer.peer}, which has {offer.room}")
        return settled

    def decide(self, limit: int, offers: Sequence[Offer], effort: Effort, *, steadily: bool) -> Settled | Shortage:
        """Decide what to evict to keep the rank within its limit.

        Args:
            limit: the most it may occupy.
            offers: who may take what, best first.
            effort: how much to look for something cheaper where something has been found.
            steadily: whether to place transfers step by step even if a cost model says how long they take.
        """
        best: Settled | None = None
        shortage = Shortage("is over its budget and has no other rank to evict to")
        for found in self._tried(limit, offers, self.paces[-1:] if steadily else self.paces, effort):
            if isinstance(found, Shortage):
                shortage = found
            elif best is None or found.decision.cost < best.decision.cost:
                best = found
            if effort.is_beyond_patience or (best is not None and effort.is_spent):
                break
        return shortage if best is None else best

    def _tried(self, limit: int, offers: Sequence[Offer], paces: Sequence[Pace], effort: Effort) -> Iterator[Settled | Shortage]:
        """Yield what sweeps find with the first peer alone, then with all; with whole microbatches, then ever fewer parts of each.

        With fewer parts of each, loads are spread more evenly.
        """
        thrifts = THRIFTS[:1] if not are_uneven(self.sizes) else THRIFTS[:3] if effort.is_spent else THRIFTS
        for pace in paces:
            for some in (offers[:1], offers) if len(offers) > 1 else (offers,) if offers else ():
                for most_parts in self._numbers_of_parts():
                    for thrift in thrifts:
                        yield self._swept(Sweep(self.steps, pace, limit, self.sizes, some, most_parts, thrift), effort)

    def _numbers_of_parts(self) -> Iterator[int]:
        """Yield how many parts of a microbatch may be away at most: all, then ever fewer, halving where sweeps are slow."""
        number, is_slow = max(map(len, self.sizes.values())), are_uneven(self.sizes) and not self.steps.is_in_pieces
        while number:
            yield number
            number = number // 2 if is_slow and number > 4 else number - 1

    def _swept(self, sweep: Sweep, effort: Effort) -> Settled | Shortage:
        """Sweep again until the guests fit into rooms: a room that a larger guest has left is larger than the next guest needs."""
        given = sweep.offers
        while True:
            decision = sweep.run()
            effort.spend(sweep.num_ranked)
            if isinstance(decision, Shortage):
                return decision
            settled = self._settled(decision)
            lacking = [0 if room is None else max(0, settled.rooms.get(peer, 0) - room) for peer, room in given]
            if not any(lacking):
                return settled
            offers = [offer if not less else _smaller(offer, less) for offer, less in zip(sweep.offers, lacking)]
            sweep = replace(sweep, offers=offers)

    def _settled(self, decision: Decision) -> Settled:
        lane = woven(self.steps, decision.evictions)
        peers = sorted({eviction.peer for eviction in decision.evictions} - {HOST})
        rooms = {peer: sum(reserve(mirrored(lane, self.rank, peer), self.moved).sizes) for peer in peers}
        return Settled(decision, lane, rooms)


def _smaller(offer: Offer, less: int) -> Offer:
    """Reduce an offer by `less`, the amount by which the rooms of its guests would exceed what the peer has."""
    return offer if offer.room is None else offer._replace(room=offer.room - less)
