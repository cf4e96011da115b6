"""Sends and receives between stages: the spec agreed for each message, and the checks before it leaves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, MutableMapping

import torch

from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.comm.wire.message import MessageSpec, on_the_wire
from bpipe.comm.wire.note import can_tell, needing, read_note, renewed, with_more, with_note
from bpipe.device import check_fits
from bpipe.engine.microbatch_state import EdgeState, Message, MicrobatchState, PostedTransfer, Transfers, versions_of
from bpipe.engine.setup import Setup
from bpipe.engine.stage_links import Way, links_in
from bpipe.errors import CommError, StageError
from bpipe.plan.action import START_OF, WAIT_OF, channel_of
from bpipe.schedules import Action, Channel, Op, Purpose
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

FROM_SOURCE = frozenset({Op.SEND_F, Op.RECV_B})  # the actions of the stage that makes the values
Boundary = tuple[Purpose, int, int, int]  # the purpose of a message, the way of its values, the microbatch
MessageSpecs = MutableMapping[Boundary, MessageSpec]


class Messages:
    """The messages between the stages of one rank and their neighbours, during one step.

    The first step with new input shapes learns the specs, from headers that travel before the tensors; from then on
    receives are posted ahead, and senders check that nothing changed. Headers are read in the order of the plan's receives on
    their channel, in whatever order these complete; if only the device waits, they are read at the receive.

    Some changes need no new spec: an output that is agreed to need a gradient may need none, and the gradient that comes back
    for it is dropped; one that is agreed to need none may need one; a gradient may be absent or present, or have other strides.
    Notes report these changes (`bpipe.comm.wire.note`).

    Args:
        setup: of the step.
        specs: the agreed message specs, or an empty mapping to be filled when the step is learning.
    """

    def __init__(self, setup: Setup, specs: MessageSpecs) -> None:
        self._traffic, self._specs, self._is_learning, self._plan = setup.traffic, specs, setup.is_learning, setup.plan
        self._microbatches, self._stages = setup.traffic.microbatches, setup.stages
        trained = (stage for stage, of in setup.parts.items() if any(one.requires_grad for one in of.parameters))
        self._trainable = set(trained) if setup.has_backward else set()
        self._unlearned: dict[Channel, deque[Action]] = defaultdict(deque)

    def agreed(self, microbatch: int, stages: Iterable[int]) -> list[MessageSpec | None]:
        """Return the agreed specs of a microbatch's messages to and from some stages, once it has run."""
        links = [links_in(self._plan.flow)[stage, microbatch] for stage in stages]
        ways = dict.fromkeys(way for of in links for way in (*of.incoming, *of.outgoing))
        return [self._specs.get((purpose, *way, microbatch)) for way in ways for purpose in (Purpose.FORWARD, Purpose.BACKWARD)]

    def _way(self, action: Action) -> Way:
        """Return the way of the values that an action sends or receives, or of whose gradients."""
        op, stage, microbatch, part, _ = action
        is_source = op in FROM_SOURCE
        if part:
            return (stage, part - 1) if is_source else (part - 1, stage)
        links = self._microbatches[stage, microbatch].links
        way = links.behind if is_source else links.before
        assert way is not None, "a message leads to a stage"
        return way

    def _edge(self, action: Action, state: MicrobatchState) -> EdgeState:
        return state.edges[self._way(action)]

    def transfers(self, action: Action, state: MicrobatchState) -> Transfers:
        """Return the transfers of an action's values, or of their gradients."""
        return self._edge(action, state).transfers

    def send(self, action: Action, state: MicrobatchState) -> None:
        edge = self._edge(action, state)
        spec, tensors = _taken(edge, action.op)
        if edge.unsent_versions is not None:
            for tensor, version in edge.unsent_versions:
                if version_of(tensor) != version:
                    raise modified(state, tensor)
            edge.unsent_versions = None
        boundary, subject = self._boundary(action), Subject(self._traffic.step, action.stage, action.microbatch)
        data = note = None
        if self._is_learning:
            self._specs[boundary] = self._announced(action, spec)
            data = header.pack_spec(subject, self._specs[boundary])
        agreed = self._specs[boundary]
        may_have_note = action.op is Op.SEND_B or agreed.is_open
        if spec[:2] != agreed[:2]:
            if action.op is Op.SEND_F:
                note = self._changed_needs(action, state, agreed, spec)
            elif not can_tell(agreed, spec):
                raise _changed(action, state, agreed, spec)
            else:
                tensors, note = with_note(subject, agreed, spec, tensors, self._traffic.transport.device)
                self._specs[boundary] = renewed(agreed, spec)
        sent = [tensor for tensor in tensors if tensor is not None]
        views = [on_the_wire(tensor) for tensor in sent]
        edge.sent_versions = versions_of(sent)
        transfer = self._traffic.transport.send(
            channel_of(action.op, self._traffic.rank, action.peer), views, data, note, may_have_note=may_have_note
        )
        edge.transfers[action.op, action.part] = PostedTransfer(transfer, [*sent, *views])

    def _announced(self, action: Action, spec: MessageSpec) -> MessageSpec:
        """Return the spec to agree on for a message that is sent for the first time.

        If trainable parameters lead to an output that needs no gradient now, they may have been skipped, and may run the next time.
        """
        return spec._replace(is_open=spec.is_open and self._could_need_gradient(action.stage, action.microbatch))

    def _could_need_gradient(self, stage: int, microbatch: int) -> bool:
        """Return whether a stage's output could need a gradient: the stage has trainable parameters, or gets such an input."""
        if stage in self._trainable:
            return True
        flow = self._plan.flow
        for source in dict.fromkeys(end.stage for end in flow.needs(Op.F, stage, flow.turn_of(microbatch))):
            received = self._specs.get((Purpose.FORWARD, source, stage, microbatch))
            if received is None:  # the other stage is on this rank, or another stage of this rank got the message
                found = source in self._stages and self._could_need_gradient(source, microbatch)
            else:
                found = received.is_open or _needs_gradient(received)
            if found:
                return True
        return False

    def _changed_needs(self, action: Action, state: MicrobatchState, agreed: MessageSpec, spec: MessageSpec) -> bytes | None:
        """Agree on outputs that need a gradient for the first time, and remember which gradients to drop; return the note of it.

        Raises:
            StageError: the output differs in something else, or no parameter that is known to be trained leads to it.
        """
        if not is_alike(agreed, spec):
            raise _changed(action, state, agreed, spec)
        note, after = None, needing(agreed, spec)
        if after != agreed:
            if not agreed.is_open:  # then the receiver does not look for a note
                raise _needs_now(state)
            self._agree_on_more(action, agreed, after)
            note = header.pack_spec(Subject(self._traffic.step, action.stage, action.microbatch), after)
        pairs = [(one.requires_grad, other.requires_grad) for one, other in zip(after.tensors, spec.tensors) if one and other]
        self._edge(action, state).unused_gradients = [not needed for expected, needed in pairs if expected]
        return note

    def _agree_on_more(self, action: Action, agreed: MessageSpec, after: MessageSpec) -> None:
        """Expect gradients of more of a stage's outputs from now on."""
        _, before, behind, microbatch = boundary = self._boundary(action)
        self._specs[boundary] = after
        gradients = Purpose.BACKWARD, before, behind, microbatch
        self._specs[gradients] = with_more(self._specs[gradients], agreed, after)

    def complete_send(self, action: Action, state: MicrobatchState) -> None:
        edge = self._edge(action._replace(op=START_OF[action.op]), state)
        self._traffic.wait(edge.transfers, action)
        versions, edge.sent_versions = edge.sent_versions, []
        for tensor, version in versions:
            if version_of(tensor) != version:
                raise modified(state, tensor)

    def receive(self, action: Action, state: MicrobatchState) -> None:
        if self._is_learning and self._traffic.transport.waits_on_device:
            self._learn(action, state)  # the header is sent at this place of the issue order
        elif self._is_learning:
            self._unlearned[channel_of(action.op, self._traffic.rank, action.peer)].append(action)
        else:
            self._post(action, state, self._specs[self._boundary(action)])

    def complete_receive(self, action: Action, state: MicrobatchState) -> None:
        start = action._replace(op=START_OF[action.op])
        if self._is_learning:
            unlearned = self._unlearned[channel_of(start.op, self._traffic.rank, start.peer)]
            while start in unlearned:
                first = unlearned.popleft()
                self._learn(first, self._microbatches[first[1:3]])
        edge = self._edge(start, state)
        note = self._traffic.wait(edge.transfers, action)
        message, edge.landing = edge.landing, None
        assert message is not None, "a receive is posted before it is completed"
        if start.op is Op.RECV_F:
            edge.values = message if note is None else Message(self._needed(start, note), message.tensors)
            return
        unused, edge.unused_gradients = edge.unused_gradients, None
        if unused is not None:
            message = self._as_agreed(start, message)
        if note is not None:
            message = self._noted(start, message, note)
        if unused:
            used = [tensor for tensor, is_unused in zip(message.tensors, unused, strict=True) if not is_unused]
            message = Message(message.spec, used)
        edge.gradients = message

    def _as_agreed(self, start: Action, message: Message) -> Message:
        """Return gradients as they are agreed by now: more may be expected than when their receive was posted, all absent."""
        agreed, landed = self._specs[self._boundary(start)], (tensor for tensor in message.tensors if tensor is not None)
        return Message(agreed, [None if meta is None else next(landed) for meta in agreed.tensors])

    def _needed(self, start: Action, note: bytes) -> MessageSpec:
        """Agree that more of a stage's input needs a gradient, as a note says; return the new spec."""
        agreed = self._specs[self._boundary(start)]
        after = header.unpack_spec(note, subject := Subject(self._traffic.step, self._plan.other_end(start)[1], start.microbatch))
        if not is_alike(agreed, after) or after != needing(agreed, after):
            raise CommError(f"{subject}: a note says that {after} arrived where {agreed} was expected")
        self._agree_on_more(start, agreed, after)
        return after

    def _noted(self, start: Action, message: Message, note: bytes) -> Message:
        """Read the arrived message as its note describes it."""
        agreed, landed = message
        subject = Subject(self._traffic.step, self._plan.other_end(start)[1], start.microbatch)
        spec, tensors = read_note(subject, agreed, note, landed, self._traffic.transport.device)
        self._specs[self._boundary(start)] = renewed(agreed, spec)
        return Message(spec, tensors)

    def _boundary(self, action: Action) -> Boundary:
        purpose = Purpose.FORWARD if action.op in (Op.SEND_F, Op.RECV_F) else Purpose.BACKWARD
        return purpose, *self._way(action), action.microbatch

    def _post(self, action: Action, state: MicrobatchState, spec: MessageSpec) -> None:
        transport = self._traffic.transport
        edge = self._edge(action, state)
        tensors, views = spec.new(transport.device)
        edge.landing = Message(spec, tensors)
        transfer = transport.receive(
            channel_of(action.op, self._traffic.rank, action.peer), views, may_have_note=action.op is Op.RECV_B or spec.is_open
        )
        edge.transfers[action.op, action.part] = PostedTransfer(transfer)

    def _learn(self, start: Action, state: MicrobatchState) -> None:
        """Read the header of the next message, and post its receive."""
        channel = channel_of(start.op, self._traffic.rank, start.peer)
        data = self._traffic.timed(WAIT_OF[start.op], lambda: self._traffic.transport.receive_header(channel))
        _, before, behind, _ = boundary = self._boundary(start)
        subject = Subject(self._traffic.step, before if start.op is Op.RECV_F else behind, start.microbatch)
        spec = header.unpack_spec(data, subject)
        check_fits(spec.num_bytes, self._traffic.transport.device, subject)
        self._specs[boundary] = spec
        self._post(start, state, spec)


def _taken(edge: EdgeState, op: Op) -> Message:
    """Take the message that waits for a send."""
    if op is Op.SEND_F:
        message, edge.values = edge.values, None
    else:
        message, edge.gradients = edge.gradients, None
    assert message is not None, "a send follows the computation that makes its message"
    return message


def modified(place: object, tensor: torch.Tensor) -> StageError:
    """Return the error about a tensor that was changed in place while it was sent."""
    return StageError(
        f"{place}: a tensor of shape {list(tensor.shape)} was modified in place while it was being sent. Return a clone of a "
        "buffer, parameter or other tensor that the stage or its optimizer changes later."
    )


def _needs_gradient(spec: MessageSpec) -> bool:
    return any(meta is not None and meta.requires_grad for meta in spec.tensors)


def is_alike(one: MessageSpec, other: MessageSpec) -> bool:
    """Return whether two specs of outputs differ at most in which of them need gradients."""
    return one.tree == other.tree and [m and m.extent for m in one.tensors] == [m and m.extent for m in other.tensors]


def _needs_now(state: MicrobatchState) -> StageError:
    return StageError(
        f"{state}: an output needs a gradient, but in an earlier step with the same "
        "input shapes the stage had no trainable parameters, or the output was an input or buffer passed through. Register "
        "trained tensors as Parameters of the stage's module, and return a clone of a tensor that is passed through in some steps."
    )


def texts_of(one: MessageSpec, other: MessageSpec) -> list[str]:
    """Write two specs that differ, with strides if nothing else shows it."""
    texts = [str(one), str(other)]
    if texts[0] != texts[1]:
        return texts
    return [f"{spec}, strides {[meta.stride for meta in spec.tensors if meta]}" for spec in (one, other)]


def _changed(action: Action, state: MicrobatchState, agreed: MessageSpec, spec: MessageSpec) -> StageError:
    what = "output" if action.op is Op.SEND_F else "gradient of the input"
    before, now = texts_of(agreed, spec)
    return StageError(
        f"{state}: the {what} changed although this step's inputs look like "
        f"an earlier step's: agreed {before}, got {now}. Shapes must depend only on the shapes of the inputs: "
        "send data of varying size as a tensor of fixed shape with a mask or a length, and make it contiguous if strides vary."
    )
