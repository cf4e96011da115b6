"""What a forward gets: values from other stages enter its graph as leaves, and their gradients go back the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.autograd.graph import increment_version

from bpipe.backward.autograd import Graph, Return, enter
from bpipe.backward.new_gradients import owned
from bpipe.comm.wire.message import MessageSpec, dense, meta_of
from bpipe.engine.conventions import Call, Convention, Incoming
from bpipe.engine.evictions import Evictions
from bpipe.engine.microbatch_state import Message, MicrobatchState, versions_of
from bpipe.engine.setup import Setup
from bpipe.engine.stage_links import OUTPUT, Way
from bpipe.engine.values import Layout, added, count, layout_of, places_of, without_inference
from bpipe.errors import StageError
from bpipe.memory.saved.storages import keys_of, num_tensors
from bpipe.model.stage import find_mesh
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

NO_SPEC = MessageSpec("", ())  # of gradients that others are still added to
Arrived = Sequence[tuple[Way, Message]]  # what a forward gets from other stages


class Inputs:
    """The inputs of one rank's forwards during one step.

    Args:
        setup: of the step.
        evictions: count what the rank holds.
    """

    def __init__(self, setup: Setup, evictions: Evictions) -> None:
        self._setup, self._evictions, self._microbatches = setup, evictions, setup.traffic.microbatches

    def arrived(self, state: MicrobatchState) -> Arrived:
        """Take what other stages have made for a forward.

        Raises:
            StageError: a stage of this rank has changed a tensor in place since it was handed over.
        """
        found = []
        for way in state.links.incoming:
            edge = state.edges[way]
            assert edge.values is not None, "a forward follows the receipt of its values"
            found.append((way, edge.values))
            edge.values, versions, edge.unsent_versions = None, edge.unsent_versions or (), None
            if any(version_of(tensor) != version for tensor, version in versions):
                raise StageError(
                    f"{state}: a value of stage {way[0]} was changed in place by another stage on this rank before this one "
                    "used it. Clone it where it is changed"
                )
        return found

    def call(self, state: MicrobatchState, arrived: Arrived) -> Call:
        """Return the call of a forward, in which what has arrived has become leaves and arguments."""
        setup, stage, microbatch = self._setup, state.stage, state.microbatch
        given, incoming = setup.given, [self._incoming(state, *one) for one in arrived]
        args, kwargs, shapes = given.args[microbatch], given.kwargs[microbatch], given.descriptions[microbatch]
        call = Call(state, setup.stages[stage], setup.parts[stage], args, kwargs, shapes, incoming)
        if incoming or setup.conventions:
            self._enter(call)
        return call

    def _incoming(self, state: MicrobatchState, way: Way, message: Message) -> Incoming:
        """Return the values in a message, and which of their tensors others have, too."""
        spec, tensors, (source, first), links = message.spec, message.tensors, way, state.links
        needed = [meta is not None and meta.requires_grad and self._setup.has_backward for meta in spec.tensors]
        is_first, is_output = first == state.stage, way == links.before
        is_borrowed = source in self._setup.stages or not is_first
        if self._setup.is_plain:
            layout: Layout = {OUTPUT: (spec.tree, range(len(tensors)))}
            return Incoming(way, spec, layout, tensors, needed, is_output, is_borrowed)
        where = f"{state}: the message from stage {source}"
        layout, fixed = layout_of(spec, links.incoming[way], where, is_all=is_first)
        last, there = links.last_users[way], [at for at, tensor in enumerate(tensors) if tensor is not None]
        if not is_first:
            fixed = dict.fromkeys(there, last) if last > state.stage else {}
            return Incoming(way, spec, layout, tensors, needed, is_output, is_borrowed, shared=there, fixed=fixed)
        later = [name for names in links.later[way].values() for name in names]
        held = places_of(layout, later)
        fixed = dict.fromkeys(held, last) | {at: max(user, last if at in held else 0) for at, user in fixed.items()}
        shared = held if is_output or not (is_borrowed or later) else there
        return Incoming(way, spec, layout, tensors, needed, is_output, is_borrowed, shared=shared, fixed=fixed, held=held)

    def _enter(self, call: Call) -> None:
        """Make what a call gets the leaves of its graph, and put it into the arguments."""
        trains, groups = self._setup.has_backward, [(one, *one.entering()) for one in call.incoming]
        others = [(convention, *convention.entering(call.state)) for convention in self._setup.conventions]
        tensors = [tensor for _, some, _ in (*groups, *others) for tensor in some]
        needed = [is_needed and trains for _, _, some in (*groups, *others) for is_needed in some]
        entered, call.input_grads = enter(tensors, needed)
        rest, values, find = iter(entered), dict[str, Any](), partial(find_mesh, call.stage)
        for one, some, _ in groups:
            one.entered = dict(zip(one.present, islice(rest, len(some))))
            call.returns.append(Return(one.way, one.numbers, sum(one.needed)))
            values |= one.values(find)
            call.shapes += one.description
        if OUTPUT in values:
            value = values.pop(OUTPUT)
            call.args = tuple(value) if isinstance(value, (tuple, list)) else (value,)
            before = next(one for one in call.incoming if one.is_output)
            call.received = call.args if len(before.layout) == 1 else tuple(before.entered.values())
        lent = [pair for one, *_ in groups for pair in one.lent()] if trains else []
        for convention, some, are_needed in others:
            own = list(islice(rest, len(some)))
            size = sum(are_needed) if trains else 0
            call.returns.append(Return(convention, range(size), size))
            convention.arguments(call, values, own)
            lent += zip(some, own) if trains else ()
        call.lent = [(theirs, ours, version_of(ours)) for theirs, ours in lent if theirs is not ours]
        call.shared = [] if self._setup.is_plain else [shared for one in call.incoming for shared in one.unchangeable()]

    def check(self, call: Call) -> None:
        """Report in-place changes to autograd, so that the previous stage's backward raises if it has saved a changed tensor.

        Raises:
            StageError: a value was changed that another stage has, too, which may have saved it, or uses it later.
        """
        for name, tensor, version in call.shared:
            if version_of(tensor) != version:
                what = self._setup.title(name) if name else "its input, which an earlier stage has handed on as another value, too,"
                raise StageError(f"{call.state}: {what} was changed in place, and another stage has it, too. Clone it before")
        for theirs, ours, version in call.lent:
            if version_of(ours) != version:
                increment_version(theirs)

    # What later stages of the rank use, too

    def share(self, call: Call) -> None:
        """Give values to the stages of this rank that use them later."""
        for one in call.incoming:
            for user, names in call.state.links.later.get(one.way, {}).items():
                places = places_of(one.layout, names)
                tensors = [without_inference(tensor) if at in places else None for at, tensor in enumerate(one.tensors)]
                edge = self._microbatches[user, call.state.microbatch].edges[one.way]
                edge.values, edge.unsent_versions = Message(one.spec, tensors), versions_of(tensors)

    def count(self, call: Call) -> None:
        """Note the bytes of values, and which tensors other stages of this rank have, too."""
        memory, state, here = call.state.memory, call.state, self._setup.stages.keys()
        assert memory is not None, "a microbatch is entered in the ledger when its forward begins"
        for one in call.incoming:
            count(memory, one.layout, one.tensors, one.needed)
            source, first = one.way
            outgoing = self._microbatches[source, state.microbatch].links.outgoing if source in here else {}
            users = {user for (_, user), names in outgoing.items() if names != [OUTPUT]}
            is_elsewhere = bool(users - {state.stage}) if one.is_output else not here >= users
            if is_elsewhere or state.links.last_users[one.way] > state.stage != first:
                memory.lent += one.present.values()  # messages to other stages may carry the same tensors
            elif state.links.later.get(one.way):
                memory.lent += [tensor for at in one.held if (tensor := one.tensors[at]) is not None]

    # Gradients

    def give_to_conventions(self, state: MicrobatchState, graph: Graph) -> None:
        """Give the gradients of what did not come from other stages to the conventions, and leave the others."""
        gradients, num_given, num_collected = graph.input_grads.gradients, 0, 0
        for receiver, _, size in reversed(graph.returns):
            if isinstance(receiver, Convention):
                begin = len(gradients) - size
                own, gradients[begin:] = owned(gradients[begin:]), []
                given, collected = receiver.give_back(state, own)
                num_given, num_collected = num_given + given, num_collected + collected
        self._evictions.handed_back(state, num_given, num_collected)

    def give_back(self, state: MicrobatchState, graph: Graph) -> None:
        """Give the gradients of values to the stages that gave them."""
        ways = [one for one in graph.returns if one.receiver in state.links.returning]
        if not ways:
            return
        waiting = set() if state.half is None else keys_of(state.half.gradients())  # these may become a `.grad`, too
        gradients = [None if one is None else dense(one) for one in owned(graph.input_grads.gradients, waiting)]
        graph.input_grads.gradients.clear()  # the graph keeps `input_grads` until the weight gradient has been computed
        if not self._setup.is_plain:  # others are added to them
            together = num_tensors([one for one in gradients if one is not None])
            gradients = [one if one is None else _alone(one, together) for one in gradients]
        rest = iter(gradients)
        for way, numbers, size in ways:
            self._return(state, way, dict(zip(numbers, rest)), size)

    def _return(self, state: MicrobatchState, way: Way, gradients: Mapping[int, torch.Tensor | None], size: int) -> None:
        """Give the gradients of one way to the stage that has given the values: their source, or their first user on this rank."""
        (source, first), microbatch = way, state.microbatch
        edge = self._microbatches[first, microbatch].edges[way]
        known: list[torch.Tensor | None] = [None] * size if edge.gradients is None else edge.gradients.tensors
        for number, gradient in gradients.items():
            known[number] = added(gradient, known[number])
        if first != state.stage:
            edge.gradients = Message(NO_SPEC, known)
            return
        metas = (None if gradient is None else meta_of(gradient, requires_grad=False) for gradient in known)
        message = Message(MessageSpec("", tuple(metas)), known)
        if source in self._setup.stages:
            edge.gradients, self._microbatches[source, microbatch].edges[way].gradients = None, message
        else:
            edge.gradients = message
            edge.unsent_versions = versions_of(known) if self._setup.traffic.transport.waits_on_device else None


def _alone(gradient: torch.Tensor, together: Mapping[int, int]) -> torch.Tensor:
    """Copy a gradient that shares memory with others, as those of `torch.stack` do: messages are freed at different times."""
    is_shared = any(together[key] > 1 for key in keys_of([gradient]))
    return gradient.clone() if is_shared else gradient
