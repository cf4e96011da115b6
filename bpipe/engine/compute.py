"""Forwards and backwards of the stages on a rank. The user's code runs here, in the caller's thread, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bpipe.backward.autograd import Box, edges_of, enter
from bpipe.backward.divided import Divided, Graph
from bpipe.backward.new_gradients import NewGradients, owned
from bpipe.backward.user_hooks import UserHooks
from bpipe.comm.wire.message import Layout, TensorMeta, dense, meta_of, put_together, take_apart
from bpipe.comm.wire.note import may_need_later
from bpipe.engine.evictions import Evictions
from bpipe.engine.piecewise import PiecesOf
from bpipe.engine.traffic import Mail, Place, Traffic, versions_of
from bpipe.errors import StageError
from bpipe.memory.ledger import Key
from bpipe.memory.saved.storages import keys_of, storages_of
from bpipe.model import microbatch as mb
from bpipe.model.merging import check_merge
from bpipe.model.stage import Parts, PipelineStage
from bpipe.parallel.ddp import equalise_buffers
from bpipe.recomputation.rerun import Rerun, Reruns
from bpipe.recomputation.restorable import BATCH
from bpipe.recomputation.state import Learned
from bpipe.schedules import Action, Op

__all__: list[str] = []

PARAMETER = "a parameter"


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the user wants from one step.

    Args:
        args: the first stage's positional arguments, by microbatch.
        kwargs: the keyword arguments of each of this rank's stages, by microbatch.
        targets: by microbatch, or None.
        descriptions: what each microbatch looks like.
        loss_fn: called as `loss_fn(output, target, **loss_kwargs)` on the last stage, or None.
        loss_scale: the gradient with which the backward of each microbatch's loss starts.
        keeps_outputs: whether the last stage's outputs are returned.
        merge_spec: how they are put together.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    descriptions: Sequence[str]
    loss_fn: Callable[..., torch.Tensor] | None
    loss_kwargs: Mapping[str, Any]
    loss_scale: float
    keeps_outputs: bool
    merge_spec: Any


class _Inputs(NamedTuple):
    """The inputs of a forward.

    Args:
        args: the positional arguments.
        box: for their gradients.
        shapes: what the microbatch looks like.
        is_received: whether they come from the stage before.
        borrowed: what the stage before, on this rank, handed over: its tensor, ours over the same memory, and our version.
        fixed: storages of received inputs that never need a gradient.
    """

    args: tuple[Any, ...]
    box: Box
    shapes: str
    borrowed: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = ()
    is_received: bool = True
    fixed: Collection[int] = ()

    @property
    def received(self) -> tuple[Any, ...]:
        """What the stage before has sent."""
        return self.args if self.is_received else ()

    def report_changes(self) -> None:
        """Tell autograd what was changed in place, so that the backward of the stage before raises if it has saved that."""
        for lent, entered, version in self.borrowed:
            if entered._version != version:
                increment_version(lent)


class Compute:
    """The computations of one rank during one step.

    Args:
        stages: the stages on this rank by index, and the `parts` that they consist of.
        job: what the user wants.
        traffic: where inputs arrive and results leave.
        has_backward: whether graphs are built.
        undivided: the stages whose backward runs as a whole, in its input half.
        hooks: the user's.
        recomputed: the microbatches whose forward runs twice.
        learned: what is known of the stages whose forwards run twice.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        parts: Mapping[int, Parts],
        job: Job,
        traffic: Traffic,
        *,
        has_backward: bool,
        undivided: set[int] | None = None,
        hooks: UserHooks | None = None,
        recomputed: Collection[Key] = (),
        learned: MutableMapping[int, Learned],
    ) -> None:
        self.losses: list[torch.Tensor] = []
        self.outputs: list[Any] = []
        self._stages, self._job, self._traffic, self._has_backward = stages, job, traffic, has_backward
        self._parts = parts
        self._recomputed = recomputed
        self._learned = learned
        self.reruns = Reruns()
        self._waiting: dict[Key, tuple[Rerun, Mail | None]] = {}  # for their second forward, with what the stage before has sent
        self._graphs: dict[Key, Graph] = {}
        self._new_gradients = NewGradients(parts if has_backward else {})
        self._hooks = UserHooks({}, {}) if hooks is None else hooks
        self._divided = Divided(set() if undivided is None else undivided, self._hooks, self._new_gradients.separate)
        self._foreign: dict[int, str] | None = None
        self._foreign_alive: list[StorageWeakRef] = []

    def edges(self, key: Key) -> list[GradientEdge]:
        """Return the edges where the backward of a microbatch will begin."""
        return self._graphs[key].edges

    def kept(self) -> list[torch.Tensor]:
        """Return the tensors that the step will return to the user."""
        return mb.tensors_in([self.outputs, self.losses])

    def foreign(self) -> dict[int, str]:
        """Return the storages that are no activations, and what they are; found when first asked for in a step.

        Weak references keep their addresses from being used again: a buffer that the stage replaces must not lend its name
        to an activation.
        """
        if self._foreign is None:
            modules = [module for parts in self._parts.values() for module in parts.modules]
            buffers = [buffer for module in modules for buffer in module._buffers.values()]
            parameters = [parameter for module in modules for parameter in module._parameters.values()]
            batch = _storages(mb.tensors_in([self._job.args, self._job.kwargs, self._job.targets], set()))
            kinds = {BATCH: batch, "a buffer": _storages(buffers), PARAMETER: _storages(parameters)}
            self._foreign = {storage._cdata: kind for kind, storages in kinds.items() for storage in storages}
            self._foreign_alive = [StorageWeakRef(storage) for storages in kinds.values() for storage in storages]
        return self._foreign

    def _for_sending(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the dense tensor to send for an output: a copy if the stage itself keeps the output and may change it."""
        foreign = self.foreign()
        return dense(tensor.clone() if any(storage._cdata in foreign for storage in storages_of(tensor)) else tensor)

    def forward(self, action: Action, evictions: Evictions, pieces: PiecesOf | None) -> None:
        stage, key = self._stages[action.stage], action[1:3]
        if key in self._recomputed:
            self._first_forward(action)
            return
        inputs, num_common = self._inputs(action, self._mail(action)), self._hooks.num_common
        stash = evictions.follow(action, inputs.shapes, inputs.received, pieces) if self._has_backward else None
        with torch.set_grad_enabled(self._has_backward), stash.capture() if stash is not None else nullcontext():
            output = stage.submod(*inputs.args, **self._job.kwargs[action.microbatch])
            inputs.report_changes()
            box, borrowed, fixed = inputs.box, keys_of(lent for lent, *_ in inputs.borrowed), inputs.fixed
            del inputs  # `after_forward` counts owners: this frame must not own what the stage has received
            loss = self._loss(output, action.microbatch) if stage.is_last else None
        if pieces is not None:
            pieces.finish()
        if stage.is_last:
            if stash is not None:
                evictions.returned(key, (output, loss))
            made = self._finish_microbatch(output, loss)
        else:
            made = self._hand_on(output, key, borrowed, fixed)
        del output, loss  # which this frame must not own either when `after_forward` counts owners
        if self._has_backward:
            self._graphs[key] = Graph(edges_of(made), box, self._hooks.num_common > num_common)
            del made
            evictions.after_forward(key, stash, self._graphs[key].edges)

    def _first_forward(self, action: Action) -> None:
        """Run the first of a microbatch's two forwards: its results go on, and it keeps only its input."""
        stage, mail, microbatch = self._stages[action.stage], self._mail(action), action.microbatch
        inputs = self._inputs(action, mail)
        target = self._job.targets[microbatch] if stage.is_last and self._job.targets is not None else None
        given = mb.tensors_in([inputs.args, self._job.kwargs[microbatch], target, dict(self._job.loss_kwargs)])
        equalise_buffers(self._parts[action.stage].modules)
        running = [stage.submod, *([self._job.loss_fn] if stage.is_last else ())]
        device, foreign = self._traffic.transport.device, self.foreign()
        rerun = Rerun(action.stage, microbatch, given, running, self._known(action.stage), self.reruns, device, foreign)
        self._waiting[action[1:3]] = rerun, mail
        with torch.enable_grad(), rerun.first():
            output, loss = self._returned(action, inputs)
        rerun.returned(output, loss)
        if stage.is_last:
            self._finish_microbatch(output, loss)
        else:
            self._hand_on(output, action[1:3], set(), inputs.fixed)

    def _known(self, stage: int) -> Learned:
        """Return what is known of a stage whose forwards run twice: nothing yet, if its makeup has changed."""
        known, makeup = self._learned.get(stage), self._parts[stage].makeup
        if known is None or known.makeup != makeup:
            known = self._learned[stage] = Learned(makeup)
        return known

    def recompute(self, action: Action, evictions: Evictions) -> None:
        """Run the second of a microbatch's two forwards, which builds the graph and saves what the backward needs."""
        key = action[1:3]
        rerun, mail = self._waiting.pop(key)
        inputs, num_common = self._inputs(action, mail), self._hooks.num_common
        del mail  # so that `inputs` alone owns what arrived
        stash = evictions.follow(action, inputs.shapes, inputs.received, None)
        with torch.enable_grad(), rerun.again(), stash.capture() if stash is not None else nullcontext():
            if stash is not None:
                modules = self._parts[action.stage].modules
                stash.set_apart([buffer for one in modules for buffer in one._buffers.values() if buffer is not None], "a buffer")
            output, loss = self._returned(action, inputs)
        rerun.returned(output, loss)
        box = inputs.box
        del inputs, rerun  # both own the received tensors, and `after_forward` counts owners
        made = [loss] if loss is not None else take_apart(output, f"stage {action.stage}, microbatch {action.microbatch}")[1]
        if stash is not None:
            evictions.returned(key, (output, loss))
        self._graphs[key] = Graph(edges_of(made), box, self._hooks.num_common > num_common)
        del output, loss, made  # for the same reason
        evictions.after_forward(key, stash, self._graphs[key].edges)

    def _returned(self, action: Action, inputs: _Inputs) -> tuple[Any, torch.Tensor | None]:
        """Run a stage for a microbatch whose forward runs twice; return its output and, on the last stage, its loss."""
        stage = self._stages[action.stage]
        output = stage.submod(*inputs.args, **self._job.kwargs[action.microbatch])
        return output, self._loss(output, action.microbatch) if stage.is_last else None

    def _mail(self, action: Action) -> Mail | None:
        """Take what the stage before has sent for a forward; None on the first stage."""
        return self._traffic.arrived.pop(action[:3]) if action.stage else None

    def _inputs(self, action: Action, mail: Mail | None) -> _Inputs:
        shapes = self._job.descriptions[action.microbatch]
        if mail is None:
            return _Inputs(self._job.args[action.microbatch], Box(), shapes, is_received=False)
        layout, arrived = mail
        tensors = [tensor for tensor in arrived if tensor is not None]
        needs_gradient = [meta.requires_grad and self._has_backward for meta in layout.tensors if meta is not None]
        entered, box = enter(tensors, needs_gradient)
        value = put_together(layout.nest, entered, self._stages[action.stage].find_mesh)
        args = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        is_borrowed = self._has_backward and action.stage - 1 in self._stages
        borrowed = [(lent, ours, ours._version) for lent, ours in zip(tensors, entered) if lent is not ours] if is_borrowed else ()
        fixed = () if layout.is_open else keys_of(tensor for tensor, needed in zip(tensors, needs_gradient) if not needed)
        return _Inputs(args, box, f"{shapes} {layout}", borrowed, fixed=fixed)

    def _loss(self, output: Any, microbatch: int) -> torch.Tensor | None:
        if self._job.loss_fn is None or self._job.targets is None:
            return None
        loss = self._job.loss_fn(output, self._job.targets[microbatch], **self._job.loss_kwargs)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            seen = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__qualname__
            raise StageError(f"loss_fn returned {seen} for microbatch {microbatch}: return one number, such as loss.mean()")
        if self._has_backward and not loss.requires_grad:
            raise StageError(
                f"the loss of microbatch {microbatch} needs no gradient, so nothing would be trained: "
                "return a loss that depends on the output, and keep something trainable"
            )
        return loss

    def _finish_microbatch(self, output: Any, loss: torch.Tensor | None) -> list[torch.Tensor]:
        """Keep what the last stage returned; return where its backward begins."""
        if loss is not None:
            is_part = loss.untyped_storage().nbytes() > loss.element_size()  # of more, which would be kept with it
            self.losses.append(loss.detach().clone() if is_part else loss.detach())
        if self._job.keeps_outputs:
            if not self.outputs:  # before any gradient is added
                check_merge(output, self._job.merge_spec)
            self.outputs.append(mb.detached(output))
        return [] if loss is None else [loss]

    def _hand_on(self, output: Any, key: Key, borrowed: set[int], fixed: Collection[int]) -> list[torch.Tensor]:
        """Take a stage's output apart for the next one; return its tensors, where its backward begins."""
        stage, microbatch = key
        nest, tensors = take_apart(output, f"stage {stage}, microbatch {microbatch}")
        sent = [self._for_sending(tensor) for tensor in tensors]
        if stage + 1 in self._stages:
            sent = list(_apart(sent, borrowed))
        metas = tuple(meta_of(t, requires_grad=tensor.requires_grad) for t, tensor in zip(sent, tensors))
        layout = Layout(nest, metas, self._may_change(metas, tensors, fixed))
        self._pass((Op.SEND_F, *key), (Op.F, stage + 1, microbatch), layout, sent)
        return tensors

    def _may_change(self, metas: Sequence[TensorMeta], tensors: Sequence[torch.Tensor], fixed: Collection[int]) -> bool:
        """Return whether outputs that need no gradient now may need one another time.

        Next to an output that needs one, those that are only handed on never do, such as a mask of the batch or a buffer. Where
        no output needs one, all of the stage may have been skipped.
        """
        others = [tensor for meta, tensor in zip(metas, tensors) if may_need_later(meta)]
        if not others or not any(meta.requires_grad for meta in metas):
            return bool(others)
        kinds = self.foreign()  # parameters may be unfrozen
        return not all(key in fixed or kinds.get(key, PARAMETER) != PARAMETER for one in others for key in keys_of([one]))

    def backward(self, action: Action, evictions: Evictions, pieces: PiecesOf | None) -> None:
        evictions.before_backward(action, pieces)
        graph, gradients = self._graph(action)
        graph.run_backward(gradients)
        builder = None if _are_absent(gradients) else self._stages[action.stage].dw_builder
        del gradients  # freed before `builder` makes more; and `_hand_back` counts owners
        if builder is not None:
            builder()()
        self._divided.latest[action.stage] = action.microbatch
        self._new_gradients.separate(action.stage)
        if pieces is not None:
            pieces.finish()
        evictions.after_backward(action[1:3])
        self._hand_back(graph.box, action[1:3])

    def input_half(self, action: Action, evictions: Evictions) -> None:
        evictions.before_backward(action, None)
        graph, gradients = self._graph(action)
        is_idle = _are_absent(gradients)
        builder = None if is_idle else self._stages[action.stage].dw_builder
        is_first_look = not is_idle and action.stage in self._hooks.unheard  # whose backward is whole, unlike others of its kind
        half, box = self._divided.input_half(action[1:3], graph, gradients, builder), graph.box
        # `owned` counts owners; and what the other half does not need of the graph is freed, with the attributes of its Functions.
        del graph, gradients
        half.replace(owned(half.gradients(), beside=box.gradients))
        self._divided.halves[action[1:3]] = half
        self._new_gradients.separate(action.stage)
        evictions.after_input_half(action[1:3], half.gradients(), is_idle=is_idle or is_first_look, is_whole=self._divided.is_whole)
        self._hand_back(box, action[1:3])

    def weight_half(self, action: Action, evictions: Evictions) -> None:
        self._divided.run(action[1:3], self._divided.halves.pop(action[1:3]))
        self._new_gradients.separate(action.stage)
        evictions.after_backward(action[1:3])

    def _graph(self, action: Action) -> tuple[Graph, list[torch.Tensor | None]]:
        """Take what a backward needs: the graph of its microbatch, and the gradients of the stage's outputs."""
        graph = self._graphs.pop(action[1:3])
        if self._stages[action.stage].is_last:
            return graph, [torch.full_like(self.losses[action.microbatch], self._job.loss_scale)]
        return graph, self._traffic.arrived.pop((Op.B, action.stage, action.microbatch))[1]

    def _hand_back(self, box: Box, key: Key) -> None:
        stage, microbatch = key
        if stage == 0:
            return
        halves = self._divided.halves
        waiting = keys_of(halves[key].gradients()) if key in halves else set()  # and may become a `.grad`, too
        sent = [None if gradient is None else dense(gradient) for gradient in owned(box.gradients, waiting)]
        box.gradients.clear()  # the graph keeps the box until a weight half has run
        layout = Layout("", tuple(None if gradient is None else meta_of(gradient, requires_grad=False) for gradient in sent))
        self._pass((Op.SEND_B, *key), (Op.B, stage - 1, microbatch), layout, sent)

    def _pass(self, send: Place, use: Place, layout: Layout, tensors: Sequence[torch.Tensor | None]) -> None:
        """Leave a stage's result for its send, or at once for the neighbouring stage on this rank."""
        if use[1] in self._stages:
            self._traffic.arrived[use] = (layout, list(tensors))
        else:
            self._traffic.outgoing[send] = (layout, list(tensors))
            if self._traffic.transport.waits_on_device:
                self._traffic.versions[send] = versions_of(tensors)


def modules_of(loss_fn: Any) -> Iterator[torch.nn.Module]:
    """Yield the module that a loss function is, or is a method of, if there is one."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, torch.nn.Module):
        yield owner


def _are_absent(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether nothing came back for a microbatch, so that its backward has nothing to do."""
    return bool(gradients) and all(gradient is None for gradient in gradients)


def _apart(tensors: Iterable[torch.Tensor], borrowed: Iterable[int]) -> Iterator[torch.Tensor]:
    """Yield tensors as the next stage on this rank gets them: no two share memory, as over a link, so it may change each in place.

    Args:
        tensors: what a stage returned.
        borrowed: the storages that it got in the same way.
    """
    taken = set(borrowed)
    for tensor in tensors:
        keys = keys_of([tensor])
        yield tensor.clone() if keys & taken else tensor
        taken |= keys


def _storages(tensors: Iterable[torch.Tensor | None]) -> list[torch.UntypedStorage]:
    """Return the storages under tensors that have any, each once."""
    found = (storage for tensor in tensors if tensor is not None and not is_lazy(tensor) for storage in storages_of(tensor))
    return list({storage._cdata: storage for storage in found}.values())
