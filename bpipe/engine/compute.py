"""Forwards and backwards of the stages on a rank. The user's code runs here, in the caller's thread, and nowhere else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bpipe.backward.autograd import Graph, InputGrads, edges_of, enter
from bpipe.backward.divided import Divided
from bpipe.backward.local_results import left_as_it_is, taken_apart
from bpipe.backward.loss_scale import LossScale
from bpipe.backward.new_gradients import NewGradients, owned
from bpipe.backward.user_hooks import UserHooks
from bpipe.backward.without_loss import checked_loss
from bpipe.comm.wire.message import MessageSpec, TensorMeta, all_dense, dense, flatten_message, meta_of, metas_of, unflatten_message
from bpipe.comm.wire.note import may_need_later
from bpipe.engine.evictions import Evictions
from bpipe.engine.messages import versions_of
from bpipe.engine.microbatch_state import Arrived, Message, MicrobatchState
from bpipe.engine.traffic import Traffic
from bpipe.errors import StageError
from bpipe.memory.ledger import Key
from bpipe.memory.saved.spans import Span
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import keys_of, storages_of
from bpipe.model import microbatch as mb
from bpipe.model.call import Loss
from bpipe.model.examples import compare_examples
from bpipe.model.stage import ModuleSnapshot, PipelineStage, find_mesh, in_context
from bpipe.parallel.ddp import equalise_buffers
from bpipe.recomputation.rerun import Rerun, Reruns
from bpipe.recomputation.restorable import BATCH
from bpipe.recomputation.state import Learned
from bpipe.schedules import Action
from bpipe.skips.carrier import Carrier, Given, without_inference
from bpipe.skips.values import OUTPUT
from bpipe.slices.loss_check import LossCheck
from bpipe.slices.states import Sequences, past_of
from bpipe.torch_private.owners_and_versions import address_of, version_of

__all__: list[str] = []

PARAMETER = "a parameter"
NOTHING_GIVEN = Given()


@dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The inputs and options of one step.

    Args:
        args: the first stage's positional arguments, by microbatch.
        kwargs: the keyword arguments of each of this rank's stages, by microbatch.
        targets: by microbatch, or None.
        descriptions: the input shapes of each microbatch, as text.
        loss_fn: called as `loss_fn(output, target, **loss_kwargs)` on stages with a loss, or None.
        loss_parameters: those that the loss function leads to, with their names there.
        loss_scales: the gradient with which the backward of each microbatch's loss starts.
        loss_scale: that of a whole microbatch; None if stages take slices, each of which has its own.
        keeps_outputs: whether the last stage's outputs are returned.
        check_output: raises if outputs like this one of a microbatch cannot be merged.
        lengths: of all slices; None if there are none, or if no rank has cut anything.
        loss_check: compares the losses of slices with those of whole sequences; None if there are none.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    descriptions: Sequence[str]
    loss_fn: Loss
    loss_parameters: Sequence[tuple[str, torch.Tensor]]
    loss_kwargs: Mapping[str, Any]
    loss_scales: Sequence[float]
    loss_scale: float | None
    keeps_outputs: bool
    check_output: Callable[[Any], None]
    lengths: Sequence[int] | None = None
    loss_check: LossCheck | None = None


class _Inputs(NamedTuple):
    """The inputs of a forward.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
        input_grads: collects the gradients of what the previous stage has sent, and of what earlier slices have left.
        shapes: a description of the microbatch's inputs.
        received: the inputs that the previous stage has sent: all, or none on the first stage.
        borrowed: for each input that others on this rank may own: their tensor, ours over the same memory, our version.
        fixed: the storages of received inputs that never need a gradient.
        past: the tensors that earlier slices have left.
        borrowed_skips: the tensors of skips that an earlier stage on this rank has, too.
        shared_skips: by name, each tensor of skips that another stage has, too, and may not be changed here, with its version.
        fixed_skips: those of them that a later stage has, with the last such stage: it may not be changed through an output either.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    input_grads: InputGrads
    shapes: str
    borrowed: Sequence[tuple[torch.Tensor, torch.Tensor, int]] = ()
    received: tuple[Any, ...] = ()
    fixed: Collection[int] = ()
    past: Sequence[torch.Tensor] = ()
    borrowed_skips: Sequence[torch.Tensor] = ()
    shared_skips: Sequence[tuple[str, torch.Tensor, int]] = ()
    fixed_skips: Sequence[tuple[torch.Tensor, int]] = ()

    def note_owners(self, stash: Stash) -> None:
        """Tell a stash which inputs belong to others on this rank."""
        if self.past:
            stash.go_on_after(self.past)
        if self.borrowed_skips:
            stash.borrow(self.borrowed_skips)

    def report_changes(self, place: str) -> None:
        """Report in-place changes to autograd, so that the previous stage's backward raises if it has saved a changed tensor.

        Args:
            place: the stage and microbatch, for messages.

        Raises:
            StageError: a skip was changed that another stage has, too, which may have saved it, or uses it later.
        """
        for name, tensor, version in self.shared_skips:
            if version_of(tensor) != version:
                what = f"the skip {name!r}" if name else "its input, which an earlier stage has handed on as a skip,"
                raise StageError(f"{place}: {what} was changed in place, and another stage has it, too. Clone it before")
        for lent, entered, version in self.borrowed:
            if version_of(entered) != version:
                increment_version(lent)


class Compute:
    """The computations of one rank during one step.

    Args:
        stages: the stages on this rank, by index.
        parts: a snapshot of each stage's modules, parameters and buffers.
        step_inputs: the inputs and options of the step.
        traffic: where inputs arrive and results leave.
        has_backward: whether graphs are built.
        undivided: the stages whose whole backward runs in `backward_input`.
        hooks: the user's hooks.
        recomputed: the microbatches whose forward runs twice.
        learned: what is known about the stages whose forwards run twice.
        slices: into how many slices each sequence is cut, of which `microbatch` is the number; None if stages take no slices.
        is_learning: whether the step is the first one with its shapes, so that what slices may not do is looked for closely.
        skips: carries those of the plan; None if it has none.
        local: whether gradients stay in their stage, each of which has a loss.
    """

    def __init__(
        self,
        stages: Mapping[int, PipelineStage],
        parts: Mapping[int, ModuleSnapshot],
        step_inputs: StepInputs,
        traffic: Traffic,
        *,
        has_backward: bool,
        undivided: set[int],
        hooks: UserHooks,
        recomputed: Collection[Key],
        learned: MutableMapping[int, Learned],
        slices: int | None,
        is_learning: bool,
        skips: Carrier | None,
        local: bool,
    ) -> None:
        self.losses: dict[int, torch.Tensor] = {}  # by microbatch, in the order of forwards
        self.outputs: dict[int, Any] = {}
        self.returned: list[torch.Tensor] = []  # the tensors of both, which the step will return to the user
        self.cut_off: Counter[int] = Counter()  # by stage, the microbatches whose inputs need a gradient that no output brings
        self.lengths = step_inputs.lengths
        self._skips, self._local = skips, local
        self._stages, self._step_inputs, self._traffic, self._has_backward = stages, step_inputs, traffic, has_backward
        self._last = {index for index, stage in stages.items() if stage.is_last}
        self._with_loss = {*stages} if local else self._last
        self._without_input_gradients = {index for index, stage in stages.items() if stage.is_first or local}
        self._parts = parts
        self._recomputed = recomputed
        self._learned = learned
        self.loss_scale = LossScale(step_inputs.loss_scale)
        self._unnoticed = {*stages} if has_backward else set()
        self._unwatched = {*stages} if has_backward and is_learning else set()
        self.reruns = Reruns()
        self._microbatches = traffic.microbatches
        self._sequences = (
            Sequences(
                traffic.microbatches,
                slices,
                traffic.transport.device,
                has_backward=has_backward,
                num_close=slices * len(stages) if is_learning else 0,
            )
            if slices
            else None
        )
        self._new_gradients = NewGradients(parts if has_backward else {})
        self._hooks = hooks
        self._divided = Divided(undivided, hooks, self._new_gradients.separate)
        self._non_activations: dict[int, str] | None = None
        self._non_activations_alive: list[StorageWeakRef] = []

    def non_activations(self) -> dict[int, str]:
        """Return the storages that are not activations, with the kind of each; searched for when first needed in a step.

        Weak references keep their addresses from being reused: an activation must not get the kind of a buffer that the stage
        has replaced.
        """
        if self._non_activations is None:
            modules = [module for parts in self._parts.values() for module in parts.modules]
            buffers = [buffer for module in modules for buffer in module._buffers.values()]
            parameters = [parameter for module in modules for parameter in module._parameters.values()]
            batch = _storages(mb.tensors_in([self._step_inputs.args, self._step_inputs.kwargs, self._step_inputs.targets], set()))
            kinds = {BATCH: batch, "a buffer": _storages(buffers), PARAMETER: _storages(parameters)}
            self._non_activations = {address_of(storage): kind for kind, storages in kinds.items() for storage in storages}
            self._non_activations_alive = [StorageWeakRef(storage) for storages in kinds.values() for storage in storages]
        return self._non_activations

    def forward(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        is_last, has_loss = action.stage in self._last, action.stage in self._with_loss
        if (state.stage, state.microbatch) in self._recomputed:
            self._first_forward(action, state, evictions)
            return
        module = self._module(state)
        inputs, num_common = self._inputs(action, state, self._arrived(state)), self._hooks.num_common
        stash = evictions.follow(action, state, inputs.shapes, inputs.received) if self._has_backward else None
        if stash is not None and (inputs.past or inputs.borrowed_skips):
            inputs.note_owners(stash)
        capture = stash.capture() if stash is not None else nullcontext()
        with self._noticing(state), torch.set_grad_enabled(self._has_backward), capture:
            if self._sequences is None:
                stage = self._stages[action.stage]
                output, left = module(*inputs.args, **inputs.kwargs), list[torch.Tensor]()
                if stage.examples:
                    compare_examples(stage, inputs.args, output)
            else:
                output, left = self._run(state, inputs, sets_hooks=stash is None)
            if inputs.borrowed or inputs.shared_skips:
                inputs.report_changes(state.place)
            input_grads, fixed = inputs.input_grads, inputs.fixed
            borrowed = keys_of([*(lent for lent, *_ in inputs.borrowed), *left]) if inputs.borrowed or left else set()
            spans = [Span(*one) for one in inputs.fixed_skips]
            del inputs  # `after_forward` counts owners: this frame must not own what the stage has received
            sent, keeps = output, None
            if has_loss and not is_last:
                sent, output = taken_apart(output, state.place)
                keeps = left_as_it_is(sent, state.place)
            with keeps or nullcontext():
                loss = self._loss(output, action.microbatch) if has_loss else None
        made = list[torch.Tensor]()
        if not is_last:
            made = self._hand_on(sent, state, borrowed, fixed, spans)
            self._note_cut_off(input_grads, made, state)
        if has_loss:
            if stash is not None:
                evictions.returned(state, (output, loss))
            made = self._finish_microbatch(output, loss, action.microbatch)
        del sent, output, loss  # which this frame must not own either when `after_forward` counts owners
        if self._has_backward:
            state.graph = self._new_graph(state, [*made, *left], input_grads, num_common)
            del made, left
            evictions.after_forward(state, stash, state.graph.edges)

    def _first_forward(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        """Run the first of a microbatch's two forwards: its results are sent on, and only its input is kept."""
        stage, arrived, microbatch = self._stages[action.stage], self._arrived(state), action.microbatch
        inputs = self._inputs(action, state, arrived)
        target = self._step_inputs.targets[microbatch] if stage.is_last and self._step_inputs.targets is not None else None
        given = mb.tensors_in([inputs.args, inputs.kwargs, target, dict(self._step_inputs.loss_kwargs)])
        equalise_buffers(self._parts[action.stage].modules)
        running = [stage.submod, *([self._step_inputs.loss_fn] if stage.is_last else ())]
        device, non_activations = self._traffic.transport.device, self.non_activations()
        rerun = Rerun(action.stage, microbatch, given, running, self._known(action.stage), self.reruns, device, non_activations)
        state.rerun = rerun, arrived
        with self._noticing(state), torch.enable_grad(), rerun.first():
            output, loss, left = self._returned(action, state, inputs, sets_hooks=False)
        rerun.returned(output, loss)
        evictions.after_first_forward(state, inputs.shapes)
        if stage.is_last:
            self._finish_microbatch(output, loss, microbatch)
        else:
            spans = [Span(*one) for one in inputs.fixed_skips]
            self._note_cut_off(inputs.input_grads, self._hand_on(output, state, keys_of(left), inputs.fixed, spans), state)

    def _noticing(self, state: MicrobatchState) -> AbstractContextManager[None]:
        """Notice in the first forward of a stage whether it or its loss runs a backward of its own."""
        if state.stage not in self._unnoticed:
            return nullcontext()
        self._unnoticed.remove(state.stage)
        modules, of_loss = [self._stages[state.stage].submod], list[tuple[str, torch.Tensor]]()
        if state.stage in self._with_loss:
            modules += modules_of(self._step_inputs.loss_fn)
            of_loss += self._step_inputs.loss_parameters
        parameters = [*self._parts[state.stage].parameters, *(one for _, one in of_loss)]
        return self.loss_scale.noticing(parameters, chain(*(one.named_parameters() for one in modules), of_loss), state.place)

    def _new_graph(self, state: MicrobatchState, made: Sequence[torch.Tensor], inputs: InputGrads, num_common: int) -> Graph:
        """Return the graph of a microbatch that ends at some tensors."""
        graph = Graph(edges_of(made), inputs, self._hooks.num_common > num_common)
        if state.stage in self._unwatched:
            self._unwatched.remove(state.stage)
            self.loss_scale.watch(graph.edges, state.place)
        return graph

    def _known(self, stage: int) -> Learned:
        """Return what is known about a stage whose forwards run twice: nothing yet, if its makeup has changed."""
        known, makeup = self._learned.get(stage), self._parts[stage].makeup
        if known is None or known.makeup != makeup:
            known = self._learned[stage] = Learned(makeup)
        return known

    def recompute(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        """Run the second of a microbatch's two forwards, which builds the graph and saves what the backward needs."""
        assert state.rerun is not None, "a second forward follows the first one"
        (rerun, arrived), state.rerun = state.rerun, None
        inputs, num_common = self._inputs(action, state, arrived), self._hooks.num_common
        del arrived  # so that `inputs` alone owns what arrived
        stash = evictions.follow(action, state, inputs.shapes, inputs.received)
        if stash is not None and (inputs.past or inputs.borrowed_skips):
            inputs.note_owners(stash)
        with torch.enable_grad(), rerun.again(), stash.capture() if stash is not None else nullcontext():
            if stash is not None:
                modules = self._parts[action.stage].modules
                stash.set_apart([buffer for one in modules for buffer in one._buffers.values() if buffer is not None], "a buffer")
            output, loss, left = self._returned(action, state, inputs, sets_hooks=stash is None)
        rerun.returned(output, loss)
        input_grads = inputs.input_grads
        del inputs, rerun  # both own the received tensors, and `after_forward` counts owners
        made = [loss] if loss is not None else self._made(output, state)
        if stash is not None:
            evictions.returned(state, (output, loss))
        state.graph = self._new_graph(state, [*made, *left], input_grads, num_common)
        del output, loss, made, left  # for the same reason
        evictions.after_forward(state, stash, state.graph.edges)

    def _run(self, state: MicrobatchState, inputs: _Inputs, *, sets_hooks: bool) -> tuple[Any, list[torch.Tensor]]:
        """Run a stage's module; return its output, and the tensors that it leaves for later slices."""
        stage, sequences = self._stages[state.stage], self._sequences
        module = self._module(state)
        if sequences is None:
            output = module(*inputs.args, **inputs.kwargs)
            if stage.examples:
                compare_examples(stage, inputs.args, output)
            return output, []
        with sequences.forward(state.name, self._parts[state.stage].modules, sets_hooks=sets_hooks) as casts:
            result = module(*inputs.args, **inputs.kwargs)
        return sequences.take(result, state, casts)

    def _module(self, state: MicrobatchState) -> Callable[..., Any]:
        """Return a stage's module as it runs for a microbatch: inside the forward context, if the user has registered one."""
        stage = self._stages[state.stage]
        return in_context(stage, state.microbatch // state.slices) if stage.forward_contexts else stage.adapter or stage.submod

    def _returned(
        self, action: Action, state: MicrobatchState, inputs: _Inputs, *, sets_hooks: bool
    ) -> tuple[Any, torch.Tensor | None, list[torch.Tensor]]:
        """Run a stage for a microbatch whose forward runs twice; return what `_run` does, with the loss on the last stage."""
        output, left = self._run(state, inputs, sets_hooks=sets_hooks)
        return output, self._loss(output, action.microbatch) if action.stage in self._last else None, left

    def _arrived(self, state: MicrobatchState) -> Arrived:
        """Take what other stages have sent for a forward."""
        message, state.input = state.input, None
        return Arrived(message, () if self._skips is None else self._skips.arrived(state))

    def _inputs(self, action: Action, state: MicrobatchState, arrived: Arrived) -> _Inputs:
        message = arrived.message
        shapes, kwargs = self._step_inputs.descriptions[action.microbatch], self._step_inputs.kwargs[action.microbatch]
        if message is None and self._sequences is None:
            return _Inputs(self._step_inputs.args[action.microbatch], kwargs, InputGrads(), shapes)
        mesh_for, trains = partial(find_mesh, self._stages[action.stage]), self._has_backward
        tensors, needed = [], list[bool]()
        if message is not None:
            tensors = [tensor for tensor in message.tensors if tensor is not None]
            needed = [meta.requires_grad and trains for meta in message.spec.tensors if meta is not None]
        earlier = [] if self._sequences is None else self._sequences.before(state)
        past = [tensor for left in earlier for tensor in left.tensors]
        needed_past = [is_needed and trains for left in earlier for is_needed in left.is_needed]
        given = NOTHING_GIVEN if self._skips is None else self._skips.given(state, arrived)
        entered, input_grads = enter([*tensors, *given.tensors, *past], needed + given.needed + needed_past)
        begin = len(tensors)
        end = begin + len(given.tensors)
        received, handed, again = entered[:begin], entered[begin:end], entered[end:]
        if self._skips is not None:
            given.enter(received, handed)
            values = given.values(mesh_for)
            value = values.pop(OUTPUT, None)
            for name in kwargs.keys() & values.keys():
                raise StageError(f"step({name}=...): stage {action.stage} gets a skip of this name from the pipeline; rename one")
            kwargs, shapes = kwargs | values, shapes + given.shapes
        if self._sequences is not None:
            if "past" in kwargs:
                raise StageError("step(past=...): `past` is what the pipeline gives to stages that take slices; use another name")
            kwargs = {**kwargs, "past": past_of(earlier, again, mesh_for)}
            shapes = f"{shapes} after {len(earlier)} slices, {sum(tensor.nbytes for tensor in past)} bytes"
        is_next_door = message is not None and action.stage - 1 in self._stages
        lent = [*(zip(tensors, received) if is_next_door else ()), *zip(past, again)] if trains else []
        if trains and self._skips is not None:
            lent += given.lent(with_joined=not is_next_door)
        borrowed = [(theirs, ours, version_of(ours)) for theirs, ours in lent if theirs is not ours]
        if message is None:
            args = self._step_inputs.args[action.microbatch]
            return _Inputs(args, kwargs, input_grads, shapes, borrowed, past=past)
        if self._skips is None:
            value = unflatten_message(message.spec.tree, received, mesh_for)
        args = tuple(value) if isinstance(value, (tuple, list)) else (value,)
        sent = args if self._skips is None else tuple(received)  # a tensor may be an argument and a skip
        fixed = () if message.spec.is_open else keys_of(tensor for tensor, is_needed in zip(tensors, needed) if not is_needed)
        shapes = f"{shapes} {message.spec}"
        owners = given.borrowed, given.shared(), given.fixed()
        return _Inputs(args, kwargs, input_grads, shapes, borrowed, sent, fixed, past, *owners)

    def _loss(self, output: Any, microbatch: int) -> torch.Tensor | None:
        if self._step_inputs.loss_fn is None or self._step_inputs.targets is None:
            return None
        if self.lengths:
            self._check_positions(output, self.lengths[microbatch], microbatch)
        if not self._step_inputs.loss_scales[microbatch]:
            # A slice without a target that counts, whose mean would be 0 / 0. Its backward runs all the same, because hooks in it,
            # as FSDP2's, may wait for other ranks.
            loss: Any = sum(_nothing(tensor) for tensor in mb.tensors_in(output) if tensor.is_floating_point())
        else:
            loss = self._called_loss(output, microbatch)
        if self._has_backward and self._step_inputs.loss_check is not None and self.lengths:
            self._check_loss(output, microbatch, self._step_inputs.loss_check)
        return checked_loss(loss, self._microbatches.named(microbatch), trains=self._has_backward)

    def _called_loss(self, output: Any, microbatch: int) -> Any:
        """Return what the user's loss function returns."""
        inputs = self._step_inputs
        assert inputs.loss_fn is not None and inputs.targets is not None
        if self._sequences is None:
            return inputs.loss_fn(output, inputs.targets[microbatch], **inputs.loss_kwargs)
        name = f"the loss of {self._microbatches.named(microbatch)}"
        scaling = self.loss_scale.of_loss(inputs.loss_scales[microbatch])
        with self._sequences.watching(name, list(modules_of(inputs.loss_fn)), [inputs.loss_fn]), scaling:
            return inputs.loss_fn(output, inputs.targets[microbatch], **inputs.loss_kwargs)

    def _check_loss(self, output: Any, microbatch: int, check: LossCheck) -> None:
        """Compare the losses of two slices with that of both together, if the targets look as none did before."""
        inputs = self._step_inputs
        assert inputs.loss_fn is not None and inputs.targets is not None and self.lengths is not None
        call, name = partial(inputs.loss_fn, **inputs.loss_kwargs), f"the loss of {self._microbatches.named(microbatch)}"
        with self.loss_scale.of_loss(inputs.loss_scales[microbatch]):
            check.look(microbatch, output, inputs.targets[microbatch], self.lengths[microbatch], call, name)

    def _check_positions(self, output: Any, length: int, microbatch: int) -> None:
        """Raise if the output of a slice has no dimension of its positions; numbers, such as losses, have none."""
        shapes = [list(tensor.shape) for tensor in mb.tensors_in(output)]
        if not any(length in shape or not shape for shape in shapes):
            raise StageError(
                f"{self._microbatches.named(microbatch)} has {length} positions, but the output has the shape {shapes}: they do "
                "not belong together (a shifted target must be as long as the inputs)"
            )

    def _finish_microbatch(self, output: Any, loss: torch.Tensor | None, microbatch: int) -> list[torch.Tensor]:
        """Store what a stage with a loss returned; return the tensors where its backward begins."""
        if loss is not None:
            is_part = loss.untyped_storage().nbytes() > loss.element_size()  # part of a larger storage, which it would keep alive
            self.losses[microbatch] = loss.detach().clone() if is_part else loss.detach()
            self.returned.append(self.losses[microbatch])
        if self._step_inputs.keeps_outputs:
            if not self.outputs:  # checked once, before any gradient is added
                self._step_inputs.check_output(output)
            self.outputs[microbatch] = mb.detached(output)
            self.returned += mb.tensors_in(self.outputs[microbatch])
        return [] if loss is None else [loss]

    def _hand_on(
        self, output: Any, state: MicrobatchState, borrowed: set[int], fixed: Collection[int], spans: Sequence[Span]
    ) -> list[torch.Tensor]:
        """Flatten a stage's output for the next one, and what it hands on; return its tensors, where its backward begins."""
        if self._skips is None:
            tree, tensors = flatten_message(output, state.place)
            self._pass_on(self._message(tree, tensors, borrowed, fixed, to=state.stage + 1), state)
            return tensors
        flattened = self._skips.flattened(output, state, spans)
        made = self._skips.note(state, flattened)
        sendable = dict(zip(map(id, made), self._sendable(made)))  # what several messages carry is copied once
        for user, (tree, tensors) in flattened.items():
            message = self._message(tree, tensors, borrowed, fixed, to=user, sendable=sendable)
            self._skips.count_made(state, user, message)
            if user == state.stage + 1:
                self._pass_on(message, state)
            elif (end := self._skips.hand_on(state, user, message)) is not None:
                end.output = message
                self._note_versions(end, message)
        return made

    def _note_cut_off(self, input_grads: InputGrads, made: Sequence[torch.Tensor], state: MicrobatchState) -> None:
        """Note that no gradient of a microbatch will come to earlier stages which want one, unless it comes past this stage."""
        if not self._has_backward or input_grads.anchor is None or any(tensor.requires_grad for tensor in made):
            return
        if self._skips is None or not self._skips.lead_past(state.stage):
            self.cut_off[state.stage] += 1

    def _made(self, output: Any, state: MicrobatchState) -> list[torch.Tensor]:
        """Return the tensors of a stage's result, where its backward begins."""
        if self._skips is None:
            return flatten_message(output, state.name)[1]
        return self._skips.note(state, self._skips.flattened(output, state))

    def _sendable(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors to send for a stage's results."""
        non_activations = self.non_activations().keys()  # the stage keeps these, and may change them while they are sent
        return all_dense([tensor if non_activations.isdisjoint(keys_of([tensor])) else tensor.clone() for tensor in tensors])

    def _message(
        self,
        tree: str,
        tensors: Sequence[torch.Tensor],
        borrowed: set[int],
        fixed: Collection[int],
        *,
        to: int,
        sendable: Mapping[int, torch.Tensor] | None = None,
    ) -> Message:
        """Return the message with a stage's results for another stage.

        Args:
            sendable: by identity of each tensor, what to send for it, if that is known.
        """
        sent = self._sendable(tensors) if sendable is None else [sendable[id(tensor)] for tensor in tensors]
        if to in self._stages:
            sent = list(_apart(sent if sendable is None else without_inference(sent), borrowed))
        metas = metas_of(sent, tensors)
        may_change = not self._local and self._may_change(metas, tensors, fixed)
        return Message(MessageSpec(tree, metas, may_change), list[torch.Tensor | None](sent))

    def _pass_on(self, message: Message, state: MicrobatchState) -> None:
        """Give a message to the next stage, or keep it until it is sent."""
        if state.stage + 1 in self._stages:
            self._microbatches[state.stage + 1, state.microbatch].input = message
        else:
            state.output = message
            self._note_versions(state, message)

    def _note_versions(self, state: MicrobatchState, message: Message) -> None:
        """Note the versions of tensors that wait to be sent, if other computations may run before the send."""
        if self._traffic.transport.waits_on_device:
            state.unsent_versions = versions_of(message.tensors)

    def _may_change(self, metas: Sequence[TensorMeta], tensors: Sequence[torch.Tensor], fixed: Collection[int]) -> bool:
        """Return whether outputs that need no gradient now may need one in a later step.

        Next to an output that needs a gradient, outputs that are only passed through, such as a mask of the batch or a buffer,
        never need one. If no output needs a gradient, the whole stage may have been skipped.
        """
        others = [tensor for meta, tensor in zip(metas, tensors) if not meta.requires_grad and may_need_later(meta)]
        if not others or not any(meta.requires_grad for meta in metas):
            return bool(others)
        kinds = self.non_activations()  # parameters may be unfrozen
        return not all(key in fixed or kinds.get(key, PARAMETER) != PARAMETER for one in others for key in keys_of([one]))

    def backward(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        evictions.before_backward(state)
        graph, gradients = self._graph(state)
        graph.run_backward(gradients)
        builder = None if _are_absent(gradients) else self._stages[action.stage].dw_builder
        del gradients  # freed before `builder` computes more; and `_hand_back` counts owners
        if builder is not None:
            builder()()
        self._divided.latest[action.stage] = action.microbatch
        self._new_gradients.separate(action.stage)
        if self._sequences is not None:
            evictions.handed_back(state, *self._sequences.hand_back(graph.input_grads.gradients, state))
        evictions.after_backward(state)
        self._hand_back(graph.input_grads, state)

    def backward_input(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        evictions.before_backward(state)
        graph, gradients = self._graph(state)
        is_idle = _are_absent(gradients)
        builder = None if is_idle else self._stages[action.stage].dw_builder
        is_first_look = not is_idle and action.stage in self._hooks.unheard  # runs as a whole, unlike others of its kind
        half = self._divided.backward_input(state.stage, state.microbatch, graph, gradients, builder)
        input_grads = graph.input_grads
        # `owned` counts owners; and everything that the weight gradient does not need is freed, with attributes of Functions.
        del graph, gradients
        half.replace(owned(half.gradients(), beside=input_grads.gradients))
        state.half = half
        self._new_gradients.separate(action.stage)
        if self._sequences is not None:
            evictions.handed_back(state, *self._sequences.hand_back(input_grads.gradients, state))
        evictions.after_backward_input(state, half.gradients(), is_idle=is_idle or is_first_look, is_whole=self._divided.is_whole)
        self._hand_back(input_grads, state)

    def backward_weight(self, action: Action, state: MicrobatchState, evictions: Evictions) -> None:
        assert state.half is not None, "backward_weight follows backward_input"
        half, state.half = state.half, None
        self._divided.backward_weight(state.stage, state.microbatch, half)
        del half  # frees its part of the graph, before that memory is counted as free
        self._new_gradients.separate(action.stage)
        evictions.after_backward(state)

    def _graph(self, state: MicrobatchState) -> tuple[Graph, list[torch.Tensor | None]]:
        """Take the inputs of a backward: the graph of its microbatch, and the gradients of the stage's outputs."""
        assert state.graph is not None, "a backward follows its forward"
        graph, state.graph = state.graph, None
        if state.stage in self._with_loss:
            loss, scale = self.losses[state.microbatch], self._step_inputs.loss_scales[state.microbatch]
            gradients: list[torch.Tensor | None] = [torch.full_like(loss, scale)]
        else:
            assert state.output_gradients is not None, "a backward follows the receipt of its gradients"
            gradients, state.output_gradients = state.output_gradients.tensors, None
            if self._skips is not None:
                gradients = self._skips.gradients(state, gradients)
        return graph, gradients if state.left is None else gradients + state.left.summed()

    def _hand_back(self, input_grads: InputGrads, state: MicrobatchState) -> None:
        stage, microbatch = state.stage, state.microbatch
        if stage in self._without_input_gradients:
            return
        waiting = set() if state.half is None else keys_of(state.half.gradients())  # these may become a `.grad`, too
        sent = [None if gradient is None else dense(gradient) for gradient in owned(input_grads.gradients, waiting)]
        input_grads.gradients.clear()  # the graph keeps `input_grads` until the weight gradient has been computed
        for source, gradients in ({stage - 1: sent} if self._skips is None else self._skips.hand_back(state, sent)).items():
            metas = (None if gradient is None else meta_of(gradient, requires_grad=False) for gradient in gradients)
            message = Message(MessageSpec("", tuple(metas)), gradients)
            end: MicrobatchState | None = state
            if source != stage - 1:
                assert self._skips is not None
                end = self._skips.return_(state, source, message)
            elif source in self._stages:
                self._microbatches[source, microbatch].output_gradients, end = message, None
            if end is not None:
                end.input_gradients = message
                self._note_versions(end, message)


def _nothing(tensor: torch.Tensor) -> torch.Tensor:
    """Return 0, from which a backward leads to a tensor; its values may be infinite, so they are no factor."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0).sum()


def modules_of(loss_fn: Any) -> Iterator[torch.nn.Module]:
    """Yield the module that a loss function is, or whose method it is, if there is one."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, torch.nn.Module):
        yield owner


def _are_absent(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether a microbatch got no gradient at all, so that its backward has nothing to do."""
    return bool(gradients) and all(gradient is None for gradient in gradients)


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


def _storages(tensors: Iterable[torch.Tensor | None]) -> list[torch.UntypedStorage]:
    """Return the storages of those tensors that have one, each once."""
    found = (storage for tensor in tensors if tensor is not None and not is_lazy(tensor) for storage in storages_of(tensor))
    return list({address_of(storage): storage for storage in found}.values())
