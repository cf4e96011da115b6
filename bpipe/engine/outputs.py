"""What a forward makes: values for other stages, and where their gradients enter its graph; losses and outputs for the user."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from bpipe.backward.autograd import Graph
from bpipe.backward.without_loss import checked_loss
from bpipe.comm.wire.message import MessageSpec, TensorMeta, all_dense, flatten_message, metas_of
from bpipe.comm.wire.note import may_need_later
from bpipe.engine.conventions import Call
from bpipe.engine.microbatch_state import EdgeState, Message, MicrobatchState, versions_of
from bpipe.engine.setup import PARAMETER, Setup
from bpipe.engine.stage_links import OUTPUT, Way
from bpipe.engine.values import Layout, added, count, described, fixed_among, pack, without_inference
from bpipe.memory.saved.spans import Span
from bpipe.memory.saved.storages import MessageBytes, keys_of
from bpipe.model.microbatch import detached, tensors_in

__all__: list[str] = []


class Outgoing(NamedTuple):
    """The values that go one way: their description, their layout, and their tensors with their graph."""

    tree: str
    layout: Layout
    tensors: list[torch.Tensor]


class Outputs:
    """The values that one rank's forwards make during one step.

    Args:
        setup: of the step.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup, self._microbatches = setup, setup.traffic.microbatches
        self.cut_off: Counter[int] = Counter()  # by stage, the microbatches whose inputs need a gradient that no output brings

    def make(self, call: Call) -> dict[Way, Outgoing]:
        """Return what a call has made, by the way that it goes, and note where its gradients enter the graph."""
        links = call.state.links
        if self._setup.is_plain:
            if links.behind is None:
                return {}
            tree, call.made = flatten_message(call.output, call.state)
            return {links.behind: Outgoing(tree, {}, call.made)}
        values = {OUTPUT: call.output, **call.values}
        of_ways = {way: {name: values[name] for name in names} for way, names in links.outgoing.items()}
        packed = {way: pack(some, call.state, self._setup.title) for way, some in of_ways.items()}
        roots = {id(tensor): tensor for _, tensors in packed.values() for tensor in tensors}
        numbers = {key: number for number, key in enumerate(key for key, tensor in roots.items() if tensor.requires_grad)}
        call.made = list(roots.values())
        call.numbers = {way: [numbers[id(one)] for one in tensors if one.requires_grad] for way, (_, tensors) in packed.items()}
        spans = {way: [Span(tensor, links.last_users[way]) for tensor in tensors] for way, (_, tensors) in packed.items()}
        fixed = fixed_among(spans, [Span(one.entered[at], last) for one in call.incoming for at, last in one.fixed.items()])
        return {way: Outgoing(described(layout, fixed[way]), layout, tensors) for way, (layout, tensors) in packed.items()}

    def hand_on(self, call: Call) -> None:
        """Give what a call has made to other stages of this rank, or keep it until it is sent.

        Raises:
            StageError: there is something that cannot be sent.
        """
        made, state, links = self.make(call), call.state, call.state.links
        self._note_cut_off(call)
        borrowed = keys_of([*(theirs for theirs, *_ in call.lent), *call.left]) if call.lent or call.left else set()
        sendable = dict(zip(map(id, call.made), self._sendable(call.made)))  # what several messages carry is copied once
        for way, (tree, layout, tensors) in made.items():
            sent, is_here = [*map(sendable.__getitem__, map(id, tensors))], way[1] in self._setup.stages
            if is_here:
                sent = list(_apart(sent if self._setup.is_plain else map(without_inference, sent), borrowed))
            message = Message(self._spec(call, way, tree, sent, tensors), list[torch.Tensor | None](sent))
            edge = (self._microbatches[way[1], state.microbatch] if is_here else state).edges[way]
            edge.values = message
            if (is_here and way != links.behind) or (not is_here and self._setup.traffic.transport.waits_on_device):
                edge.unsent_versions = versions_of(sent)  # others may compute before it is used, or sent
            if state.memory is not None:  # the first of two forwards saves nothing
                state.memory.lent += sent if is_here else ()
                self.count(call, way, layout, sent, message.spec)

    def make_again(self, call: Call) -> None:
        """Note what the second of two forwards has made, and count it as the first one has handed it on."""
        made = self.make(call)
        sendable = {} if call.stash is None else dict(zip(map(id, call.made), self._sendable(call.made)))
        for way, (tree, layout, tensors) in made.items() if sendable else ():
            sent = [sendable[id(tensor)] for tensor in tensors]
            self.count(call, way, layout, sent, self._spec(call, way, tree, sent, tensors))

    def count(self, call: Call, way: Way, layout: Layout, tensors: Sequence[torch.Tensor], spec: MessageSpec) -> None:
        """Note the bytes of a message, and of the gradients that come back, or may do so in a later step."""
        memory, is_measured = call.state.memory, way == call.state.links.behind and call.stash is not None
        assert memory is not None, "a microbatch that saves anything is entered in the ledger"
        if not (is_measured or layout):
            return
        needed = [bool(meta and meta.requires_grad) or (spec.is_open and may_need_later(meta)) for meta in spec.tensors]
        if is_measured:
            memory.sent_bytes = MessageBytes.of(tensors, needed)
        if layout:
            count(memory, layout, tensors, needed)

    def _spec(self, call: Call, way: Way, tree: str, sent: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> MessageSpec:
        metas = metas_of(sent, tensors)
        return MessageSpec(tree, metas, way in call.state.links.returning and self._may_change(metas, tensors, call))

    def _note_cut_off(self, call: Call) -> None:
        """Note that no gradient of a microbatch will come to earlier stages which want one, unless it comes past this stage."""
        links = call.state.links
        has_gradient = call.input_grads.anchor is None or any(tensor.requires_grad for tensor in call.made)
        if links.outgoing and self._setup.has_backward and not has_gradient and not links.leads_past:
            self.cut_off[call.state.stage] += 1

    def _sendable(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors to send for a stage's results."""
        non_activations = self._setup.non_activations.keys()  # the stage keeps these, and may change them while they are sent
        return all_dense([tensor if non_activations.isdisjoint(keys_of([tensor])) else tensor.clone() for tensor in tensors])

    def _may_change(self, metas: Sequence[TensorMeta], tensors: Sequence[torch.Tensor], call: Call) -> bool:
        """Return whether outputs that need no gradient now may need one in a later step.

        Next to an output that needs a gradient, outputs that are only passed through, such as a mask of the batch or a buffer,
        never need one. If no output needs a gradient, the whole stage may have been skipped.
        """
        others = [tensor for meta, tensor in zip(metas, tensors) if not meta.requires_grad and may_need_later(meta)]
        if not others or not any(meta.requires_grad for meta in metas):
            return bool(others)
        before = next((one for one in call.incoming if one.is_output and not one.spec.is_open), None)
        fixed = () if before is None else keys_of(one for at, one in before.present.items() if not before.needed[at])
        kinds = self._setup.non_activations  # parameters may be unfrozen
        return not all(key in fixed or kinds.get(key, PARAMETER) != PARAMETER for one in others for key in keys_of([one]))

    def gradients(self, state: MicrobatchState, graph: Graph) -> list[torch.Tensor | None]:
        """Take the gradients that have come back for what a call has made, and add them up for each edge of its graph."""
        if self._setup.is_plain and state.links.behind is not None:
            return _taken(state.edges[state.links.behind])
        total: list[torch.Tensor | None] = [None] * (1 + max((one for of in graph.numbers.values() for one in of), default=-1))
        for way, numbers in graph.numbers.items():
            for number, gradient in zip(numbers, _taken(state.edges[way]), strict=True):
                total[number] = added(total[number], gradient)
        return total


class Results:
    """What the stages with a loss return during one step.

    Args:
        setup: of the step.

    Attributes:
        losses: by microbatch, in the order of forwards.
        outputs: likewise, of the last stage.
        returned: the tensors of both.
    """

    def __init__(self, setup: Setup) -> None:
        self.losses: dict[int, torch.Tensor] = {}
        self.outputs: dict[int, Any] = {}
        self.returned: list[torch.Tensor] = []
        self._setup, self._given = setup, setup.given

    def loss(self, call: Call) -> torch.Tensor | None:
        """Compute the loss of a call; None if the step has none, or if it is computed later."""
        given = self._given
        if given.loss_fn is None or given.targets is None:
            return None
        compute: Callable[[], Any] = partial(given.loss_fn, call.result, given.targets[call.state.microbatch], **given.loss_kwargs)
        for convention in self._setup.conventions:
            compute = partial(convention.loss, call, compute)
        loss = compute()
        return None if loss is None and call.state.output else checked_loss(loss, call.state, trains=self._setup.has_backward)

    def finish(self, call: Call) -> None:
        """Keep what a call has returned."""
        for convention in self._setup.conventions:
            convention.finish(call)
        loss, microbatch = call.loss, call.state.microbatch
        if loss is not None:
            is_part = loss.untyped_storage().nbytes() > loss.element_size()  # part of a larger storage, which it would keep alive
            self.losses[microbatch] = loss.detach().clone() if is_part else loss.detach()
            self.returned.append(self.losses[microbatch])
        if self._given.keeps_outputs:
            if not self.outputs:  # checked once, before any gradient is added
                self._given.check_output(call.result)
            self.outputs[microbatch] = detached(call.result)
            self.returned += tensors_in(self.outputs[microbatch])

    def gradients(self, state: MicrobatchState) -> list[torch.Tensor]:
        """Return the gradient with which the backward of a microbatch's loss starts; none if that backward has run already."""
        return [] if state.output else [torch.full_like(self.losses[state.microbatch], self._given.loss_gradient)]


def _taken(edge: EdgeState) -> list[torch.Tensor | None]:
    """Take the gradients of what goes one way."""
    assert edge.gradients is not None, "a backward follows the receipt of its gradients"
    gradients, edge.gradients = edge.gradients.tensors, None
    return gradients


def _apart(tensors: Iterable[torch.Tensor], borrowed: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yield tensors as the next stage on this rank gets them: no two share memory, as over a link, so it may change each in place.

    Args:
        tensors: the outputs of a stage.
        borrowed: the storages that the stage got from its previous stage in the same way, or has left for later slices.
    """
    taken = set(borrowed)
    for tensor in tensors:
        keys = keys_of([tensor])
        yield tensor.clone() if keys & taken else tensor
        taken |= keys
