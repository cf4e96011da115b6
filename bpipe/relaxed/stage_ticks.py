"""The ticks of one stage of a stream. The user's code runs here, in the caller's thread.

tick        0     1     2     3     4      5
stage 0     F0    F1    F2    F3    F4 B4  F5 B5        Fk: forward of sample k
stage 1           F0    F1    F2 B2 F3 B3  F4 B4        Bk: backward of sample k, with a gradient of sample k-2
stage 2                 F0 B0 F1 B1 F2 B2  F3 B3        (the last stage: with its own loss)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress
from typing import Any, Protocol

import torch

from bpipe.backward.autograd import Graph, InputGrads, edges_of, enter
from bpipe.backward.new_gradients import apart, owned
from bpipe.backward.without_loss import check_loss, checked_loss, cut_off
from bpipe.comm.transport.base import Transport
from bpipe.comm.wire.message import MessageSpec, TensorMeta, all_dense, dense, flatten_message, meta_of, metas_of, unflatten_message
from bpipe.engine.messages import is_alike, texts_of
from bpipe.errors import AgreementError, CommError, ConfigurationError, StageError
from bpipe.memory.saved.storages import keys_of
from bpipe.model import microbatch as mb
from bpipe.model.call import Loss
from bpipe.model.pytree import mapped
from bpipe.model.stage import PipelineStage, find_mesh, in_context
from bpipe.relaxed.tick_messages import Call, Content, Incoming, Outgoing
from bpipe.schedules import Op, Plan, Purpose

__all__: list[str] = []

# Where a rank stands in the plan of a tick while a message arrives; and until one has left, and as the next one leaves.
ARRIVES = {Purpose.FORWARD: Op.WAIT_RECV_F, Purpose.BACKWARD: Op.WAIT_RECV_B}
LEAVES = {Purpose.FORWARD: (Op.WAIT_SEND_F, Op.SEND_F), Purpose.BACKWARD: (Op.WAIT_SEND_B, Op.SEND_B)}


class Steps(Protocol):
    """What a stream needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


@dataclass(slots=True)
class _Sample:
    """A sample at the stage, and what the stage's forward has made of it."""

    args: tuple[Any, ...]  # of the module
    metas: Sequence[TensorMeta] = ()  # of the tensors that another stage has sent and that can have a gradient
    needed: Sequence[bool] = ()  # which of these need one
    input_grads: InputGrads = field(default_factory=InputGrads)  # collects the gradients that are needed
    output: Any = None  # of the module
    tensors: Sequence[torch.Tensor] = ()  # those for which gradients come: of the output, or the loss
    content: Content | None = None  # the message to the next stage; None on the last stage


class StageTicks:
    """The ticks of one stage.

    Args:
        optimizers: step after each backward; none if nothing does, and gradients add up.
        plan: of a tick, whose actions say where this rank is.
    """

    def __init__(
        self,
        stage: PipelineStage,
        loss_fn: Loss,
        optimizers: Sequence[Steps],
        plan: Plan,
        transport: Transport,
    ) -> None:
        self.loss: torch.Tensor | None = None
        self._stage, self._loss_fn, self._optimizers, self._plan, self._transport = stage, loss_fn, optimizers, plan, transport
        self._places = {action.op: place for place, action in enumerate(plan.actions[stage.stage_index])}
        self._group_ranks: list[int] = []
        self._incoming: dict[Purpose, Incoming] = {}  # this rank's ends of its channels
        self._outgoing: dict[Purpose, Outgoing] = {}
        self._targets = deque[Any]([None] * (stage.num_stages - 1))  # of the samples on their way to the last stage
        self._before: Call | None = None  # the latest tick's; None at the start of a stream
        self._kept: Content | None = None  # the gradients that arrived since the latest tick that learned
        self._needed: Sequence[bool] | None = None  # which outputs need a gradient, as in the latest tick that learned

    @property
    def is_connected(self) -> bool:
        """Whether the channels are open."""
        return bool(self._group_ranks)

    def connect(self, group_ranks: list[int]) -> None:
        """Open the channels between stages, each of which is on a rank of the group. Collective."""
        own, transport, channels = self._stage.stage_index, self._transport, self._plan.channels()
        transport.connect(channels, group_ranks)
        self._outgoing = {one.purpose: Outgoing(transport, one, own) for one in channels if one.src == own}
        receives = (one for one in channels if one.dst == own)
        self._incoming = {one.purpose: Incoming(transport, one, group_ranks[one.src], one.src) for one in receives}
        self._group_ranks = group_ranks

    def begin(self, tick: int) -> None:
        """Say that a tick begins, for the reports of all ranks."""
        activity = self._transport.control.activity
        activity.begin(self._plan, self._stage.stage_index, tick, self._group_ranks)
        activity.unit = f"tick {tick}"

    def run(self, call: Call, args: tuple[Any, ...], target: Any) -> list[Any]:
        """Run a tick: one forward, one backward and one step of the optimizer, where there is what they need.

        Returns:
            The output that comes out, as the only entry; nothing elsewhere than on the last stage, or if no sample is there yet.

        Raises:
            ConfigurationError: what the tick needs is missing.
        """
        self._at(Op.F)  # for errors
        if call.learns and not torch.is_grad_enabled():
            raise ConfigurationError(
                f"{'drain' if call.drains else 'push'}() learns, but gradients are disabled here (torch.no_grad or "
                "torch.inference_mode): give learn=False"
            )
        with torch.inference_mode(False):  # messages' memory is used in later ticks, which may learn
            return self._run(call, args, target)

    def _run(self, call: Call, args: tuple[Any, ...], target: Any) -> list[Any]:
        if self._stage.is_last:
            target = self._target_of_present(call, target)
        self.loss = None
        sample = self._sample(call, args)
        if sample is not None:
            self._forward(call, sample, target)
            if any(sample.needed) and sample.content is not None and not any(sample.content.marks):
                raise cut_off(f"stage {self._stage.stage_index}, tick {call.tick}")
        self._send(Purpose.FORWARD, call, None if sample is None else sample.content)
        gradients = self._gradients(call, sample)
        has_learned = sample is not None and self._backward(sample, gradients)
        self._send(Purpose.BACKWARD, call, None if sample is None else self._input_gradients(sample))
        if has_learned and self._optimizers:
            self._at(Op.B)
            for optimizer in self._optimizers:
                optimizer.step()
        self._before = call
        return [mb.detached(sample.output)] if sample is not None and self._stage.is_last else []

    def finish(self) -> None:
        """End the stream: take what was sent in the latest tick, so that no message is left. Blocks until neighbours are there.

        Raises:
            AgreementError: the ranks made different calls. The other messages are waited for first, so that all ranks see it.
        """
        waits: list[tuple[Op, Callable[[], object]]] = [
            (op, partial(self._take, purpose, is_last=True)) for purpose, op in ARRIVES.items() if purpose in self._incoming
        ]
        waits += [(LEAVES[purpose][0], self._outgoing[purpose].finish) for purpose in LEAVES if purpose in self._outgoing]
        differs: tuple[Op, AgreementError] | None = None
        for op, wait in waits:
            self._at(op)
            try:
                with torch.inference_mode(False):
                    wait()
            except AgreementError as error:
                differs = differs or (op, error)
            except (CommError, StageError):
                if differs is None:
                    raise
        self._before = self._kept = self._needed = None
        if differs is not None:
            self._at(differs[0])
            raise differs[1]

    def _target_of_present(self, call: Call, target: Any) -> Any:
        """Keep the target of a new sample until it is here; return that of the present sample."""
        check_loss(self._loss_fn, "push()", target=target)
        if call.learns and not call.drains and target is None:
            raise ConfigurationError("push() got no target on the last stage: give target= with each sample, or learn=False")
        if self._targets:
            target = mapped(lambda one: one.detach().clone(), target)  # the caller may use its memory for the next one
        self._targets.append(None if call.drains else target)
        return self._targets.popleft()

    def _sample(self, call: Call, args: tuple[Any, ...]) -> _Sample | None:
        """Return the sample that is at this stage in this tick; None if there is none."""
        if self._stage.is_first:
            if not args and not call.drains:
                raise ConfigurationError("push() got no input on the first stage: give one, or drain() the stream")
            if any(one.is_inference() for one in mb.tensors_in(args)):  # which could neither be saved nor changed here
                args = mapped(lambda one: one.clone() if one.is_inference() else one, args)
            return None if call.drains else _Sample(args)
        arrived = self._take(Purpose.FORWARD)
        if arrived is None:
            return None
        metas = [meta for meta in arrived.spec.tensors if meta is not None]
        needed = [mark and call.learns and meta.is_differentiable for mark, meta in zip(arrived.marks, metas)]
        received, input_grads = enter([one for one in arrived.tensors if one is not None], needed)
        value = unflatten_message(arrived.spec.tree, received, partial(find_mesh, self._stage))
        can_need = [meta.is_differentiable for meta in metas]
        return _Sample(
            tuple(value) if isinstance(value, (tuple, list)) else (value,),
            list(compress(metas, can_need)),
            list(compress(needed, can_need)),
            input_grads,
        )

    def _forward(self, call: Call, sample: _Sample, target: Any) -> None:
        self._at(Op.F)
        with torch.set_grad_enabled(call.learns):
            index = call.tick - self._stage.stage_index  # of the tick in which the sample was given
            module = in_context(self._stage, index) if self._stage.forward_contexts else self._stage.submod
            sample.output = module(*sample.args)
            if not self._stage.is_last:
                self._take_apart(call, sample)
            elif call.learns and target is not None and self._loss_fn is not None:
                loss = checked_loss(self._loss_fn(sample.output, target), f"tick {call.tick}", trains=True)
                sample.tensors = [loss]
                self.loss = loss.detach().clone()  # which keeps nothing else alive

    def _take_apart(self, call: Call, sample: _Sample) -> None:
        """Take a sample's output apart for its message.

        What it was made from are the caller's tensors on the first stage, whose memory may be used for the next sample.

        Raises:
            StageError: it cannot be sent, or it looks different from the samples before.
        """
        place = f"stage {self._stage.stage_index}, tick {call.tick}"
        tree, tensors = flatten_message(sample.output, place)
        callers = keys_of(mb.tensors_in(sample.args)) if self._stage.is_first else set()
        sent = all_dense([one if callers.isdisjoint(keys_of([one])) else one.clone() for one in tensors])
        spec = MessageSpec(tree, metas_of(sent, tensors))
        agreed = self._outgoing[Purpose.FORWARD].spec
        if agreed is not None and not is_alike(agreed, spec):
            before, now = texts_of(agreed, spec)
            raise StageError(
                f"{place}: the output changed within a stream: it was {before}, and is {now}. drain() the stream before "
                "samples of another shape, send data of varying size as a tensor of fixed shape with a mask or a length, or return "
                ".contiguous() if strides vary."
            )
        if call.learns:
            self._needed = [tensor.requires_grad for tensor in tensors]
        sample.content = Content(spec, sent, self._needed or [False] * len(tensors))  # the next tick may learn, though not this one
        sample.tensors = [tensor for tensor, meta in zip(tensors, spec.tensors) if meta and meta.is_differentiable]

    def _gradients(self, call: Call, sample: _Sample | None) -> list[torch.Tensor | None]:
        """Return the gradients of what the present forward has made: for its output those that the next stage has sent.

        A tick that does not learn keeps them for the next one that does: none arrive there, because none were made in between.
        """
        if self._stage.is_last:
            return [] if sample is None else [torch.ones_like(loss) for loss in sample.tensors]
        arrived = self._take(Purpose.BACKWARD) or self._kept
        self._kept = None if call.learns else arrived
        if sample is None or arrived is None or not call.learns:
            return []
        each = zip(arrived.tensors, arrived.marks, sample.tensors, strict=True)
        return [gradient if is_there and tensor.requires_grad else None for gradient, is_there, tensor in each]

    def _backward(self, sample: _Sample, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Run the graph of the present sample, if there is a gradient to run it with; return whether there is."""
        if all(gradient is None for gradient in gradients):
            return False
        self._at(Op.B)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        without = [one for one in self._stage.submod.parameters() if one.requires_grad and one.grad is None]
        arriving = [gradient for gradient, tensor in zip(gradients, sample.tensors) if tensor.requires_grad]
        Graph(edges_of(sample.tensors), sample.input_grads, has_common_hooks=True).run_backward(arriving)
        apart([parameter for parameter in without if parameter.grad is not None])
        return True

    def _input_gradients(self, sample: _Sample) -> Content | None:
        """Return the message with the gradients of the present input; None if there are none."""
        found = iter(owned(sample.input_grads.gradients))
        gradients = [next(found) if is_needed else None for is_needed in sample.needed]
        if all(gradient is None for gradient in gradients):
            return None
        end = self._outgoing[Purpose.BACKWARD]
        sent = [None if gradient is None else dense(gradient) for gradient in gradients]
        metas = [meta if one is None else meta_of(one, requires_grad=False) for one, meta in zip(sent, sample.metas)]
        spec = end.spec or MessageSpec("", tuple(metas))
        fitted = [one if one is None or meta is None else _fitted(one, meta) for one, meta in zip(sent, spec.tensors, strict=True)]
        return Content(spec, fitted, [one is not None for one in sent])

    def _take(self, purpose: Purpose, *, is_last: bool = False) -> Content | None:
        """Take what was sent in the tick before, if there is a channel, and was one in this stream."""
        if purpose not in self._incoming or self._before is None:
            return None
        self._at(ARRIVES[purpose])
        return self._incoming[purpose].take(self._before, is_last=is_last)

    def _send(self, purpose: Purpose, call: Call, content: Content | None) -> None:
        """Send a message, if there is a channel, as soon as the one of the tick before is sent."""
        if purpose in self._outgoing:
            completes, starts = LEAVES[purpose]
            self._at(completes)
            self._outgoing[purpose].complete()
            self._at(starts)
            self._outgoing[purpose].send(call, content)

    def _at(self, op: Op) -> None:
        self._transport.control.activity.position = self._places[op]


def _fitted(gradient: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return a gradient with the strides that were agreed on."""
    if meta_of(gradient, requires_grad=False).extent == meta.extent:
        return gradient
    return meta.new(gradient.device).copy_(gradient)
