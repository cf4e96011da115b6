"""The ticks of one stage of a stream. The user's code runs here, in the caller's thread.

    tick        0     1     2     3     4      5
    stage 0     F0    F1    F2    F3    F4 B4  F5 B5        Fk: forward of sample k
    stage 1           F0    F1    F2 B2 F3 B3  F4 B4        Bk: backward of sample k, with a gradient of sample k-2
    stage 2                 F0 B0 F1 B1 F2 B2  F3 B3        (the last stage: with its own loss)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any, NamedTuple, Protocol

import torch

from bpipe.backward.autograd import Graph, InputGrads, edges_of, enter
from bpipe.backward.new_gradients import apart, owned
from bpipe.comm.transport.base import Transport
from bpipe.comm.wire.message import MessageSpec, TensorMeta, all_dense, dense, flatten_message, meta_of, metas_of, unflatten_message
from bpipe.engine.messages import is_alike
from bpipe.errors import AgreementError, CommError, ConfigurationError, StageError
from bpipe.memory.saved.storages import keys_of
from bpipe.model import microbatch as mb
from bpipe.model.pytree import mapped
from bpipe.model.stage import PipelineStage
from bpipe.relaxed.tick_messages import Call, Content, Incoming, Outgoing
from bpipe.schedules import Op, Plan, Purpose

__all__: list[str] = []


class Steps(Protocol):
    """What a stream needs of an optimizer."""

    def step(self) -> Any: ...

    def zero_grad(self) -> Any: ...


class _Ends(NamedTuple):
    """This rank's ends of its channels: those to neighbours that it has, backward ones if the stream can learn."""

    inputs: Incoming | None = None
    outputs: Outgoing | None = None
    gradients: Incoming | None = None
    input_gradients: Outgoing | None = None


class _Sample(NamedTuple):
    """A sample as it enters the stage.

    Args:
        args: the module's arguments.
        metas: of the tensors that another stage has sent and that can have a gradient.
        needed: which of these need one.
        input_grads: collects the gradients that are needed.
    """

    args: tuple[Any, ...]
    metas: Sequence[TensorMeta]
    needed: Sequence[bool]
    input_grads: InputGrads


class _Made(NamedTuple):
    """What a forward has made.

    Args:
        output: the module's.
        tensors: those for which gradients come: of the output, or the loss.
        content: the message to the next stage; None on the last stage.
    """

    output: Any
    tensors: Sequence[torch.Tensor]
    content: Content | None


class StageTicks:
    """The ticks of one stage.

    Args:
        stage: the stage.
        loss_fn: called as `loss_fn(output, target)` on the last stage.
        optimizer: steps after each backward; None if nothing does, and gradients add up.
        plan: of a tick, whose actions say where this rank is.
        transport: carries its messages.
    """

    def __init__(
        self,
        stage: PipelineStage,
        loss_fn: Callable[..., torch.Tensor] | None,
        optimizer: Steps | None,
        plan: Plan,
        transport: Transport,
    ) -> None:
        self.loss: torch.Tensor | None = None
        self._stage, self._loss_fn, self._optimizer, self._plan, self._transport = stage, loss_fn, optimizer, plan, transport
        self._places = {action.op: place for place, action in enumerate(plan.actions[stage.stage_index])}
        self._group_ranks: list[int] = []
        self._ends = _Ends()
        self._targets = deque[Any]([None] * (stage.num_stages - 1))  # of the samples on their way to the last stage
        self._before: Call | None = None  # the latest tick's; None at the start of a stream

    @property
    def is_connected(self) -> bool:
        """Whether the channels are open."""
        return bool(self._group_ranks)

    def connect(self, group_ranks: list[int]) -> None:
        """Open the channels. Collective.

        Args:
            group_ranks: the rank of the group by stage.
        """
        own, transport, channels = self._stage.stage_index, self._transport, self._plan.channels()
        transport.connect(channels, group_ranks)
        sends = {one.purpose: Outgoing(transport, one, own) for one in channels if one.src == own}
        receives = {one.purpose: Incoming(transport, one, group_ranks[one.src], one.src) for one in channels if one.dst == own}
        forward, backward = Purpose.FORWARD, Purpose.BACKWARD
        self._ends = _Ends(receives.get(forward), sends.get(forward), receives.get(backward), sends.get(backward))
        self._group_ranks = group_ranks

    def begin(self, tick: int) -> None:
        """Say that a tick begins, for the reports of all ranks."""
        activity = self._transport.control.activity
        activity.begin(self._plan, self._stage.stage_index, tick, self._group_ranks)
        activity.unit = f"tick {tick}"

    def run(self, call: Call, args: tuple[Any, ...], target: Any) -> list[Any]:
        """Run a tick: one forward, one backward and one step of the optimizer, where there is what they need.

        Args:
            call: what all ranks are called for.
            args: of a new sample, on the first stage.
            target: of a new sample, on the last stage.

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
        made = None if sample is None else self._forward(call, sample.args, target)
        self._send(self._ends.outputs, call, None if made is None else made.content, Op.WAIT_SEND_F, Op.SEND_F)
        gradients = self._gradients(made)
        has_learned = sample is not None and made is not None and self._backward(sample, made, gradients)
        self._send(self._ends.input_gradients, call, self._input_gradients(sample), Op.WAIT_SEND_B, Op.SEND_B)
        if has_learned and self._optimizer is not None:
            self._at(Op.B)
            self._optimizer.step()
        self._before = call
        return [mb.detached(made.output)] if made is not None and self._stage.is_last else []

    def finish(self) -> None:
        """End the stream: take what was sent in the latest tick, so that no message is left. Blocks until neighbours are there.

        Raises:
            AgreementError: the ranks made different calls. The other messages are waited for first, so that all ranks see it.
        """
        waits: list[tuple[Op, Callable[[], object]]] = [
            (Op.WAIT_RECV_F, partial(self._take, self._ends.inputs, Op.WAIT_RECV_F, is_last=True)),
            (Op.WAIT_RECV_B, partial(self._take, self._ends.gradients, Op.WAIT_RECV_B, is_last=True)),
        ]
        sends = (self._ends.outputs, Op.WAIT_SEND_F), (self._ends.input_gradients, Op.WAIT_SEND_B)
        waits += [(op, sent.finish) for sent, op in sends if sent is not None]
        differs: tuple[Op, AgreementError] | None = None
        for op, wait in waits:
            if op in self._places:
                self._at(op)
            try:
                with torch.inference_mode(False):
                    wait()
            except (CommError, StageError) as error:
                if isinstance(error, AgreementError):
                    differs = differs or (op, error)
                elif differs is None:
                    raise
        self._before = None
        if differs is not None:
            self._at(differs[0])
            raise differs[1]

    def _target_of_present(self, call: Call, target: Any) -> Any:
        """Keep the target of a new sample until it is here; return that of the present sample."""
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
            return None if call.drains else _Sample(args, (), (), InputGrads())
        arrived = self._take(self._ends.inputs, Op.WAIT_RECV_F)
        if arrived is None:
            return None
        metas = [meta for meta in arrived.spec.tensors if meta is not None]
        needed = [mark and call.learns and meta.is_differentiable for mark, meta in zip(arrived.marks, metas)]
        received, input_grads = enter([one for one in arrived.tensors if one is not None], needed)
        value = unflatten_message(arrived.spec.tree, received, self._stage.find_mesh)
        can_need = [meta.is_differentiable for meta in metas]
        return _Sample(
            tuple(value) if isinstance(value, (tuple, list)) else (value,),
            list(compress(metas, can_need)),
            list(compress(needed, can_need)),
            input_grads,
        )

    def _forward(self, call: Call, args: tuple[Any, ...], target: Any) -> _Made:
        self._at(Op.F)
        with torch.set_grad_enabled(call.learns):
            output = self._stage.submod(*args)
            if not self._stage.is_last:
                return self._sendable(call, output, args)
            loss = self._loss(call, output, target)
        self.loss = None if loss is None else loss.detach().clone()  # which keeps nothing else alive
        return _Made(output, [] if loss is None else [loss], None)

    def _sendable(self, call: Call, output: Any, args: tuple[Any, ...]) -> _Made:
        """Take an output apart for its message.

        Args:
            args: what it was made from; on the first stage they are the caller's, who may use their memory for the next sample.

        Raises:
            StageError: it cannot be sent, or it looks different from the samples before.
        """
        place = f"stage {self._stage.stage_index}, tick {call.tick}"
        tree, tensors = flatten_message(output, place)
        callers = keys_of(mb.tensors_in(args)) if self._stage.is_first else set()
        sent = all_dense([one if callers.isdisjoint(keys_of([one])) else one.clone() for one in tensors])
        spec = MessageSpec(tree, metas_of(sent, tensors))
        agreed = None if self._ends.outputs is None else self._ends.outputs.spec
        if agreed is not None and not is_alike(agreed, spec):
            texts = [str(agreed), str(spec)]
            if texts[0] == texts[1]:
                texts = [f"{one}, strides {[meta.stride for meta in one.tensors if meta]}" for one in (agreed, spec)]
            raise StageError(
                f"{place}: the output changed within a stream: it was {texts[0]}, and is {texts[1]}. drain() the stream before "
                "samples of another shape, send data of varying size as a tensor of fixed shape with a mask or a length, or return "
                ".contiguous() if strides vary."
            )
        content = Content(spec, sent, [tensor.requires_grad for tensor in tensors])
        return _Made(output, [tensor for tensor, meta in zip(tensors, spec.tensors) if meta and meta.is_differentiable], content)

    def _loss(self, call: Call, output: Any, target: Any) -> torch.Tensor | None:
        """Return the loss of the present sample; None if nothing is to be learned from it.

        Raises:
            StageError: it is no number, or needs no gradient.
        """
        if not call.learns or target is None or self._loss_fn is None:
            return None
        loss: Any = self._loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__qualname__
            raise StageError(f"loss_fn returned {seen} in tick {call.tick}: return one number, such as loss.mean()")
        if not loss.requires_grad:
            raise StageError(
                f"the loss in tick {call.tick} needs no gradient, so nothing would learn: return a loss that depends on the "
                "output, and keep at least one parameter trainable"
            )
        return loss

    def _gradients(self, made: _Made | None) -> list[torch.Tensor | None]:
        """Return the gradients of what the present forward has made: for its output those that the next stage has sent."""
        if self._stage.is_last:
            return [] if made is None else [torch.ones_like(loss) for loss in made.tensors]
        arrived = self._take(self._ends.gradients, Op.WAIT_RECV_B)
        if made is None or arrived is None:
            return []
        found = [gradient if is_there else None for gradient, is_there in zip(arrived.tensors, arrived.marks)]
        return [gradient if tensor.requires_grad else None for gradient, tensor in zip(found, made.tensors, strict=True)]

    def _backward(self, sample: _Sample, made: _Made, gradients: Sequence[torch.Tensor | None]) -> bool:
        """Run the graph of the present sample, if there is a gradient to run it with; return whether there is."""
        if all(gradient is None for gradient in gradients):
            return False
        self._at(Op.B)
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        without = [one for one in self._stage.submod.parameters() if one.requires_grad and one.grad is None]
        arriving = [gradient for gradient, tensor in zip(gradients, made.tensors) if tensor.requires_grad]
        Graph(edges_of(made.tensors), sample.input_grads, has_common_hooks=True).run_backward(arriving)
        apart([parameter for parameter in without if parameter.grad is not None])
        return True

    def _input_gradients(self, sample: _Sample | None) -> Content | None:
        """Return the message with the gradients of the present input; None if there are none."""
        end = self._ends.input_gradients
        if sample is None or end is None:
            return None
        found = iter(owned(sample.input_grads.gradients))
        gradients = [next(found) if is_needed else None for is_needed in sample.needed]
        if all(gradient is None for gradient in gradients):
            return None
        sent = [None if gradient is None else dense(gradient) for gradient in gradients]
        metas = [meta if one is None else meta_of(one, requires_grad=False) for one, meta in zip(sent, sample.metas)]
        spec = end.spec or MessageSpec("", tuple(metas))
        fitted = [one if one is None or meta is None else _fitted(one, meta) for one, meta in zip(sent, spec.tensors, strict=True)]
        return Content(spec, fitted, [one is not None for one in sent])

    def _take(self, end: Incoming | None, op: Op, *, is_last: bool = False) -> Content | None:
        """Take what was sent in the tick before, if there was one in this stream."""
        if end is None or self._before is None:
            return None
        self._at(op)
        return end.take(self._before, is_last=is_last)

    def _send(self, end: Outgoing | None, call: Call, content: Content | None, wait: Op, op: Op) -> None:
        """Send a message as soon as the one of the tick before is sent."""
        if end is not None:
            self._at(wait)
            end.complete()
            self._at(op)
            end.send(call, content)

    def _at(self, op: Op) -> None:
        self._transport.control.activity.position = self._places[op]


def _fitted(gradient: torch.Tensor, meta: TensorMeta) -> torch.Tensor:
    """Return a gradient with the strides that were agreed on."""
    if meta_of(gradient, requires_grad=False).extent == meta.extent:
        return gradient
    return meta.new(gradient.device).copy_(gradient)
