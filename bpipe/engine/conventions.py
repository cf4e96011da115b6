"""Calls of stages: how values become the arguments of a module, and how its result becomes values.

Without any convention the positional arguments are the output of the stage before, or else the batch, and the result is the output
for the stage behind. A shape whose stages are called in another way has a convention in a room of its own. `CONVENTIONS` says which
that is; only those of a plan's shapes are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from bpipe.backward.autograd import InputGrads, Return
from bpipe.comm.wire.dtensor import FindMesh
from bpipe.comm.wire.message import MessageSpec, unflatten_message
from bpipe.engine.microbatch_state import MicrobatchState
from bpipe.engine.stage_links import Way
from bpipe.engine.values import Layout
from bpipe.memory.saved.stash import Stash
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

CONVENTIONS = {"skips": "bpipe.skips.skip_arguments:SkipArguments", "local": "bpipe.relaxed.own_losses:OwnLosses"}  # by shape

Gradients = Sequence[torch.Tensor | None]


@dataclass(slots=True, eq=False)
class Incoming:
    """The values in a message that a forward gets.

    Args:
        way: the stage that made them, and their first user on this rank.
        spec: of the message.
        layout: by name, the pytree of a value and the places of its tensors.
        tensors: of the message; None for those that this stage does not use.
        needed: for each of these, whether it needs a gradient.
        is_output: whether the output of the stage before is among them.
        is_borrowed: whether an earlier stage on this rank has the tensors.
        shared: the places of what an earlier or a later stage on this rank has, too.
        fixed: the places of what a later stage on any rank has, too, at least in part, with the last such stage.
        held: the places of what later stages on this rank use.
        entered: by place, the tensors as the stage gets them.
    """

    way: Way
    spec: MessageSpec
    layout: Layout
    tensors: list[torch.Tensor | None]
    needed: list[bool]
    is_output: bool
    is_borrowed: bool
    shared: Collection[int] = ()
    fixed: Mapping[int, int] = field(default_factory=dict)
    held: Collection[int] = ()
    entered: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def present(self) -> dict[int, torch.Tensor]:
        """The tensors that this stage uses, by place."""
        return {at: tensor for at, tensor in enumerate(self.tensors) if tensor is not None}

    def entering(self) -> tuple[list[torch.Tensor], list[bool]]:
        """Return these tensors, and which of them need a gradient."""
        return list(self.present.values()), [self.needed[at] for at in self.present]

    @property
    def numbers(self) -> list[int]:
        """The numbers of those of them that need a gradient, among all tensors of the message that need one."""
        return [sum(self.needed[:at]) for at in self.present if self.needed[at]]

    @property
    def description(self) -> str:
        """What they look like."""
        if self.is_output:
            return f" {self.spec}"
        return f" with {', '.join(self.layout)}: {[list(tensor.shape) for tensor in self.present.values()]}"

    def values(self, find_mesh: FindMesh) -> dict[str, Any]:
        """Put the values together again, by name."""
        return {
            name: unflatten_message(tree, [self.entered[place] for place in places], find_mesh)
            for name, (tree, places) in self.layout.items()
        }

    def lent(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the tensors that others on this rank have, too, each with the one that the stage gets over the same memory."""
        for at in self.entered if self.is_output and self.is_borrowed else self.shared:
            tensor = self.tensors[at]
            assert tensor is not None, "what has entered is there"
            yield tensor, self.entered[at]

    def unchangeable(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Yield what another stage has or will have, too: its name, the tensor as this stage gets it, and the version of that."""
        for name, (_, places) in self.layout.items():
            for at in places:
                if (at in self.shared or at in self.fixed) and not self.entered[at].is_inference():
                    yield name, self.entered[at], version_of(self.entered[at])


@dataclass(slots=True, eq=False)
class Call:
    """A call of a stage's module for a microbatch, or for a slice of one.

    Args:
        state: of the microbatch.
        stage: whose module is called.
        parts: its modules and parameters.
        args: the positional arguments.
        kwargs: the keyword arguments.
        shapes: a description of what the module gets.
        incoming: the values that have come from other stages.
        received: what has entered of the message from the stage before; the arguments, if there is nothing else in it.
        lent: what has entered and others on this rank may own: their tensor, ours over the same memory, our version.
        input_grads: collects the gradients of all that has entered.
        shared: what another stage has, too, and may not be changed: its name, the tensor, its version.
        returns: who gets these gradients, in their order: the way of some values, or what had other tensors enter.
        saves: whether autograd saves tensors; it does not in the first of two forwards.
        stash: follows these; None if they are not followed.
        output: the module's result, without what conventions have taken.
        values: these: what other stages get besides the output, by name.
        prediction: what the loss gets, if that is not the output.
        left: the tensors that other computations of the stage will get.
        loss: of a stage that has one.
        made: the tensors that other stages get, each once.
        numbers: by way, the numbers of its tensors among those of `made` that need a gradient.
    """

    state: MicrobatchState
    stage: PipelineStage
    parts: ModuleSnapshot
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    shapes: str
    incoming: list[Incoming]
    received: tuple[Any, ...] = ()
    lent: list[tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=list)
    input_grads: InputGrads = field(default_factory=InputGrads)
    shared: list[tuple[str, torch.Tensor, int]] = field(default_factory=list)
    returns: list[Return] = field(default_factory=list)
    saves: bool = True
    stash: Stash | None = None
    output: Any = None
    values: Mapping[str, Any] = field(default_factory=dict)
    prediction: tuple[Any] | None = None
    left: Sequence[torch.Tensor] = ()
    loss: torch.Tensor | None = None
    made: Sequence[torch.Tensor] = ()
    numbers: dict[Way, list[int]] = field(default_factory=dict)

    @property
    def result(self) -> Any:
        """What the loss gets."""
        return self.output if self.prediction is None else self.prediction[0]


class Convention:
    """How the stages of a shape are called. Each method does nothing: a subclass overrides those that it needs.

    Attributes:
        has_losses: whether each stage has a loss of its own.
    """

    has_losses = False

    def __init__(self, *setup: Any) -> None:
        """Make the convention of a step from its `Setup`."""

    def title(self, name: str) -> str:
        """Return what users call a value of the flow, for messages; empty if it is none of this convention's."""
        return ""

    def entering(self, state: MicrobatchState) -> tuple[list[torch.Tensor], list[bool]]:
        """Return what a call gets that did not come from other stages, and which of it needs a gradient."""
        return [], []

    def arguments(self, call: Call, values: Mapping[str, Any], entered: Sequence[torch.Tensor]) -> None:
        """Put what has entered into the arguments: values of other stages, by name, and what `entering` has returned."""

    def around(self, call: Call) -> AbstractContextManager[object]:
        """Return what surrounds the call of the module."""
        return nullcontext()

    def taken(self, call: Call, result: Any) -> Any:
        """Take what belongs to this convention out of a module's result, and return the rest."""
        return result

    def loss(self, call: Call, compute: Callable[[], Any]) -> Any:
        """Return the loss of a call, which `compute` returns; None if `finish` will compute it, with what other calls have left."""
        return compute()

    def finish(self, call: Call) -> None:
        """Compute the loss of several calls behind the last of them, when no graph is built any more."""

    def gradients(self, state: MicrobatchState) -> Gradients:
        """Take the gradients that have come for what `call.left` was."""
        return ()

    def give_back(self, state: MicrobatchState, gradients: Gradients) -> tuple[int, int]:
        """Take the gradients of what `entering` returned that need one.

        Returns:
            The bytes of those that are the first ones for their tensors, and of those that had come for what `call.left` was.
        """
        return 0, 0
