"""Sends and receives between stages: what is agreed about each message, and what is checked before it leaves."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, MutableMapping

import torch

from bpipe.comm import header
from bpipe.comm.message import Layout, on_the_wire
from bpipe.errors import StageError
from bpipe.runtime.traffic import Traffic
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

    Args:
        traffic: this rank's transfers.
        layouts: what is agreed, or empty and to be filled when `is_learning`.
    """

    def __init__(self, traffic: Traffic, layouts: Layouts, *, is_learning: bool) -> None:
        self._traffic, self._layouts, self._is_learning = traffic, layouts, is_learning
        self._versions: dict[tuple[Op, int, int], list[tuple[torch.Tensor, int]]] = {}
        self._landing: dict[tuple[Op, int, int], tuple[Layout, list[torch.Tensor | None]]] = {}
        self._unlearned: dict[Channel, deque[Action]] = defaultdict(deque)

    def agreed(self, microbatch: int, stages: Iterable[int]) -> list[Layout | None]:
        """The messages of a microbatch on either side of some stages, once it has run."""
        sides = dict.fromkeys(side for stage in stages for side in (stage - 1, stage))
        return [self._layouts.get((purpose, side, microbatch)) for side in sides for purpose in (Purpose.FORWARD, Purpose.BACKWARD)]

    def send(self, action: Action) -> None:
        layout, tensors = self._traffic.outgoing.pop(action[:3])
        boundary = self._boundary(action)
        data = None
        if self._is_learning:
            self._layouts[boundary] = layout
            data = header.pack_layout(self._traffic.subject(action.stage, action.microbatch), layout)
        elif layout != self._layouts[boundary]:
            raise _changed(action, self._layouts[boundary], layout)
        sent = [tensor for tensor in tensors if tensor is not None]
        views = [on_the_wire(tensor) for tensor in sent]
        self._versions[action[:3]] = [(t, t._version) for t in sent if not t.is_inference()]
        owners = [*sent, *(view for view, tensor in zip(views, sent) if view is not tensor)]
        self._traffic.posted(action, self._traffic.transport.send(self._traffic.channel(action), views, data), owners)

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
        op, stage, microbatch = START_OF[action.op], action.stage, action.microbatch
        if self._is_learning:
            start = action._replace(op=op)
            unlearned = self._unlearned[self._traffic.channel(start)]
            while start in unlearned:
                self._learn(unlearned.popleft())
        self._traffic.wait(action)
        self._traffic.arrived[USE[op], stage, microbatch] = self._landing.pop((op, stage, microbatch))

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


def _changed(action: Action, agreed: Layout, layout: Layout) -> StageError:
    what = "output" if action.op is Op.SEND_F else "gradient of the input"
    return StageError(
        f"stage {action.stage}, microbatch {action.microbatch}: the {what} changed although this step's inputs look like "
        f"an earlier step's: agreed {agreed}, got {layout}. Shapes must follow from the shapes of the inputs; "
        "send what varies as a tensor of fixed shape, with a mask or a length."
    )
