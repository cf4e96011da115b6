"""The evictor's side: follow what microbatches save, hand it to the acceptor, and get it back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.comm import header
from bpipe.comm.transport import Transfer
from bpipe.errors import StageError
from bpipe.memory.attributes import kept_by_functions
from bpipe.memory.bundle import Bundle
from bpipe.memory.footprint import Footprint, covering, footprint_of
from bpipe.memory.guests import Rooms
from bpipe.memory.host import HostRooms
from bpipe.memory.ledger import Key, Kind, Ledger
from bpipe.memory.nodes import nodes_behind
from bpipe.memory.recomputed import kept_by_checkpoints
from bpipe.memory.stash import Contents, Pieces, Stash
from bpipe.memory.storages import storages_of
from bpipe.microbatch import tensors_in
from bpipe.runtime.state import Learned
from bpipe.runtime.traffic import Traffic
from bpipe.schedules import Action, Op, Plan
from bpipe.schedules.action import HOST
from bpipe.schedules.meter import slot
from bpipe.schedules.rooms import Guest, reserve
from bpipe.schedules.sizes import StageSizes

__all__: list[str] = []

REMEMBERED_KINDS = 1024  # of microbatches, by stage and shapes
MOST_IDLE = 8  # microbatches of a kind without a gradient, after which it is believed that they all are


@dataclass
class _Kind:
    """What the latest microbatch of a kind took that was followed.

    Args:
        footprint: as measured after its forward.
        cuts: where its parts begin.
        has_kept: whether custom Functions or checkpointed regions keep something by themselves.
        settled: as seen before its backward.
        num_idle: how many that were followed had no gradients, and so did not show what stays between the halves of a backward.
    """

    footprint: Footprint
    cuts: tuple[int, ...]
    has_kept: bool
    settled: Footprint | None
    num_idle: int = 0

    @property
    def is_unsure(self) -> bool:
        """Whether another one is to be followed, for what those before did not show."""
        is_unseen = self.settled is not None and self.settled.between_bytes is None
        return 0 < self.num_idle < MOST_IDLE and is_unseen


@dataclass
class Memory:
    """What a schedule remembers from step to step: measured footprints, the rooms for guests, and those in the host's memory."""

    most_parts: Mapping[int, int] = field(default_factory=dict)  # in which a microbatch may move, by stage; default 1
    is_inside: bool = False  # whether parts come and go inside forwards and backwards
    grows: bool = False  # whether a microbatch may take more than is planned: then it is measured, and planned anew
    planned: Callable[[Action], int] | None = None  # the most bytes that an eviction moves
    kinds: dict[Kind, _Kind] = field(default_factory=dict)  # the one used last stands last
    rooms: dict[int, Rooms] = field(default_factory=dict)  # by evictor
    host_rooms: HostRooms | None = None
    learned: dict[int, Learned] = field(default_factory=dict)  # of the stages whose forwards run twice

    def reserve(self, plan: Plan, rank: int, device: torch.device) -> None:
        """Make the rooms of a plan's guests on this rank and its host, in place of another plan's."""
        self.clear()
        in_bytes = plan.sizes is not None
        moved = slot if plan.sizes is None else plan.sizes.moved
        chains, of_host = plan.chains(rank), plan.host_chain(rank)
        self.rooms = {peer: Rooms(reserve(chain, moved), device, in_bytes=in_bytes) for peer, chain in chains.items()}
        self.host_rooms = HostRooms(reserve(of_host, moved), device, in_bytes=in_bytes) if of_host else None
        self.planned = None if plan.sizes is None or self.grows else plan.sizes.moved

    def clear(self) -> None:
        """Give the memory of all rooms back."""
        for rooms in self.rooms.values():
            rooms.clear()
        if self.host_rooms is not None:
            self.host_rooms.clear()

    def host(self) -> HostRooms:
        assert self.host_rooms is not None, "the plan evicts nothing to the host"
        return self.host_rooms

    def kind(self, kind: Kind) -> _Kind | None:
        """What is known of a kind, which is used now."""
        if kind in self.kinds:
            self.kinds[kind] = self.kinds.pop(kind)
        return self.kinds.get(kind)

    def learn(self, kind: Kind, footprint: Footprint, stash: Stash) -> None:
        """Remember the latest microbatch of a kind that was followed."""
        known = self.kinds.get(kind)
        settled, num_idle = (None, 0) if known is None else (known.settled, known.num_idle)
        self.kinds[kind] = _Kind(footprint, tuple(stash.cuts), bool(stash.kept or stash.cached), settled, num_idle)

    def tidy(self) -> None:
        """Forget the kinds that were not used for longest, where there are too many; between steps, when none is in flight."""
        for kind in list(self.kinds)[:-REMEMBERED_KINDS]:
            del self.kinds[kind]

    @property
    def guest_bytes(self) -> int:
        return sum(rooms.num_bytes for rooms in self.rooms.values())

    @property
    def host_bytes(self) -> int:
        return 0 if self.host_rooms is None else self.host_rooms.num_bytes


class Evictions:
    """The saved tensors of one rank's microbatches during one step.

    Args:
        traffic: this rank's transfers.
        followed: the microbatches that the plan evicts, or between whose pieces it does something.
        memory: footprints measured so far; a first microbatch with new shapes adds to them.
        find_foreign: finds storages that are no activations, and what they are.
        kept: the tensors that the step will return to the user.
        num_parts: how many parts the plan gives a stage's microbatches; 0 if it does not say.
    """

    def __init__(
        self,
        traffic: Traffic,
        followed: Iterable[Key],
        memory: Memory,
        find_foreign: Callable[[], dict[int, str]],
        kept: Callable[[], list[torch.Tensor]],
        num_parts: Callable[[int], int],
    ) -> None:
        self.ledger = Ledger()
        self._traffic, self._followed, self._memory = traffic, set(followed), memory
        self._find_foreign, self._kept, self._num_parts = find_foreign, kept, num_parts
        memory.tidy()
        self._kinds: dict[Key, Kind] = {}
        self._first: dict[Kind, Footprint] = {}
        self._stashes: dict[Key, Stash] = {}
        self._bundles: dict[Guest, Bundle] = {}
        self._received: dict[Key, _Message] = {}
        self._returned: dict[Key, _Message] = {}
        self._landing: dict[Guest, list[torch.Tensor]] = {}

    def follow(self, action: Action, shapes: str, received: object, pieces: Pieces | None) -> Stash | None:
        """A stash for a microbatch that will be evicted, or is the first of its stage with these shapes; else nothing.

        Args:
            action: its forward.
            shapes: what it looks like.
            received: the nest of tensors that the stage before has sent.
            pieces: those of its forward, if the plan does something between them.
        """
        key = action[1:3]
        self._kinds[key] = (key[0], shapes)
        known = self._memory.kind(self._kinds[key])
        if key not in self._followed and known is not None and not known.is_unsure:
            return None
        self._received[key] = _Message.of(tensors_in(received))
        name, device = f"microbatch {key[1]} of stage {key[0]}", self._traffic.transport.device
        cuts = None if known is None else known.cuts[: self._most_parts(key[0]) - 1]  # the plan may be of another measurement
        stash = Stash(name, self._find_foreign(), device, cuts, is_inside=self._memory.is_inside)
        stash.pieces = pieces
        if self._traffic.is_own(action.stage - 1):
            stash.borrow(tensors_in(received))
        if action.part:
            self.begin_piece(action)
        return stash

    def _most_parts(self, stage: int) -> int:
        """In how many parts a microbatch may move: no more than the plan knows."""
        return self._num_parts(stage) or self._memory.most_parts.get(stage, 1)

    def begin_piece(self, piece: Action) -> None:
        """A forward takes what it saves piece by piece, a backward gives it back so."""
        known = self._memory.kinds.get(self._kinds[piece[1:3]])
        if known is not None:
            num_bytes = known.footprint.saved_by(piece.part) if piece.op is Op.F else -known.footprint.saved_by(piece.part + 1)
            self.ledger.piece(piece[1:3], num_bytes)

    def after_forward(self, key: Key, stash: Stash | None, edges: Iterable[GradientEdge]) -> None:
        """Enter a microbatch in the ledger: as it was found, or as measured before.

        Args:
            key: the microbatch.
            stash: what followed it, if anything did.
            edges: those of the stage's outputs.
        """
        kind = self._kinds[key]
        if stash is not None:
            stash.pieces = None
            if kind not in self._memory.kinds or self._memory.kinds[kind].has_kept:
                nodes = nodes_behind(edges)
                stash.cached, kept = kept_by_checkpoints(nodes)
                stash.kept = [*kept_by_functions(nodes, stash.name), *kept]
                del nodes
            if self._traffic.is_own(key[0] + 1):
                stash.lend(self._traffic.result_of(*key))
            contents = stash.contents(self._kept(), self._traffic.holds())
            stash.settle(contents, self._most_parts(key[0]))
            if self._memory.is_inside:
                del contents  # whose references would count as owners
                contents = stash.contents(self._kept(), self._traffic.holds())  # the parts decide what can move
            self._memory.learn(kind, self._footprint(key, stash, contents), stash)
            self.ledger.seen(contents)
            self._stashes[key] = stash
        known = self._memory.kinds[kind]
        self.ledger.forward(key, kind, known.footprint if stash is not None or known.settled is None else known.settled)
        self._first.setdefault(kind, known.footprint)

    def returned(self, key: Key, result: object) -> None:
        """What a followed microbatch returned that is not about to be sent: the last stage's, or what ran once more."""
        self._returned[key] = _Message.of(tensors_in(result))

    def _footprint(self, key: Key, stash: Stash, contents: Contents) -> Footprint:
        """What a microbatch takes, its messages included."""
        received = self._received.pop(key)
        sent = self._returned.pop(key, None) or _Message.of(self._traffic.result_of(*key))
        return footprint_of(contents)._replace(
            parts=stash.part_sizes(contents),
            received_bytes=received.num_bytes,
            sent_bytes=sent.num_bytes,
            kept_received_bytes=received.among(contents.own),
            kept_sent_bytes=sent.among(contents.own),
        )

    def predicted(self) -> dict[Key, Footprint]:
        """The footprint of each microbatch, if it is like the first of its kind that was measured."""
        return {key: self.footprint(key) for key in self._kinds}

    def footprint(self, key: Key) -> Footprint:
        """That of a microbatch, likewise."""
        kind = self._kinds[key]
        return self._memory.kinds[kind].settled or self._first[kind]

    def settled(self) -> dict[int, StageSizes]:
        """For each stage, sizes that cover this step's microbatches as they were before their backward."""
        kinds = {stage: {kind for key, kind in self._kinds.items() if key[0] == stage} for stage, _ in self._kinds}
        return {stage: covering(self._settled(kind) for kind in of_stage) for stage, of_stage in kinds.items()}

    def _settled(self, kind: Kind) -> Footprint:
        found = self._memory.kinds[kind].settled
        assert found is not None, "its backward has begun"
        return found

    def before_backward(self, action: Action, pieces: Pieces | None) -> None:
        """Look once more at the first microbatch of a kind: by now nobody but autograd should hold what it saved.

        Args:
            action: the backward.
            pieces: its own, if the plan does something between them.
        """
        stash, kind = self._stashes.get(action[1:3]), self._kinds[action[1:3]]
        if stash is not None:
            stash.pieces = pieces
        known = self._memory.kinds[kind]
        if stash is not None and known.settled is None and not action.part:
            contents = stash.contents(self._kept(), self._traffic.holds())
            known.settled = known.footprint.seen_again(contents, stash.part_sizes(contents))

    def after_input_half(self, key: Key, gradients: Iterable[torch.Tensor], *, is_idle: bool) -> None:
        """Measure what the first microbatch of a kind leaves between the halves of its backward.

        Args:
            key: the microbatch.
            gradients: those that wait for the weight half.
            is_idle: no gradient came, so there is no more to do for it.
        """
        stash, kind = self._stashes.get(key), self._kinds[key]
        settled = self._settled(kind)
        if is_idle:
            self._memory.kinds[kind].num_idle += stash is not None
            self.ledger.input_half(key, 0)
            return
        if stash is not None and settled.between_bytes is None:
            left = stash.contents(self._kept(), self._traffic.holds())
            waiting = sum({s._cdata: s.nbytes() for gradient in gradients for s in storages_of(gradient)}.values())
            settled = settled._replace(between_bytes=left.own_bytes + left.borrowed_bytes + waiting)
            self._memory.kinds[kind].settled = settled
        self.ledger.input_half(key, settled.between_bytes)

    def after_backward(self, key: Key) -> None:
        self._stashes.pop(key, None)
        self.ledger.backward(key)

    def evict(self, action: Action) -> None:
        key, traffic = action[1:3], self._traffic
        stash = self._stashes[key]
        contents = stash.contents(self._kept(), traffic.holds())
        if all(guest[:2] != key for guest in self._bundles):  # all of it is here
            self.ledger.seen_again(key, contents, stash.part_sizes(contents))
        bundle = self._bundles[action[1:4]] = Bundle(stash.send_away(contents, action.part), stash.name)
        self._check_planned(action, bundle)
        if action.peer == HOST:
            transfer: Transfer = self._memory.host().store(action[1:4], bundle.messages())
            self.ledger.stored(bundle.num_bytes)
        else:
            data = header.pack_eviction(traffic.subject(*key), action.part, bundle.message_sizes)
            transfer = traffic.transport.send(traffic.channel(action), bundle.messages(), data)
        traffic.posted(action, transfer)

    def _check_planned(self, action: Action, bundle: Bundle) -> None:
        """Raise before more leaves than the plan has room for on the other side."""
        planned = self._memory.planned
        if planned is not None and bundle.num_bytes > planned(action):
            raise StageError(
                f"microbatch {action.microbatch} of stage {action.stage}: {action} would move {bundle.num_bytes} bytes, and "
                f"the sizes that the plan was made of say {planned(action)}. Give larger sizes, or let Balanced measure them."
            )

    def complete_evict(self, action: Action) -> None:
        self._traffic.wait(action)
        bundle = self._bundles[action[1:4]]
        bundle.empty()
        self.ledger.evicted(action, bundle.num_bytes)

    def load(self, action: Action) -> None:
        self.ledger.loading(action)
        messages = self._landing[action[1:4]] = self._bundles[action[1:4]].refill()
        if action.peer == HOST:
            transfer: Transfer = self._memory.host().fetch(action[1:4], messages)
        else:
            transfer = self._traffic.transport.receive(self._traffic.channel(action), messages)
        self._traffic.posted(action, transfer)

    def complete_load(self, action: Action) -> None:
        self._traffic.wait(action)
        bundle = self._bundles.pop(action[1:4])
        bundle.scatter(self._landing.pop(action[1:4]))
        if action.peer == HOST:
            self.ledger.stored(-bundle.num_bytes)
        self._stashes[action[1:3]].take_back(action.part)


class _Message(NamedTuple):
    """What a stage gets or returns: its bytes, and those of each storage under it, with a weak reference to tell it again."""

    num_bytes: int
    storages: dict[int, tuple[StorageWeakRef, int]]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Message:
        found = {s._cdata: (StorageWeakRef(s), s.nbytes()) for tensor in tensors for s in storages_of(tensor)}
        return cls(max(sum(tensor.nbytes for tensor in tensors), sum(size for _, size in found.values())), found)

    def among(self, keys: Container[int]) -> int:
        """How many of its bytes lie in some storages."""
        return sum(size for key, (storage, size) in self.storages.items() if key in keys and not storage.expired())
