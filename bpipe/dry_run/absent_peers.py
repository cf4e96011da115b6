"""What ranks that do not exist would announce in a step: the layouts of their outputs and gradients, and their evictions' sizes."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from bpipe.comm.wire import header
from bpipe.comm.wire.header import Subject
from bpipe.comm.wire.message import ONE_TENSOR, MessageSpec, TensorMeta
from bpipe.plan.action import channel_of
from bpipe.schedules import Action, Channel, Op, Plan, Purpose

__all__: list[str] = []

HEARD = (Op.SEND_F, Op.RECV_F, Op.RECV_B, Op.ACCEPT)


class AbsentPeers:
    """The announcements of one rank's neighbours in one step, in the order in which the rank's plan reads them.

    A stage's input is as its example says, and needs a gradient if the step has a backward. The gradient of an output is like the
    output. An evicted microbatch takes the bytes that the plan counts for it, or `evicted_bytes` where the plan counts slots.

    Args:
        plan: the step's.
        rank: this rank's number in it.
        step: the step's number.
        inputs: for each stage that receives its input, the shapes and dtypes of the tensors.
        evicted_bytes: of a microbatch that another rank evicts to this one.
    """

    def __init__(
        self, plan: Plan, rank: int, step: int, inputs: Mapping[int, Sequence[TensorMeta]], evicted_bytes: int = 0
    ) -> None:
        self._plan, self._step, self._inputs, self._evicted_bytes = plan, step, inputs, evicted_bytes
        self._expected: dict[tuple[Op, Channel], deque[Action]] = defaultdict(deque)
        for action in (*plan.actions[rank], *plan.served[rank]):
            if action.op in HEARD:
                self._expected[action.op, channel_of(action.op, rank, action.peer)].append(action)
        self._awaited: list[tuple[Action, MessageSpec]] = []  # the sends of outputs, and the layout of the gradients that come back

    def hear(self, channel: Channel, data: bytes) -> None:
        """Take note of an output that is sent, because its gradient comes back."""
        if channel.purpose is not Purpose.FORWARD:
            return
        action = self._expected[Op.SEND_F, channel].popleft()
        sent = header.unpack_spec(data, self._subject(action, 0))
        needed = [one._replace(requires_grad=False) for one in sent.tensors if one is not None and one.requires_grad]
        self._awaited.append((action, MessageSpec("", tuple(needed))))

    def announce(self, channel: Channel) -> bytes:
        """Return the next header of a channel."""
        for (op, of), actions in self._expected.items():
            if of == channel and op is not Op.SEND_F and actions:
                return self._header(actions.popleft())
        raise AssertionError(f"{channel}: the plan has no further message")

    def _header(self, action: Action) -> bytes:
        if action.op is Op.ACCEPT:
            moved = self._evicted_bytes if self._plan.sizes is None else self._plan.sizes.moved(action)
            return header.pack_eviction(self._subject(action, 0), action.part, [moved])
        if action.op is Op.RECV_F:
            return header.pack_spec(self._subject(action, -1), self._input(self._inputs[action.stage]))
        place = next(i for i, (sent, _) in enumerate(self._awaited) if sent[1:3] == action[1:3])
        return header.pack_spec(self._subject(action, 1), self._awaited.pop(place)[1])

    def _subject(self, action: Action, offset: int) -> Subject:
        return Subject(self._step, action.stage + offset, action.microbatch)

    def _input(self, inputs: Sequence[TensorMeta]) -> MessageSpec:
        tensors = [one._replace(requires_grad=self._plan.has_backward and one.is_differentiable) for one in inputs]
        return MessageSpec(ONE_TENSOR if len(tensors) == 1 else json.dumps({"tuple": ["T"] * len(tensors)}), tuple(tensors))
