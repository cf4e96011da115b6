"""The evictor's side: follow the tensors that microbatches save, send them to the acceptor, and load them back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import GradientEdge

from bpipe.backward.autograd import Graph
from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.engine.conventions import Call
from bpipe.engine.microbatch_state import MemoryState, MicrobatchState, PostedTransfer
from bpipe.engine.remembered import Memory
from bpipe.engine.setup import Setup
from bpipe.engine.traffic import Traffic
from bpipe.errors import StageError
from bpipe.memory.ledger import Account, Key, Kind, Ledger
from bpipe.memory.saved.attributes import kept_by_functions
from bpipe.memory.saved.bundle import Bundle
from bpipe.memory.saved.footprint import Footprint, amount_of, covering, footprint_of
from bpipe.memory.saved.known import Known
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.memory.saved.originals import give_originals
from bpipe.memory.saved.recomputed import kept_by_checkpoints
from bpipe.memory.saved.shown import Shown, shown_by
from bpipe.memory.saved.stash import Stash, StashContents
from bpipe.memory.saved.storages import MessageBytes, storages_of
from bpipe.memory.stores import Store
from bpipe.model.microbatch import tensors_in
from bpipe.plan.action import HOST, PartKey, channel_of
from bpipe.plan.sizes import IN, LOSS, OUT, STATE, Amount, StageSizes
from bpipe.schedules import Action, Op
from bpipe.torch_private.engine_and_graph import num_nodes_made
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

NOTHING, NO_MESSAGE = Footprint(0, 0, 0), MessageBytes.of([])
FOLLOWED = "only microbatches with a stash are evicted"


class AcceptorStore:
    """The evictor's end: a store at an acceptor, which receives what is kept, and returns it, by actions of its own plan."""

    host_bytes = 0

    def __init__(self, traffic: Traffic, peer: int | None) -> None:
        self._traffic, self._peer = traffic, peer

    def put(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Transfer:
        stage, microbatch, part = remote
        sizes = [message.numel() for message in messages]
        data = header.pack_eviction(Subject(self._traffic.step, stage, microbatch), part, sizes)
        return self._traffic.transport.send(channel_of(Op.EVICT, self._traffic.rank, self._peer), messages, data)

    def get(self, remote: PartKey, messages: Sequence[torch.Tensor]) -> Transfer:
        return self._traffic.transport.receive(channel_of(Op.LOAD, self._traffic.rank, self._peer), messages)

    def clear(self) -> None:
        """Do nothing: the acceptor has the memory."""


class Evictions:
    """The saved tensors of one rank's microbatches during one step.

    Args:
        setup: of the step.
        memory: the footprints measured so far; microbatches of a new or changed kind add to them.
        returned: the tensors that the step will return to the user; it grows during the step.
    """

    def __init__(self, setup: Setup, memory: Memory, returned: Sequence[torch.Tensor]) -> None:
        self.ledger = Ledger()
        self._setup, self._traffic, self._memory, self._returned = setup, setup.traffic, memory, returned
        self._followed = setup.plan.evicted(setup.rank)
        self._num_parts = {stage: setup.plan.num_parts(stage) for stage in setup.stages}
        memory.tidy()
        self._new: set[Kind] = set()  # kinds that no earlier step has measured
        self._latest: dict[int, MemoryState] = {}  # by stage, that of the latest followed one whose backward has not begun

    def follow(self, call: Call) -> MemoryState:
        """Enter a microbatch in the ledger, and give its call a stash if it will be evicted, or its kind is new or has varied."""
        stage, key = call.state.stage, (call.state.stage, call.state.microbatch)
        account = self.ledger.accounts[key] = Account((stage, call.shapes))
        memory = call.state.memory = MemoryState(account, num_nodes_made())
        known, kind = self._memory.kind(account.kind), account.kind
        if known is None:
            self._new.add(kind)
        elif not (key in self._followed or kind in self._new or known.is_watched):
            return memory
        account.is_measured = True
        is_cut = known is not None and kind not in self._new
        # No more parts than in the plan, which may come from an earlier measurement.
        cuts = known.cuts[: self._most_parts(stage) - 1] if known and is_cut else None
        received, is_open = tensors_in(call.received), any(one.is_output and one.spec.is_open for one in call.incoming)
        needed = [one.requires_grad or (is_open and one.is_floating_point()) for one in received]
        memory.received_bytes = MessageBytes.of(received, needed) if received else NO_MESSAGE
        memory.stash = call.stash = Stash(call.state.name, self._setup.non_activations, self._traffic.transport.device, cuts)
        for one in call.incoming:
            if one.is_borrowed:
                call.stash.borrow(one.present.values())
        return memory

    def _most_parts(self, stage: int) -> int:
        """Return the most parts in which a microbatch may move: no more than the plan has."""
        return self._num_parts[stage] or self._memory.most_parts.get(stage, 1)

    def after_forward(self, state: MicrobatchState, graph: Graph) -> None:
        """Count what a microbatch has saved, or what one measured before has."""
        memory = _memory(state)
        if memory.stash is None:
            found = self._unfollowed(memory, state, graph.edges)
        else:
            is_watched = self._is_watched(memory.account.kind)
            found = self._followed_now(memory, memory.stash, graph.edges, is_watched=is_watched)
            if is_watched:
                self._look_behind(state.stage, memory)
        self.ledger.forward(memory.account, found)
        memory.lent, memory.value_bytes = [], {}
        if memory.left_bytes:
            self.ledger.left(-memory.left_bytes)

    def enter_left(self, stage: int, shapes: str) -> int:
        """Enter the state that a slice has left which will run forward again, with what was measured of slices of its kind."""
        known = self._memory.kinds.get((stage, shapes))
        found = 0 if known is None else known.footprint.sizes()[STATE].num_bytes
        self.ledger.left(found)
        return found

    def _unfollowed(self, memory: MemoryState, state: MicrobatchState, edges: Iterable[GradientEdge]) -> Footprint:
        """Return the footprint of a microbatch that was not followed: that of earlier ones whose graphs have as many nodes.

        If there are none, and now and then as a sample, its graph is measured. If there are none and the graph does not show
        everything, nothing is counted: peaks are lower bounds then.
        """
        account = memory.account
        num_nodes, known = num_nodes_made() - memory.num_nodes, self._memory.kinds[account.kind]
        is_known = known.is_like_latest(num_nodes)
        if is_known and not known.is_sample():
            return known.footprint
        shown = shown_by(nodes_behind(edges), self._setup.non_activations, state.name)
        if shown.is_all:
            account.is_measured = True
            return known.found(num_nodes, shown)
        if is_known:
            return known.footprint
        account.is_unknown = True
        known.differed()
        return NOTHING

    def _followed_now(self, memory: MemoryState, stash: Stash, edges: Iterable[GradientEdge], *, is_watched: bool) -> Footprint:
        """Measure the footprint of a followed microbatch, through its stash."""
        account, known = memory.account, self._memory.kinds.get(memory.account.kind)
        memory.followed = num_nodes_made() - memory.num_nodes, self._seen_in_graph(known, stash, edges, is_watched=is_watched)
        if memory.lent:
            stash.lend(memory.lent)
        most_parts, contents = self._most_parts(account.kind[0]), self._contents(stash)
        stash.settle(contents, most_parts)
        footprint = self._footprint(memory, stash, contents)
        self.ledger.seen(contents)
        has_kept = bool(stash.kept or stash.cached)
        if known is None:
            self._memory.kinds[account.kind] = Known.first(footprint, stash.cuts, has_kept=has_kept)
        else:
            known.has_kept |= has_kept
            known.cuts = max(known.cuts, tuple(stash.cuts), key=len)
        account.is_followed = True
        return footprint

    def _seen_in_graph(self, known: Known | None, stash: Stash, edges: Iterable[GradientEdge], *, is_watched: bool) -> Shown | None:
        """Find what no hook has seen in a followed microbatch's graph; return what the graph shows, if its kind is watched."""
        nodes = nodes_behind(edges)
        give_originals(nodes)
        if is_watched or known is None or known.has_kept:
            stash.cached, kept = kept_by_checkpoints(nodes)
            stash.kept = [*kept_by_functions(nodes, stash.name), *kept]
        return shown_by(nodes, self._setup.non_activations, stash.name) if is_watched else None

    def _contents(self, stash: Stash) -> StashContents:
        """Look at what a microbatch holds now."""
        return stash.contents(self._returned, self._traffic.microbatches.tensors())

    def _is_watched(self, kind: Kind) -> bool:
        """Return whether microbatches of a kind are measured as often as something could have changed."""
        return kind in self._new or self._memory.kinds[kind].is_watched

    def _look_behind(self, stage: int, memory: MemoryState) -> None:
        """Measure the previous microbatch of a stage again: the module may have released tensors that both owned."""
        before = self._latest.get(stage)
        self._latest[stage] = memory
        if before is None or before.stash is None or before.evicted:
            return
        if before.account.known_footprint.shared_bytes:
            self._look(before, before.stash)

    def _look(self, memory: MemoryState, stash: Stash) -> None:
        contents = self._contents(stash)
        self.ledger.seen_again(memory.account, contents, stash.part_sizes(contents))

    def returned(self, call: Call) -> None:
        """Note the result of a followed microbatch of a stage with a loss, which will not be sent."""
        memory, output = _memory(call.state), call.state.output
        memory.returned_bytes = MessageBytes.of(tensors_in([call.result, call.loss if output is None else ()]))
        memory.loss_bytes = None if output is None else output.loss_bytes

    def _footprint(self, memory: MemoryState, stash: Stash, contents: StashContents) -> Footprint:
        """Return the footprint of a microbatch, including its messages."""
        received, sent, results = memory.received_bytes, memory.sent_bytes, memory.returned_bytes
        assert received is not None, "its input was counted when it began to be followed"
        beside = results or NO_MESSAGE  # a result that is not sent, although an output is
        if not sent or not sent.storages:
            sent, beside = results or NO_MESSAGE, NO_MESSAGE
        memory.received_bytes = memory.sent_bytes = memory.returned_bytes = None
        own, footprint, parts = contents.own, footprint_of(contents), stash.part_sizes(contents)
        came = Amount(IN, received.num_bytes, received.among(own), gradient=received.gradient)
        out = amount_of(OUT, sent, sent.gradient, own, received)
        loss = Amount(LOSS, beside.num_bytes, beside.among(own))
        if memory.loss_bytes is not None:  # gradients of results are there before the backward, among what is left
            out, loss = out._replace(gradient=0), loss._replace(num_bytes=loss.num_bytes + memory.loss_bytes, gradient=0)
        values = sorted(memory.value_bytes.items())
        messages = [came, out, loss, *(amount_of(name, value, gradient, own, sent) for name, (value, gradient) in values)]
        return footprint._replace(parts=parts, amounts=(*footprint.amounts, *messages))

    def predicted(self) -> dict[Key, Footprint]:
        """Return the footprint of each microbatch, assuming that it is like the measured ones of its kind."""
        return {key: self._memory.kinds[account.kind].expected for key, account in self.ledger.accounts.items()}

    def taken(self, key: Key) -> StageSizes | None:
        """Return the sizes of a microbatch; None if those of its kind took different amounts of memory in this step."""
        kind = self.ledger.accounts[key].kind
        return None if kind in self._varying() else self._memory.kinds[kind].footprint.sizes()

    def _varying(self) -> set[Kind]:
        """Return the kinds whose microbatches took different amounts of memory in this step."""
        found: dict[Kind, set[int]] = {}
        for account in self.ledger.accounts.values():
            if account.is_measured:
                found.setdefault(account.kind, set()).add(account.known_footprint.num_bytes)
        return {kind for kind, sizes in found.items() if len(sizes) > 1}

    def varying(self) -> set[int]:
        """Return the stages with microbatches of one kind that took different amounts of memory in this step."""
        return {stage for stage, _ in self._varying()}

    def settled(self) -> dict[int, tuple[StageSizes, ...]]:
        """Return, for each stage and unit of a microbatch, sizes that cover this step's as they were before their backward."""
        kinds: dict[int, list[dict[Kind, None]]] = {}  # of each stage, by unit of a microbatch
        k = self._setup.plan.units
        for (stage, unit), account in self.ledger.accounts.items():
            kinds.setdefault(stage, [{} for _ in range(k)])[unit % k][account.kind] = None
        known = self._memory.kinds
        return {stage: covering([[known[one].expected.sizes() for one in of] for of in units]) for stage, units in kinds.items()}

    def measured(self) -> dict[Key, Footprint]:
        """Return the footprints of the microbatches that were measured in this step.

        If one was measured only after its forward, it is unknown how much of it can move: it counts only if it is larger than all
        followed ones of its stage.
        """
        accounts = {key: account for key, account in self.ledger.accounts.items() if account.is_measured}
        most: dict[int, int] = {}
        for (stage, _), account in accounts.items():
            if account.is_followed:
                most[stage] = max(most.get(stage, -1), account.known_footprint.own_bytes)
        return {
            key: account.known_footprint
            for key, account in accounts.items()
            if account.is_followed or account.known_footprint.own_bytes > most.get(key[0], -1)
        }

    def counts(self) -> dict[str, int]:
        """Count this step's microbatches that were measured, those whose memory was assumed, and those whose memory is unknown."""
        accounts = self.ledger.accounts.values()
        measured, unknown = sum(one.is_measured for one in accounts), sum(one.is_unknown for one in accounts)
        return {
            "microbatches_measured": measured,
            "microbatches_assumed": len(accounts) - measured - unknown,
            "microbatches_unknown": unknown,
        }

    def before_backward(self, state: MicrobatchState) -> None:
        """Measure a microbatch whose kind is watched once more: by now only autograd should own its saved tensors."""
        memory = _memory(state)
        if self._latest.get(state.stage) is memory:
            del self._latest[state.stage]  # its backward frees memory: a later look would not show its full footprint
        if memory.stash is not None and self._is_watched(memory.account.kind):
            self._look(memory, memory.stash)

    def after_backward_input(
        self, state: MicrobatchState, gradients: Iterable[torch.Tensor], *, is_idle: bool, is_whole: bool = False
    ) -> None:
        """Measure the memory that a microbatch keeps between `backward_input` and `backward_weight`, if its kind is watched.

        Args:
            state: the microbatch.
            gradients: those that wait for `backward_weight`.
            is_idle: no gradient came, so nothing remains to be done for it; or it does not show what others of its kind keep.
            is_whole: its backward ran as a whole and keeps nothing, unlike others of its kind.
        """
        stash, account = (memory := _memory(state)).stash, memory.account
        known, own = self._memory.kinds[account.kind], account.known_footprint
        between = known.footprint.between_bytes
        if is_idle:
            known.num_idle += stash is not None
            account.is_idle = True
            between = 0
        elif stash is not None and (
            between is None or own.num_bytes != known.footprint.num_bytes or self._is_watched(account.kind)
        ):
            left = self._contents(stash)
            waiting = sum({address_of(s): s.nbytes() for gradient in gradients for s in storages_of(gradient)}.values())
            between = left.own_bytes + left.borrowed_bytes + waiting
        elif is_whole:
            between = 0
        elif stash is None and own.num_bytes != known.footprint.num_bytes:  # the bytes in between are unknown
            account.is_measured, account.is_unknown = False, True
            between = 0
        self.ledger.backward_input(account, between)

    def handed_back(self, state: MicrobatchState, given_bytes: int, collected_bytes: int) -> None:
        """Count what a slice's backward has given to the states of earlier slices, and what it has taken of later ones."""
        self.ledger.handed_back(_memory(state).account, given_bytes, collected_bytes)

    def after_backward(self, state: MicrobatchState) -> None:
        memory = _memory(state)
        account, footprint = memory.account, memory.account.footprint
        if memory.stash is not None and memory.followed is not None and footprint is not None:
            if account.is_idle:
                footprint = footprint._replace(between_bytes=None)
            self._memory.kinds[account.kind].saw(footprint, *memory.followed)
        memory.stash = None
        self.ledger.backward(account)

    def evict(self, action: Action, state: MicrobatchState) -> None:
        memory = _memory(state)
        stash = memory.stash
        assert stash is not None, FOLLOWED
        contents = self._contents(stash)
        if not memory.evicted:
            self.ledger.seen_again(memory.account, contents, stash.part_sizes(contents))
        bundle = memory.evicted[action.part] = Bundle(stash.send_away(contents, action.part), stash.name)
        if self._memory.planned is not None:
            self._check_planned(action, bundle, self._memory.planned(action))
        messages = bundle.messages()
        memory.transfers[action.op, action.part] = PostedTransfer(self._store_of(action).put(action[1:4], messages))
        if action.peer == HOST:
            self.ledger.stored(bundle.num_bytes)
        else:
            self._memory.largest_remote_bytes = max(self._memory.largest_remote_bytes, sum(map(len, messages)))

    def _store_of(self, action: Action) -> Store:
        return self._memory.stores.get(action.peer) or AcceptorStore(self._traffic, action.peer)

    def _check_planned(self, action: Action, bundle: Bundle, planned: int) -> None:
        """Raise if an eviction would move more bytes than the plan reserves on the acceptor."""
        if bundle.num_bytes > planned:
            raise StageError(
                f"microbatch {action.microbatch} of stage {action.stage}: {action} would move {bundle.num_bytes} bytes, but "
                f"the sizes that the plan was made from give {planned}. Give larger sizes, or let Balanced measure them."
            )

    def complete_evict(self, action: Action, state: MicrobatchState) -> None:
        memory = _memory(state)
        self._traffic.wait(memory.transfers, action)  # first: it releases the messages, which own the storages that `empty` checks
        bundle = memory.evicted[action.part]
        bundle.empty()
        self.ledger.evicted(action, bundle.num_bytes)

    def load(self, action: Action, state: MicrobatchState) -> None:
        memory = _memory(state)
        bundle = memory.evicted[action.part]
        messages = memory.refilled[action.part] = bundle.refill()
        self.ledger.loading(action, bundle.num_bytes)
        memory.transfers[action.op, action.part] = PostedTransfer(self._store_of(action).get(action[1:4], messages))

    def complete_load(self, action: Action, state: MicrobatchState) -> None:
        memory = _memory(state)
        self._traffic.wait(memory.transfers, action)
        bundle = memory.evicted.pop(action.part)
        bundle.scatter(memory.refilled.pop(action.part))
        if action.peer == HOST:
            self.ledger.stored(-bundle.num_bytes)
        assert memory.stash is not None, FOLLOWED
        memory.stash.take_back(action.part)


def _memory(state: MicrobatchState) -> MemoryState:
    assert state.memory is not None, "a microbatch is entered in the ledger when its forward begins"
    return state.memory
