"""The evictor's side: follow the tensors that microbatches save, send them to the acceptor, and load them back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.autograd.graph import GradientEdge

from bpipe.comm.transport.base import Transfer
from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.engine.microbatch_state import MicrobatchState, PostedTransfer
from bpipe.engine.remembered import Memory
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
from bpipe.memory.saved.shown import shown_by
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

NOTHING = Footprint(0, 0, 0)
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
        traffic: this rank's transfers.
        followed: the microbatches that the plan evicts.
        memory: the footprints measured so far; microbatches of a new or changed kind add to them.
        find_non_activations: returns the storages that are not activations, with the kind of each.
        returned: the tensors that the step will return to the user; it grows during the step.
        num_parts: how many parts the plan gives the microbatches of each stage; 0 if it does not say.
    """

    def __init__(
        self,
        traffic: Traffic,
        followed: Iterable[Key],
        memory: Memory,
        find_non_activations: Callable[[], dict[int, str]],
        returned: Sequence[torch.Tensor],
        num_parts: Mapping[int, int],
    ) -> None:
        self.ledger = Ledger()
        self._traffic, self._followed, self._memory = traffic, set(followed), memory
        self._find_non_activations, self._returned, self._num_parts = find_non_activations, returned, num_parts
        memory.tidy()
        self._new: set[Kind] = set()  # kinds that no earlier step has measured
        self._latest: dict[int, MicrobatchState] = {}  # by stage, the latest followed one whose backward has not begun

    def follow(self, action: Action, state: MicrobatchState, shapes: str, received: object) -> Stash | None:
        """Return a stash for a microbatch that will be evicted, or whose kind is new or has varied; None for any other.

        Args:
            action: its forward.
            state: the microbatch.
            shapes: a description of its inputs.
            received: the pytree of tensors that the previous stage has sent.
        """
        key = action.stage, action.microbatch
        account = state.account = self.ledger.open(key, (action.stage, shapes))
        kind, state.num_nodes = account.kind, num_nodes_made()
        known = self._memory.kind(kind)
        if known is None:
            self._new.add(kind)
        elif not (key in self._followed or kind in self._new or known.is_watched):
            return None
        account.is_measured = True
        device = self._traffic.transport.device
        is_cut = known is not None and kind not in self._new
        # No more parts than in the plan, which may come from an earlier measurement.
        cuts = known.cuts[: self._most_parts(action.stage) - 1] if known and is_cut else None
        state.received_bytes = MessageBytes.of(tensors_in(received) if received else ())
        stash = Stash(state.name, self._find_non_activations(), device, cuts)
        if received and action.stage - 1 in self._traffic.stages:
            stash.borrow(tensors_in(received))
        return stash

    def _most_parts(self, stage: int) -> int:
        """Return the most parts in which a microbatch may move: no more than the plan has."""
        return self._num_parts[stage] or self._memory.most_parts.get(stage, 1)

    def after_forward(self, state: MicrobatchState, stash: Stash | None, edges: Iterable[GradientEdge]) -> None:
        """Enter a microbatch in the ledger, with its measured footprint or with one measured before.

        Args:
            state: the microbatch.
            stash: the stash that followed it, or None.
            edges: the gradient edges of the stage's outputs.
        """
        account = _account(state)
        found = self._unfollowed(state, account, edges) if stash is None else self._followed_now(state, account, stash, edges)
        self.ledger.forward(account, found)
        state.lent, state.value_bytes = [], {}
        if state.left_bytes:
            self.ledger.left(-state.left_bytes)
            state.left_bytes = 0

    def after_first_forward(self, state: MicrobatchState, shapes: str) -> None:
        """Enter the state that a slice has left which will run forward again, with what was measured of slices of its kind."""
        known = self._memory.kinds.get((state.stage, shapes))
        if known is not None:
            state.left_bytes = known.footprint.sizes()[STATE].num_bytes
            self.ledger.left(state.left_bytes)

    def _unfollowed(self, state: MicrobatchState, account: Account, edges: Iterable[GradientEdge]) -> Footprint:
        """Return the footprint of a microbatch that was not followed: that of earlier ones whose graphs have as many nodes.

        If there are none, and now and then as a sample, its graph is measured. If there are none and the graph does not show
        everything, nothing is counted: peaks are lower bounds then.
        """
        num_nodes, known = num_nodes_made() - state.num_nodes, self._memory.kinds[account.kind]
        is_known = known.is_like_latest(num_nodes)
        if is_known and not known.is_sample():
            return known.footprint
        shown = shown_by(nodes_behind(edges), self._find_non_activations(), state.name)
        if shown.is_all:
            account.is_measured = True
            return known.found(num_nodes, shown)
        if is_known:
            return known.footprint
        account.is_unknown = True
        known.differed()
        return NOTHING

    def _followed_now(self, state: MicrobatchState, account: Account, stash: Stash, edges: Iterable[GradientEdge]) -> Footprint:
        """Measure the footprint of a followed microbatch, through its stash."""
        kind, stage, most_parts = account.kind, state.stage, self._most_parts(state.stage)
        known, is_watched = self._memory.kinds.get(kind), self._is_watched(kind)
        num_nodes, shown = num_nodes_made() - state.num_nodes, None
        nodes = nodes_behind(edges)
        give_originals(nodes)
        if is_watched or known is None or known.has_kept:
            stash.cached, kept = kept_by_checkpoints(nodes)
            stash.kept = [*kept_by_functions(nodes, stash.name), *kept]
        if is_watched:
            shown = shown_by(nodes, self._find_non_activations(), stash.name)
        del nodes
        if stage + 1 in self._traffic.stages or state.lent:
            behind = self._traffic.result_of(stage, state.microbatch) if stage + 1 in self._traffic.stages else []
            stash.lend([*behind, *state.lent])
            del behind
            state.lent = []
        if state.left is not None:
            stash.leave(state.left.tensors)
        contents = stash.contents(self._returned, self._traffic.microbatches.tensors())
        stash.settle(contents, most_parts)
        footprint = self._footprint(state, stash, contents)
        self.ledger.seen(contents)
        del contents  # `_look_behind` counts the owners of storages that the previous microbatch may share with this one
        has_kept = bool(stash.kept or stash.cached)
        if known is None:
            self._memory.kinds[kind] = Known.first(footprint, stash.cuts, has_kept=has_kept)
        else:
            known.has_kept |= has_kept
            known.cuts = max(known.cuts, tuple(stash.cuts), key=len)
        state.stash, state.followed, account.is_followed = stash, (num_nodes, shown), True
        if is_watched:
            self._look_behind(state)
        return footprint

    def _is_watched(self, kind: Kind) -> bool:
        """Return whether microbatches of a kind are measured as often as something could have changed."""
        return kind in self._new or self._memory.kinds[kind].is_watched

    def _look_behind(self, state: MicrobatchState) -> None:
        """Measure the previous microbatch of a stage again: the module may have released tensors that both owned."""
        before = self._latest.get(state.stage)
        self._latest[state.stage] = state
        if before is None or before.stash is None or before.evicted:
            return
        if _account(before).known_footprint.shared_bytes:
            self._look(before, before.stash)

    def _look(self, state: MicrobatchState, stash: Stash) -> None:
        contents = stash.contents(self._returned, self._traffic.microbatches.tensors())
        self.ledger.seen_again(_account(state), contents, stash.part_sizes(contents))

    def returned(self, state: MicrobatchState, result: object) -> None:
        """Note the result of a followed microbatch that will not be sent: of a stage with a loss, or of a second forward."""
        state.returned_bytes = MessageBytes.of(tensors_in(result))

    def _footprint(self, state: MicrobatchState, stash: Stash, contents: StashContents) -> Footprint:
        """Return the footprint of a microbatch, including its messages."""
        received, results = state.received_bytes, state.returned_bytes
        assert received is not None, "its input was counted when it began to be followed"
        message = self._traffic.result_of(state.stage, state.microbatch)
        is_both = bool(message) and results is not None  # its output is sent, and its prediction is not
        sent = results if results is not None and not is_both else MessageBytes.of(message)
        del message
        beside = results if results is not None and is_both else MessageBytes.of([])
        state.received_bytes = state.returned_bytes = None
        own, footprint = contents.own, footprint_of(contents)
        messages = [Amount(name, one.num_bytes, one.among(own)) for name, one in ((IN, received), (OUT, sent), (LOSS, beside))]
        values, state.value_bytes = sorted(state.value_bytes.items()), {}
        messages += [amount_of(name, value, gradient, own, sent) for name, (value, gradient) in values]
        return footprint._replace(parts=stash.part_sizes(contents), amounts=(*footprint.amounts, *messages))

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

    def settled(self, num_slices: int) -> dict[int, tuple[StageSizes, ...]]:
        """Return, for each stage and slice, sizes that cover this step's microbatches as they were before their backward."""
        kinds: dict[int, list[dict[Kind, None]]] = {}  # of each stage, by slice
        for (stage, unit), account in self.ledger.accounts.items():
            kinds.setdefault(stage, [{} for _ in range(num_slices)])[unit % num_slices][account.kind] = None
        known = self._memory.kinds
        return {stage: covering([[known[one].expected.sizes() for one in of] for of in slices]) for stage, slices in kinds.items()}

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
        stash = state.stash
        if self._latest.get(state.stage) is state:
            del self._latest[state.stage]  # its backward frees memory: a later look would not show its full footprint
        if stash is not None and self._is_watched(_account(state).kind):
            self._look(state, stash)

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
        stash, account = state.stash, _account(state)
        known, own = self._memory.kinds[account.kind], account.known_footprint
        between = known.footprint.between_bytes
        if is_idle:
            known.num_idle += stash is not None
            account.is_idle = True
            between = 0
        elif stash is not None and (
            between is None or own.num_bytes != known.footprint.num_bytes or self._is_watched(account.kind)
        ):
            left = stash.contents(self._returned, self._traffic.microbatches.tensors())
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
        self.ledger.handed_back(_account(state), given_bytes, collected_bytes)

    def after_backward(self, state: MicrobatchState) -> None:
        account = _account(state)
        footprint = account.footprint
        if state.stash is not None and state.followed is not None and footprint is not None:
            if account.is_idle:
                footprint = footprint._replace(between_bytes=None)
            self._memory.kinds[account.kind].saw(footprint, *state.followed)
        state.stash = None
        self.ledger.backward(account)

    def evict(self, action: Action, state: MicrobatchState) -> None:
        traffic = self._traffic
        stash, account = state.stash, _account(state)
        assert stash is not None, FOLLOWED
        contents = stash.contents(self._returned, traffic.microbatches.tensors())
        if not state.evicted:
            self.ledger.seen_again(account, contents, stash.part_sizes(contents))
        bundle = state.evicted[action.part] = Bundle(stash.send_away(contents, action.part), stash.name)
        if self._memory.planned is not None:
            self._check_planned(action, bundle, self._memory.planned(action))
        messages = bundle.messages()
        state.transfers[action.op, action.part] = PostedTransfer(self._store_of(action).put(action[1:4], messages))
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
        self._traffic.wait(state, action)  # first: it releases the messages, which own the storages that `empty` checks
        bundle = state.evicted[action.part]
        bundle.empty()
        self.ledger.evicted(action, bundle.num_bytes)

    def load(self, action: Action, state: MicrobatchState) -> None:
        bundle = state.evicted[action.part]
        messages = state.refilled[action.part] = bundle.refill()
        self.ledger.loading(action, bundle.num_bytes)
        state.transfers[action.op, action.part] = PostedTransfer(self._store_of(action).get(action[1:4], messages))

    def complete_load(self, action: Action, state: MicrobatchState) -> None:
        self._traffic.wait(state, action)
        bundle = state.evicted.pop(action.part)
        bundle.scatter(state.refilled.pop(action.part))
        if action.peer == HOST:
            self.ledger.stored(-bundle.num_bytes)
        assert state.stash is not None, FOLLOWED
        state.stash.take_back(action.part)


def _account(state: MicrobatchState) -> Account:
    assert state.account is not None, "a microbatch is entered in the ledger when its forward begins"
    return state.account
