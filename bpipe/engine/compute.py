"""Forwards and backwards of the stages on a rank. The user's code runs here, in the caller's thread, and nowhere else.

    forward     what has arrived -> leaves and arguments -> the module -> its loss, or values for other stages
    backward    the gradients of these values -> the graph -> the gradients of what had arrived

Around a forward's module are, from the outside to the inside: what notices backwards inside it, whether gradients are computed,
what follows the tensors that are saved or lets nothing be saved, what the conventions need, and the user's forward contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any

import torch

from bpipe.backward.autograd import Graph, edges_of
from bpipe.backward.divided import Divided
from bpipe.backward.new_gradients import apart, owned
from bpipe.backward.user_hooks import UserHooks
from bpipe.engine.conventions import Call
from bpipe.engine.evictions import Evictions
from bpipe.engine.inputs import Inputs
from bpipe.engine.microbatch_state import MicrobatchState
from bpipe.engine.outputs import Outputs, Results
from bpipe.engine.remembered import Memory
from bpipe.engine.setup import Setup
from bpipe.model.examples import compare_examples
from bpipe.model.stage import in_context

__all__: list[str] = []


class Compute:
    """The computations of one rank during one step.

    Args:
        setup: of the step.
        memory: what the schedule remembers from step to step.
        hooks: the user's hooks.
        undivided: the stages whose whole backward runs in `backward_input`.
    """

    def __init__(self, setup: Setup, memory: Memory, hooks: UserHooks, undivided: set[int]) -> None:
        self.results, self.outputs, self.hooks, self._setup = Results(setup), Outputs(setup), hooks, setup
        self.evictions = Evictions(setup, memory, self.results.returned)
        self.inputs = Inputs(setup, self.evictions)
        self._unnoticed = {*setup.stages} if setup.has_backward else set()
        self._unwatched = {*setup.stages} if setup.has_backward and setup.is_learning else set()
        # No bound method, which would form a cycle with `_divided` that keeps a step's tensors alive.
        self._separate = partial(
            _separate, {x: [p for p in of.parameters if p.requires_grad and p.grad is None] for x, of in setup.parts.items()}
        )
        self._undivided = undivided

    # Forwards

    def forward(self, state: MicrobatchState) -> None:
        """Run a forward; what it makes for other stages waits to be sent or used."""
        num_common, call = self.hooks.num_common, self.inputs.call(state, self.inputs.arrived(state))
        self.inputs.share(call)
        if self._setup.has_backward:
            self.evictions.follow(call)
            if not self._setup.is_plain:
                self.inputs.count(call)
        with self.noticing(state), torch.set_grad_enabled(self._setup.has_backward), followed(call):
            self.run(call)
        self.outputs.hand_on(call)
        if state.stage in self._setup.with_loss:
            self.results.finish(call)
            if call.stash is not None:
                self.evictions.returned(call)
        if self._setup.has_backward:
            self.keep(call, num_common)

    def run(self, call: Call) -> None:
        """Run a stage's module, and its loss if it has one."""
        with ExitStack() as around:
            for convention in self._setup.conventions:
                around.enter_context(convention.around(call))
            result = self._module(call)(*call.args, **call.kwargs)
        for convention in reversed(self._setup.conventions):
            result = convention.taken(call, result)
        call.output = result
        if call.stage.examples and not call.state.units.are_slices:  # they are of whole microbatches
            compare_examples(call.stage, call.args, call.output)
        if call.shared or call.lent:
            self.inputs.check(call)
        if call.state.stage in self._setup.with_loss:
            call.loss = self.results.loss(call)

    def keep(self, call: Call, num_common: int) -> None:
        """Keep the graph of a call for its backward.

        Args:
            num_common: how many hooks on several tensors there were before it.
        """
        state, has_loss = call.state, call.state.stage in self._setup.with_loss
        made = call.made if not has_loss else [] if call.loss is None else [call.loss]
        has_common = self.hooks.num_common > num_common
        state.graph = Graph(edges_of([*made, *call.left]), call.input_grads, has_common, call.returns, call.numbers)
        if state.stage in self._unwatched:
            self._unwatched.remove(state.stage)
            self._setup.loss_scale.watch(state.graph.edges, str(state))

    def noticing(self, state: MicrobatchState) -> AbstractContextManager[None]:
        """Notice in the first forward of a stage whether it or its loss runs a backward of its own."""
        if state.stage not in self._unnoticed:
            return nullcontext()
        self._unnoticed.remove(state.stage)
        return self._setup.noticing(state.stage, state)

    def _module(self, call: Call) -> Callable[..., Any]:
        """Return a stage's module as it runs for a microbatch: inside the forward context, if the user has registered one."""
        stage, unit, units = call.stage, call.state.microbatch, call.state.units
        return in_context(stage, unit // units) if stage.forward_contexts else stage.adapter or stage.submod

    # Backwards

    def backward(self, state: MicrobatchState) -> None:
        """Run a whole backward."""
        self.evictions.before_backward(state)
        graph = self._taken(state)
        is_absent = self._run_backward(state, graph)
        builder = None if is_absent else self._setup.stages[state.stage].dw_builder
        if builder is not None:
            builder()()
        if self.hooks.is_divided:
            self._divided.latest[state.stage] = state.microbatch
        self._separate(state.stage)
        if self._setup.conventions:
            self.inputs.give_to_conventions(state, graph)
        self.evictions.after_backward(state)
        self.inputs.give_back(state, graph)

    def _run_backward(self, state: MicrobatchState, graph: Graph) -> bool:
        """Run a graph; return whether no gradient has come at all. The gradients are freed when this returns."""
        gradients = self._gradients(state, graph)
        graph.run_backward(gradients)
        return _are_absent(gradients)

    def backward_input(self, state: MicrobatchState) -> None:
        """Run the half of a backward that makes the gradients of what has arrived."""
        self.evictions.before_backward(state)
        graph = self._taken(state)
        is_idle = self._run_half(state, graph)
        assert state.half is not None, "half of a backward leaves the other half"
        graph.edges = []  # everything that the weight gradient does not need is freed, with attributes of Functions
        state.half.replace(owned(state.half.gradients(), beside=graph.input_grads.gradients))
        self._separate(state.stage)
        if self._setup.conventions:
            self.inputs.give_to_conventions(state, graph)
        self.evictions.after_backward_input(state, state.half.gradients(), is_idle=is_idle, is_whole=self._divided.is_whole)
        self.inputs.give_back(state, graph)

    def _run_half(self, state: MicrobatchState, graph: Graph) -> bool:
        """Run the first half of a graph's backward, and keep the second; return whether it does not show what others keep.

        Either no gradient has come at all, or this backward runs as a whole, unlike others of its kind.
        """
        gradients = self._gradients(state, graph)
        is_absent = _are_absent(gradients)
        builder = None if is_absent else self._setup.stages[state.stage].dw_builder
        is_first_look = state.stage in self.hooks.unheard
        state.half = self._divided.backward_input(state.stage, state.microbatch, graph, gradients, builder)
        return is_absent or is_first_look

    def backward_weight(self, state: MicrobatchState) -> None:
        """Run the half of a backward that makes the gradients of weights."""
        self._run_other_half(state)  # which frees its part of the graph, before that memory is counted as free
        self._separate(state.stage)
        self.evictions.after_backward(state)

    def _run_other_half(self, state: MicrobatchState) -> None:
        assert state.half is not None, "backward_weight follows backward_input"
        half, state.half = state.half, None
        self._divided.backward_weight(state.stage, state.microbatch, half)

    @cached_property
    def _divided(self) -> Divided:
        """What splits backwards, made for the first one that is split."""
        return Divided(self._undivided, self.hooks, self._separate)

    def _taken(self, state: MicrobatchState) -> Graph:
        """Take the graph of a microbatch for its backward."""
        assert state.graph is not None, "a backward follows its forward"
        graph, state.graph = state.graph, None
        return graph

    def _gradients(self, state: MicrobatchState, graph: Graph) -> list[torch.Tensor | None]:
        """Take the gradients at which a backward begins, one for each edge of its graph."""
        has_loss = state.stage in self._setup.with_loss
        own: list[torch.Tensor | None] = []
        own += self.results.gradients(state) if has_loss else self.outputs.gradients(state, graph)
        for convention in self._setup.conventions:
            own += convention.gradients(state)
        return own


def _separate(without_gradient: dict[int, list[torch.nn.Parameter]], stage: int) -> None:
    """Separate the gradients that a backward of a stage has created, so that no two share memory."""
    if without := without_gradient[stage]:
        apart([parameter for parameter in without if parameter.grad is not None])
        without_gradient[stage] = [parameter for parameter in without if parameter.grad is None]


def followed(call: Call) -> AbstractContextManager[object]:
    """Return what follows the tensors that autograd saves, if anything does."""
    return nullcontext() if call.stash is None else call.stash.capture()


def _are_absent(gradients: Sequence[torch.Tensor | None]) -> bool:
    """Return whether a microbatch got no gradient at all, so that its backward has nothing to do."""
    return bool(gradients) and all(gradient is None for gradient in gradients)
