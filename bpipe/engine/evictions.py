"""The evictor's side: follow what microbatches save, hand it to the acceptor, and get it back."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple

import torch
from torch.autograd.graph import GradientEdge
from torch.multiprocessing.reductions import StorageWeakRef

from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire import header
from bpipe.engine.remembered import Memory
from bpipe.engine.traffic import Traffic
from bpipe.errors import StageError
from bpipe.memory.ledger import Key, Kind, Ledger
from bpipe.memory.saved.attributes import kept_by_functions
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.footprint import Footprint, covering, footprint_of
from bpipe.memory.saved.known import Known
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.memory.saved.originals import give_originals
from bpipe.memory.saved.recomputed import kept_by_checkpoints
from bpipe.memory.saved.shown import Shown, num_nodes_made, shown_by
from bpipe.memory.saved.stash import Contents, Pieces, Stash
from bpipe.memory.saved.storages import storages_of
from bpipe.model.microbatch import tensors_in
from bpipe.plan.action import HOST, PartKey
from bpipe.plan.sizes import StageSizes
from bpipe.schedules import Action, Op

__all__: list[str] = []

NOTHING = Footprint(0, 0, 0)


class Evictions:
    """The saved tensors of one rank's microbatches during one step.

    Args:
        traffic: this rank's transfers.
        followed: the microbatches that the plan evicts, or between whose pieces it does something.
        memory: footprints measured so far; microbatches of a new kind add to them, and those that differ.
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
        self._new: set[Kind] = set()  # those that no step before has seen
        self._nodes_before = 0  # the forward that runs now
        self._graphs: dict[Key, tuple[int, Shown | None]] = {}  # of those followed: the number of nodes, and what they show
        self._latest: dict[int, Key] = {}  # by stage
        self._measured: set[Key] = set()  # looked at in this step
        self._unknown: set[Key] = set()  # which take what nobody has seen
        self._idle: set[Key] = set()  # without a gradient
        self._stashes: dict[Key, Stash] = {}
        self._bundles: dict[PartKey, Bundle] = {}
        self._received: dict[Key, _Message] = {}
        self._returned: dict[Key, _Message] = {}
        self._landing: dict[PartKey, list[torch.Tensor]] = {}

    def follow(self, action: Action, shapes: str, received: object, pieces: Pieces | None) -> Stash | None:
        """Return a stash for a microbatch that will be evicted, or whose kind is new or has varied; None for any other.

        Args:
            action: its forward.
            shapes: what it looks like.
            received: the nest of tensors that the stage before has sent.
            pieces: those of its forward, if the plan does something between them.
        """
        key = action[1:3]
        kind = self._kinds[key] = (key[0], shapes)
        known = self._memory.kind(kind)
        self._nodes_before = num_nodes_made()
        if known is None:
            self._new.add(kind)
        elif not (known.is_watched or key in self._followed or kind in self._new):
            return None
        self._measured.add(key)
        self._received[key] = _Message.of(tensors_in(received))
        name, device = _name(key), self._traffic.transport.device
        is_cut = known is not None and kind not in self._new
        cuts = known.cuts[: self._most_parts(key[0]) - 1] if known and is_cut else None  # the plan may be of another measurement
        stash = Stash(name, self._find_foreign(), device, cuts, is_inside=self._memory.is_inside)
        stash.pieces = pieces
        if self._traffic.is_own(action.stage - 1):
            stash.borrow(tensors_in(received))
        if action.part:
            self.begin_piece(action)
        return stash

    def _most_parts(self, stage: int) -> int:
        """Return in how many parts a microbatch may move: no more than the plan knows."""
        return self._num_parts(stage) or self._memory.most_parts.get(stage, 1)

    def begin_piece(self, piece: Action) -> None:
        """Count a piece in the ledger: a forward takes what it saves piece by piece, and a backward gives it back likewise."""
        key = piece[1:3]
        known = self._memory.kinds.get(self._kinds[key])
        if piece.op is Op.B:
            self.ledger.piece(key, -self.ledger.footprints[key].saved_by(piece.part + 1))
        elif known is not None:
            self.ledger.piece(key, known.footprint.saved_by(piece.part))

    def after_forward(self, key: Key, stash: Stash | None, edges: Iterable[GradientEdge]) -> None:
        """Enter a microbatch in the ledger: as it was found, or as measured before.

        Args:
            key: the microbatch.
            stash: what followed it, if anything did.
            edges: those of the stage's outputs.
        """
        kind = self._kinds[key]
        footprint = self._unfollowed(key, edges) if stash is None else self._followed_now(key, stash, edges)
        self.ledger.forward(key, kind, footprint)

    def _unfollowed(self, key: Key, edges: Iterable[GradientEdge]) -> Footprint:
        """Return what a microbatch that nothing has followed takes: what earlier ones took whose graphs have as many nodes.

        If there are none, and now and then as a sample, its graph is looked at. Where there are none and the graph does not show
        everything, nothing is counted: peaks are "at least".
        """
        num_nodes, known = num_nodes_made() - self._nodes_before, self._memory.kinds[self._kinds[key]]
        is_known = known.is_like_latest(num_nodes)
        if is_known and not known.is_sample():
            return known.footprint
        shown = shown_by(nodes_behind(edges), self._find_foreign(), _name(key))
        if shown.is_all:
            self._measured.add(key)
            return known.found(num_nodes, shown)
        if is_known:
            return known.footprint
        self._unknown.add(key)
        known.differed()
        return NOTHING

    def _followed_now(self, key: Key, stash: Stash, edges: Iterable[GradientEdge]) -> Footprint:
        """Measure what a followed microbatch takes, through its stash."""
        kind, stage = self._kinds[key], key[0]
        known, is_watched = self._memory.kinds.get(kind), self._is_watched(kind)
        num_nodes, shown = num_nodes_made() - self._nodes_before, None
        stash.pieces = None
        is_searched = is_watched or known is None or known.has_kept
        if is_searched or stash.has_functions:
            nodes = nodes_behind(edges)
            if stash.has_functions:
                give_originals(nodes)
            if is_searched:
                stash.cached, kept = kept_by_checkpoints(nodes)
                stash.kept = [*kept_by_functions(nodes, stash.name), *kept]
            shown = shown_by(nodes, self._find_foreign(), stash.name) if is_watched else None
            del nodes
        if self._traffic.is_own(stage + 1):
            stash.lend(self._traffic.result_of(*key))
        contents = stash.contents(self._kept(), self._traffic.holds())
        stash.settle(contents, self._most_parts(stage))
        if self._memory.is_inside:
            del contents  # whose references would count as owners
            contents = stash.contents(self._kept(), self._traffic.holds())  # the parts decide what can move
        footprint = self._footprint(key, stash, contents)
        self.ledger.seen(contents)
        del contents  # before `_look_behind` counts the owners of what the microbatch before may share with this one
        has_kept = bool(stash.kept or stash.cached)
        if known is None:
            self._memory.kinds[kind] = Known.first(footprint, stash.cuts, has_kept=has_kept)
        else:
            known.has_kept |= has_kept
            known.cuts = max(known.cuts, tuple(stash.cuts), key=len)
        self._stashes[key], self._graphs[key] = stash, (num_nodes, shown)
        if is_watched:
            self._look_behind(key)
        return footprint

    def _is_watched(self, kind: Kind) -> bool:
        """Return whether microbatches of a kind are looked at as often as something could have changed."""
        return kind in self._new or self._memory.kinds[kind].is_watched

    def _look_behind(self, key: Key) -> None:
        """Look again at the previous microbatch of a stage: what the module had kept hold of may be its alone by now."""
        before = self._latest.get(key[0])
        self._latest[key[0]] = key
        if before in self._stashes and self.ledger.footprints[before].shared_bytes and self._is_here(before):
            self._look(before)

    def _look(self, key: Key) -> None:
        stash = self._stashes[key]
        contents = stash.contents(self._kept(), self._traffic.holds())
        self.ledger.seen_again(key, contents, stash.part_sizes(contents))

    def _is_here(self, key: Key) -> bool:
        """Return whether nothing of a microbatch is evicted."""
        return all(guest[:2] != key for guest in self._bundles)

    def returned(self, key: Key, result: object) -> None:
        """Note what a followed microbatch returned that is not about to be sent: on the last stage, or from a second forward."""
        self._returned[key] = _Message.of(tensors_in(result))

    def _footprint(self, key: Key, stash: Stash, contents: Contents) -> Footprint:
        """Return what a microbatch takes, its messages included."""
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
        """Return the footprint of each microbatch, assuming that it is like those of its kind that were measured."""
        return {key: self._memory.kinds[kind].expected for key, kind in self._kinds.items()}

    def taken(self, key: Key) -> StageSizes | None:
        """Return what a microbatch has taken; None if those of its kind took different amounts of memory in this step."""
        kind = self._kinds[key]
        return None if kind in self._varying() else self._memory.kinds[kind].footprint.sizes()

    def _varying(self) -> set[Kind]:
        """Return the kinds whose microbatches took different amounts of memory in this step."""
        found: dict[Kind, set[int]] = {}
        for key in self._measured:
            found.setdefault(self._kinds[key], set()).add(self.ledger.footprints[key].num_bytes)
        return {kind for kind, sizes in found.items() if len(sizes) > 1}

    def varying(self) -> set[int]:
        """Return the stages with microbatches of one kind that took different amounts of memory in this step."""
        return {stage for stage, _ in self._varying()}

    def settled(self) -> dict[int, StageSizes]:
        """Return, for each stage, sizes that cover this step's microbatches as they were before their backward."""
        kinds = {stage: {kind for key, kind in self._kinds.items() if key[0] == stage} for stage, _ in self._kinds}
        return {stage: covering(self._memory.kinds[kind].expected for kind in of_stage) for stage, of_stage in kinds.items()}

    def measured(self) -> dict[Key, Footprint]:
        """Return the footprints of the microbatches that were looked at in this step.

        If one was looked at only after its forward, nobody knows how much of it can move: it counts only if it is larger than all
        that were followed on its stage.
        """
        own = {key: self.ledger.footprints[key].own_bytes for key in self._measured}
        most = {stage: max(own[key] for key in self._graphs if key[0] == stage) for stage, _ in self._graphs}
        return {key: self.ledger.footprints[key] for key in own if key in self._graphs or own[key] > most.get(key[0], -1)}

    def counts(self) -> dict[str, int]:
        """Count this step's microbatches that were looked at, those whose memory was assumed, and those whose memory is unknown."""
        measured, unknown = len(self._measured), len(self._unknown)
        return {
            "microbatches_measured": measured,
            "microbatches_assumed": len(self.ledger.footprints) - measured - unknown,
            "microbatches_unknown": unknown,
        }

    def before_backward(self, action: Action, pieces: Pieces | None) -> None:
        """Look once more at a microbatch whose kind is watched: by now nobody but autograd should hold what it saved.

        Args:
            action: the backward.
            pieces: its own, if the plan does something between them.
        """
        key = action[1:3]
        stash = self._stashes.get(key)
        if self._latest.get(key[0]) == key:
            del self._latest[key[0]]  # its backward frees memory: another look would no longer show what it took
        if stash is not None:
            stash.pieces = pieces
            if not action.part and self._is_watched(self._kinds[key]):
                self._look(key)

    def after_input_half(self, key: Key, gradients: Iterable[torch.Tensor], *, is_idle: bool, is_whole: bool = False) -> None:
        """Measure what a microbatch leaves between the halves of its backward, if its kind is watched.

        Args:
            key: the microbatch.
            gradients: those that wait for the weight half.
            is_idle: no gradient came, so there is no more to do for it; or it does not show what others of its kind leave.
            is_whole: its backward ran as a whole and leaves nothing, whatever others of its kind leave.
        """
        stash, kind = self._stashes.get(key), self._kinds[key]
        known, own = self._memory.kinds[kind], self.ledger.footprints[key]
        between = known.footprint.between_bytes
        if is_idle:
            known.num_idle += stash is not None
            self._idle.add(key)
            between = 0
        elif stash is not None and (between is None or own.num_bytes != known.footprint.num_bytes or self._is_watched(kind)):
            left = stash.contents(self._kept(), self._traffic.holds())
            waiting = sum({s._cdata: s.nbytes() for gradient in gradients for s in storages_of(gradient)}.values())
            between = left.own_bytes + left.borrowed_bytes + waiting
        elif is_whole:
            between = 0
        elif stash is None and own.num_bytes != known.footprint.num_bytes:  # nobody knows
            self._measured.discard(key)
            self._unknown.add(key)
            between = 0
        self.ledger.input_half(key, between)

    def after_backward(self, key: Key) -> None:
        if self._stashes.pop(key, None) is not None:
            footprint = self.ledger.footprints[key]
            if key in self._idle:
                footprint = footprint._replace(between_bytes=None)
            self._memory.kinds[self._kinds[key]].saw(footprint, *self._graphs[key])
        self.ledger.backward(key)

    def evict(self, action: Action) -> None:
        key, traffic = action[1:3], self._traffic
        stash = self._stashes[key]
        contents = stash.contents(self._kept(), traffic.holds())
        if self._is_here(key):
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
        """Raise if an eviction would move more than the plan has room for on the other side."""
        planned = self._memory.planned
        if planned is not None and bundle.num_bytes > planned(action):
            raise StageError(
                f"microbatch {action.microbatch} of stage {action.stage}: {action} would move {bundle.num_bytes} bytes, and "
                f"the sizes that the plan was made of say {planned(action)}. Give larger sizes, or let Balanced measure them."
            )

    def complete_evict(self, action: Action) -> None:
        self._traffic.wait(action)  # first: it lets go of the messages, which own the storages that `empty` checks
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


def _name(key: Key) -> str:
    return f"microbatch {key[1]} of stage {key[0]}"


class _Message(NamedTuple):
    """What a stage gets or returns: its bytes, and those of each storage under it, with a weak reference that identifies it."""

    num_bytes: int
    storages: dict[int, tuple[StorageWeakRef, int]]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> _Message:
        found = {s._cdata: (StorageWeakRef(s), s.nbytes()) for tensor in tensors for s in storages_of(tensor)}
        return cls(max(sum(tensor.nbytes for tensor in tensors), sum(size for _, size in found.values())), found)

    def among(self, keys: Container[int]) -> int:
        """Return how many of its bytes lie in some storages."""
        return sum(size for key, (storage, size) in self.storages.items() if key in keys and not storage.expired())
