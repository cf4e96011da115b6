"""Sends and receives between stages: what is agreed about each message, and what is checked before it leaves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, MutableMapping

import torch

from bpipe.comm.wire import header
from bpipe.comm.wire.message import Layout, on_the_wire
from bpipe.comm.wire.note import can_tell, needing, read_note, renewed, with_more, with_note
from bpipe.engine.traffic import Mail, Traffic, versions_of
from bpipe.errors import CommError, StageError
from bpipe.plan.action import START_OF, WAIT_OF
from bpipe.schedules import Action, Channel, Op, Purpose

__all__: list[str] = []

USE = {Op.RECV_F: Op.F, Op.RECV_B: Op.B}  # of what arrives
BOUNDARY = {  # what crosses it, and how far the stage before it is from the one that acts
    Op.SEND_F: (Purpose.FORWARD, 0),
    Op.RECV_F: (Purpose.FORWARD, 1),
    Op.SEND_B: (Purpose.BACKWARD, 1),
    Op.RECV_B: (Purpose.BACKWARD, 0),
}
Layouts = MutableMapping[tuple[Purpose, int, int], Layout]  # by purpose, stage before the boundary, microbatch


class Messages:
    """The messages between the stages of one rank and their neighbours, during one step.

    The first step with new input shapes learns the layouts, from headers that travel before the tensors; from then on
    receives are posted ahead, and senders check that nothing changed. Headers are read in the order of the plan's receives on
    their channel, whichever is completed first; where only the device waits, at the receive.

    What may change without a new layout: an output that is agreed to need a gradient may need none, and what comes back for it
    is dropped; one that is agreed to need none may need one, and a gradient may be absent, or there, or lie otherwise, of which
    notes tell (`bpipe.comm.wire.note`).

    Args:
        traffic: this rank's transfers.
        layouts: what is agreed, or empty and to be filled when `is_learning`.
        trainable: the stages on this rank that have something to train, if there is a backward.
    """

    def __init__(self, traffic: Traffic, layouts: Layouts, *, is_learning: bool, trainable: Container[int] = ()) -> None:
        self._traffic, self._layouts, self._is_learning, self._trainable = traffic, layouts, is_learning, trainable
        self._dropped: dict[tuple[int, int], list[bool]] = {}  # which gradients of a microbatch's outputs its stage has no use for
        self._versions: dict[tuple[Op, int, int], list[tuple[torch.Tensor, int]]] = {}
        self._landing: dict[tuple[Op, int, int], tuple[Layout, list[torch.Tensor | None]]] = {}
        self._unlearned: dict[Channel, deque[Action]] = defaultdict(deque)

    def agreed(self, microbatch: int, stages: Iterable[int]) -> list[Layout | None]:
        """Return the agreed layouts of a microbatch's messages on either side of some stages, once it has run."""
        sides = dict.fromkeys(side for stage in stages for side in (stage - 1, stage))
        return [self._layouts.get((purpose, side, microbatch)) for side in sides for purpose in (Purpose.FORWARD, Purpose.BACKWARD)]

    def send(self, action: Action) -> None:
        layout, tensors = self._traffic.outgoing.pop(action[:3])
        if self._traffic.versions:
            _check_unchanged(action, self._traffic.versions.pop(action[:3]))
        boundary, subject = self._boundary(action), self._traffic.subject(action.stage, action.microbatch)
        data = note = None
        if self._is_learning:
            self._layouts[boundary] = self._announced(action, layout)
            data = header.pack_layout(subject, self._layouts[boundary])
        agreed = self._layouts[boundary]
        may_have_note = action.op is Op.SEND_B or agreed.is_open
        if layout[:2] != agreed[:2]:
            if action.op is Op.SEND_F:
                note = self._changed_needs(action, agreed, layout)
            elif not can_tell(agreed, layout):
                raise _changed(action, agreed, layout)
            else:
                tensors, note = with_note(subject, agreed, layout, tensors, self._traffic.transport.device)
                self._layouts[boundary] = renewed(agreed, layout)
        sent = [tensor for tensor in tensors if tensor is not None]
        views = [on_the_wire(tensor) for tensor in sent]
        self._versions[action[:3]] = versions_of(sent)
        owners = [*sent, *(view for view, tensor in zip(views, sent) if view is not tensor)]
        transfer = self._traffic.transport.send(self._traffic.channel(action), views, data, note, may_have_note=may_have_note)
        self._traffic.posted(action, transfer, owners)

    def _announced(self, action: Action, layout: Layout) -> Layout:
        """Return the layout to agree on for a message that is sent for the first time.

        If something trainable leads to an output that needs no gradient now, it may have been skipped, and may run the next time.
        """
        return layout._replace(is_open=layout.is_open and self._could_need_gradient(action.stage, action.microbatch))

    def _could_need_gradient(self, stage: int, microbatch: int) -> bool:
        """Return whether a stage's output could need a gradient: it has something to train, or gets what needs one."""
        while stage >= 0:
            received = self._layouts.get((Purpose.FORWARD, stage - 1, microbatch))
            if stage in self._trainable:
                return True
            if received is not None:
                return received.is_open or _needs_gradient(received)
            stage -= 1  # which is on this rank, too
        return False

    def _changed_needs(self, action: Action, agreed: Layout, layout: Layout) -> bytes | None:
        """Agree on outputs that need a gradient for the first time, and remember which gradients to drop; return the note of it.

        Raises:
            StageError: the output differs in something else, or nothing that is known to be trained leads to it.
        """
        if not _is_alike(agreed, layout):
            raise _changed(action, agreed, layout)
        note, after = None, needing(agreed, layout)
        if after != agreed:
            if not agreed.is_open:  # then the other end looks for no note
                raise _needs_now(action)
            self._agree_on_more(action, agreed, after)
            note = header.pack_layout(self._traffic.subject(action.stage, action.microbatch), after)
        pairs = [(one.requires_grad, other.requires_grad) for one, other in zip(after.tensors, layout.tensors) if one and other]
        self._dropped[action[1:3]] = [not needed for expected, needed in pairs if expected]
        return note

    def _agree_on_more(self, action: Action, agreed: Layout, after: Layout) -> None:
        """Expect gradients of more of a stage's outputs, from now on."""
        _, stage, microbatch = boundary = self._boundary(action)
        self._layouts[boundary] = after
        gradients = Purpose.BACKWARD, stage, microbatch
        self._layouts[gradients] = with_more(self._layouts[gradients], agreed, after)

    def complete_send(self, action: Action) -> None:
        self._traffic.wait(action)
        _check_unchanged(action, self._versions.pop((START_OF[action.op], action.stage, action.microbatch)))

    def receive(self, action: Action) -> None:
        if self._is_learning and self._traffic.transport.waits_on_device:
            self._learn(action)  # which is sent at this place of the issue order
        elif self._is_learning:
            self._unlearned[self._traffic.channel(action)].append(action)
        else:
            self._post(action, self._layouts[self._boundary(action)])

    def complete_receive(self, action: Action) -> None:
        start = action._replace(op=START_OF[action.op])
        if self._is_learning:
            unlearned = self._unlearned[self._traffic.channel(start)]
            while start in unlearned:
                self._learn(unlearned.popleft())
        note = self._traffic.wait(action)
        mail = self._landing.pop(start[:3])
        dropped = self._dropped.pop(start[1:3], None) if start.op is Op.RECV_B else None
        if dropped is not None:
            mail = self._as_agreed(start, mail)
        if note is not None and start.op is Op.RECV_F:
            mail = self._needed(start, note), mail[1]
        elif note is not None:
            mail = self._noted(start, mail, note)
        if dropped:
            mail = mail[0], [tensor for tensor, is_dropped in zip(mail[1], dropped, strict=True) if not is_dropped]
        self._traffic.arrived[USE[start.op], start.stage, start.microbatch] = mail

    def _as_agreed(self, start: Action, mail: Mail) -> Mail:
        """Return gradients as they are agreed by now: more may be expected than when their receive was posted, all absent."""
        agreed, landed = self._layouts[self._boundary(start)], (tensor for tensor in mail[1] if tensor is not None)
        return agreed, [None if meta is None else next(landed) for meta in agreed.tensors]

    def _needed(self, start: Action, note: bytes) -> Layout:
        """Agree that more of a stage's input needs a gradient, as a note says; return the new layout."""
        agreed = self._layouts[self._boundary(start)]
        after = header.unpack_layout(note, subject := self._traffic.subject(start.stage - 1, start.microbatch))
        if not _is_alike(agreed, after) or after != needing(agreed, after):
            raise CommError(f"{subject}: a note says that {after} arrived where {agreed} was expected")
        self._agree_on_more(start, agreed, after)
        return after

    def _noted(self, start: Action, mail: Mail, note: bytes) -> Mail:
        """Read what arrived, as its note describes it."""
        agreed, landed = mail
        subject = self._traffic.subject(start.stage + 1, start.microbatch)
        layout, tensors = read_note(subject, agreed, note, landed, self._traffic.transport.device)
        self._layouts[self._boundary(start)] = renewed(agreed, layout)
        return layout, tensors

    def _boundary(self, action: Action) -> tuple[Purpose, int, int]:
        purpose, offset = BOUNDARY[action.op]
        return purpose, action.stage - offset, action.microbatch

    def _post(self, action: Action, layout: Layout) -> None:
        transport = self._traffic.transport
        tensors = [None if meta is None else meta.new(transport.device) for meta in layout.tensors]
        views = [on_the_wire(tensor) for tensor in tensors if tensor is not None]
        self._landing[action[:3]] = (layout, tensors)
        transfer = transport.receive(self._traffic.channel(action), views, may_have_note=action.op is Op.RECV_B or layout.is_open)
        self._traffic.posted(action, transfer)

    def _learn(self, start: Action) -> None:
        """Read the header that says what is about to come, and post its receive."""
        channel = self._traffic.channel(start)
        data = self._traffic.timed(WAIT_OF[start.op], lambda: self._traffic.transport.receive_header(channel))
        sender = start.stage + (-1 if start.op is Op.RECV_F else 1)
        layout = header.unpack_layout(data, self._traffic.subject(sender, start.microbatch))
        self._layouts[self._boundary(start)] = layout
        self._post(start, layout)


def _check_unchanged(action: Action, versions: Iterable[tuple[torch.Tensor, int]]) -> None:
    for tensor, version in versions:
        if tensor._version != version:
            raise StageError(
                f"stage {action.stage}, microbatch {action.microbatch}: an output of shape {list(tensor.shape)} was modified "
                "in place while it was being sent. Return a clone of what the stage goes on changing."
            )


def _needs_gradient(layout: Layout) -> bool:
    return any(meta is not None and meta.requires_grad for meta in layout.tensors)


def _is_alike(one: Layout, other: Layout) -> bool:
    """Return whether two layouts of outputs differ only in which of them need gradients, if at all."""
    return one.nest == other.nest and [m and m.extent for m in one.tensors] == [m and m.extent for m in other.tensors]


def _needs_now(action: Action) -> StageError:
    return StageError(
        f"stage {action.stage}, microbatch {action.microbatch}: an output needs a gradient, and although this step's inputs look "
        "like an earlier step's, there was nothing to train there, or it was an input or buffer that the stage handed on. Register "
        "what is trained as a Parameter of the stage's module, and return a clone of what is handed on only now and then."
    )


def _changed(action: Action, agreed: Layout, layout: Layout) -> StageError:
    what = "output" if action.op is Op.SEND_F else "gradient of the input"
    texts = [str(agreed), str(layout)]
    if texts[0] == texts[1]:
        texts = [f"{one}, strides {[meta.stride for meta in one.tensors if meta]}" for one in (agreed, layout)]
    return StageError(
        f"stage {action.stage}, microbatch {action.microbatch}: the {what} changed although this step's inputs look like "
        f"an earlier step's: agreed {texts[0]}, got {texts[1]}. Shapes must follow from the shapes of the inputs; "
        "send what varies as a tensor of fixed shape, with a mask or a length, and contiguous where strides vary."
    )
