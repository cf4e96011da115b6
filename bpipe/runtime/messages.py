"""Sends and receives between stages: what is agreed about each message, and what is checked before it leaves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Container, Iterable, MutableMapping

import torch

from bpipe.comm import header
from bpipe.comm.message import Layout, on_the_wire
from bpipe.comm.note import can_tell, read_note, renewed, with_note
from bpipe.errors import StageError
from bpipe.runtime.traffic import Mail, Traffic
from bpipe.schedules import Action, Channel, Op, Purpose
from bpipe.schedules.action import START_OF, WAIT_OF

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
    their channel, whichever is completed first.

    What may change without a new layout: an output that is agreed to need a gradient may need none, and what comes back for it
    is dropped; and a gradient may be absent, or there, or lie otherwise, of which a note tells (`bpipe.comm.note`).

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
        """The messages of a microbatch on either side of some stages, once it has run."""
        sides = dict.fromkeys(side for stage in stages for side in (stage - 1, stage))
        return [self._layouts.get((purpose, side, microbatch)) for side in sides for purpose in (Purpose.FORWARD, Purpose.BACKWARD)]

    def send(self, action: Action) -> None:
        layout, tensors = self._traffic.outgoing.pop(action[:3])
        boundary, subject = self._boundary(action), self._traffic.subject(action.stage, action.microbatch)
        data = note = None
        if self._is_learning:
            self._layouts[boundary] = self._announced(action, layout)
            data = header.pack_layout(subject, self._layouts[boundary])
        agreed = self._layouts[boundary]
        if layout != agreed:
            if action.op is Op.SEND_F:
                self._check_output(action, agreed, layout)
            elif not can_tell(agreed, layout):
                raise _changed(action, agreed, layout)
            else:
                tensors, note = with_note(subject, agreed, layout, tensors, self._traffic.transport.device)
                self._layouts[boundary] = renewed(agreed, layout)
        sent = [tensor for tensor in tensors if tensor is not None]
        views = [on_the_wire(tensor) for tensor in sent]
        self._versions[action[:3]] = [(t, t._version) for t in sent if not t.is_inference()]
        owners = [*sent, *(view for view, tensor in zip(views, sent) if view is not tensor)]
        self._traffic.posted(action, self._traffic.transport.send(self._traffic.channel(action), views, data, note), owners)

    def _announced(self, action: Action, layout: Layout) -> Layout:
        """What to agree on for a message that is sent the first time.

        Where nothing that a stage returns for a microbatch needs a gradient, though it has something to train, it was skipped
        perhaps, and is not the next time. What needs a gradient then is taken from another microbatch, else it is all that can.
        """
        stage, microbatch = action.stage, action.microbatch
        if action.op is Op.SEND_B or _needs_gradient(layout) or not self._could_need_gradient(stage, microbatch):
            return layout
        others = (one for (purpose, of, _), one in self._layouts.items() if (purpose, of) == (Purpose.FORWARD, stage))
        example = next((one for one in others if _needs_gradient(one) and _is_alike(one, layout)), None)
        all_that_can = (meta and meta._replace(requires_grad=meta.is_differentiable) for meta in layout.tensors)
        return example or layout._replace(tensors=tuple(all_that_can))

    def _could_need_gradient(self, stage: int, microbatch: int) -> bool:
        """Whether a stage's output could need a gradient: it has something to train, or gets what needs one."""
        while stage >= 0:
            received = self._layouts.get((Purpose.FORWARD, stage - 1, microbatch))
            if stage in self._trainable:
                return True
            if received is not None:
                return _needs_gradient(received)
            stage -= 1  # which is on this rank, too
        return False

    def _check_output(self, action: Action, agreed: Layout, layout: Layout) -> None:
        """Remember which gradients to drop of an output that is not as agreed.

        Raises:
            StageError: it cannot be sent as if it were.
        """
        if not _is_alike(agreed, layout):
            raise _changed(action, agreed, layout)
        pairs = [(one.requires_grad, other.requires_grad) for one, other in zip(agreed.tensors, layout.tensors) if one and other]
        if (False, True) in pairs:
            raise _needs_now(action, pairs.index((False, True)))
        self._dropped[action[1:3]] = [not needed for expected, needed in pairs if expected]

    def complete_send(self, action: Action) -> None:
        self._traffic.wait(action)
        for tensor, version in self._versions.pop((START_OF[action.op], action.stage, action.microbatch)):
            if tensor._version != version:
                raise StageError(
                    f"stage {action.stage}, microbatch {action.microbatch}: an output of shape {list(tensor.shape)} was modified "
                    "in place while it was being sent. Return a clone of what the stage goes on changing."
                )

    def receive(self, action: Action) -> None:
        if self._is_learning:
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
        if note is not None:
            mail = self._noted(start, mail, note)
        dropped = self._dropped.pop(start[1:3], None) if start.op is Op.RECV_B else None
        if dropped:
            mail = mail[0], [tensor for tensor, is_dropped in zip(mail[1], dropped, strict=True) if not is_dropped]
        self._traffic.arrived[USE[start.op], start.stage, start.microbatch] = mail

    def _noted(self, start: Action, mail: Mail, note: bytes) -> Mail:
        """What arrived, as a note tells it."""
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
        self._traffic.posted(action, transport.receive(self._traffic.channel(action), views))

    def _learn(self, start: Action) -> None:
        """Read the header that says what is about to come, and post its receive."""
        channel = self._traffic.channel(start)
        data = self._traffic.timed(WAIT_OF[start.op], lambda: self._traffic.transport.receive_header(channel))
        sender = start.stage + (-1 if start.op is Op.RECV_F else 1)
        layout = header.unpack_layout(data, self._traffic.subject(sender, start.microbatch))
        self._layouts[self._boundary(start)] = layout
        self._post(start, layout)


def _needs_gradient(layout: Layout) -> bool:
    return any(meta is not None and meta.requires_grad for meta in layout.tensors)


def _is_alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts of outputs differ only in which of them need gradients, if at all."""
    return one.nest == other.nest and [m and m.extent for m in one.tensors] == [m and m.extent for m in other.tensors]


def _needs_now(action: Action, index: int) -> StageError:
    return StageError(
        f"stage {action.stage}, microbatch {action.microbatch}: output {index} needs a gradient, and although this step's inputs "
        "look like an earlier step's, it needed none there, while other outputs did. Let it need one each time: where nothing "
        "leads to it, return tensor.detach().requires_grad_()."
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
