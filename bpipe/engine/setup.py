"""What one rank's step begins with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from bpipe.backward.loss_scale import LossScale
from bpipe.engine.conventions import Convention
from bpipe.engine.traffic import Traffic
from bpipe.memory.saved.storages import storages_of
from bpipe.model.call import Loss
from bpipe.model.microbatch import tensors_in
from bpipe.model.stage import ModuleSnapshot, PipelineStage
from bpipe.parallel.shared_weights import Shared
from bpipe.plan.plan import Plan
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

PARAMETER, BUFFER, BATCH = "a parameter", "a buffer", "the step's batch"


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
        loss_gradient: the gradient with which the backward of each loss starts.
        loss_scale: the same, for what stages add to gradients by themselves; None if they take slices, whose share is unknown.
        keeps_outputs: whether the last stage's outputs are returned.
        check_output: raises if outputs like this one of a microbatch cannot be merged.
    """

    args: Sequence[tuple[Any, ...]]
    kwargs: Sequence[dict[str, Any]]
    targets: Sequence[Any] | None
    descriptions: Sequence[str]
    loss_fn: Loss
    loss_parameters: Sequence[tuple[str, torch.Tensor]]
    loss_kwargs: Mapping[str, Any]
    loss_gradient: float
    loss_scale: float | None
    keeps_outputs: bool
    check_output: Callable[[Any], None]


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """What the parts of one rank's step share.

    Args:
        plan: of the step.
        rank: this rank's place in it.
        stages: on this rank, by index.
        parts: of these, a snapshot of modules, parameters and buffers when the step begins.
        given: the inputs and options of the step.
        traffic: this rank's transfers.
        loss_scale: the factor that losses get.
        is_learning: whether the step is the first one with its shapes.
        conventions: by which the stages are called, in the order in which arguments are made.
        shared: the weights that other ranks have, too.
    """

    plan: Plan
    rank: int
    stages: Mapping[int, PipelineStage]
    parts: Mapping[int, ModuleSnapshot]
    given: StepInputs
    traffic: Traffic
    loss_scale: LossScale
    is_learning: bool
    conventions: list[Convention]
    shared: Shared
    _alive: list[StorageWeakRef] = field(default_factory=list, init=False)

    @cached_property
    def has_backward(self) -> bool:
        """Whether graphs are built."""
        return self.plan.has_backward

    @cached_property
    def is_plain(self) -> bool:
        """Whether a stage gives its output to the stage behind, and nothing else to any."""
        return not self.plan.flow.has_asides

    @cached_property
    def with_loss(self) -> set[int]:
        """The stages that have a loss."""
        have_all = any(convention.has_losses for convention in self.conventions)
        return {index for index, stage in self.stages.items() if stage.is_last or have_all}

    def title(self, name: str) -> str:
        """Return what users call a value, for messages."""
        return next((title for one in self.conventions if (title := one.title(name))), "its output")

    def noticing(self, stage: int, place: object) -> AbstractContextManager[None]:
        """Notice whether a stage, or its loss, runs a backward of its own."""
        modules, of_loss = [self.stages[stage].submod], list[tuple[str, torch.Tensor]]()
        if stage in self.with_loss:
            modules += modules_of(self.given.loss_fn)
            of_loss += self.given.loss_parameters
        parameters = [*self.parts[stage].parameters, *(one for _, one in of_loss)]
        return self.loss_scale.noticing(parameters, chain(*(one.named_parameters() for one in modules), of_loss), place)

    @cached_property
    def non_activations(self) -> dict[int, str]:
        """The storages that are no activations, with the kind of each: parameters, buffers and the user's batch.

        They are searched for when first needed in a step. Weak references keep their addresses from being reused: an activation
        must not get the kind of a buffer that the stage has replaced.
        """
        modules = [module for parts in self.parts.values() for module in parts.modules]
        tensors: dict[str, Sequence[torch.Tensor | None]] = {
            BATCH: tensors_in([self.given.args, self.given.kwargs, self.given.targets], set()),
            BUFFER: [buffer for module in modules for buffer in module._buffers.values()],
            PARAMETER: [parameter for module in modules for parameter in module._parameters.values()],
        }
        found = dict[int, str]()
        for kind, some in tensors.items():
            for storage in (one for tensor in some if tensor is not None and not is_lazy(tensor) for one in storages_of(tensor)):
                found[address_of(storage)] = kind
                self._alive.append(StorageWeakRef(storage))
        return found


def modules_of(loss_fn: Any) -> Iterator[torch.nn.Module]:
    """Yield the module that a loss function is, or whose method it is, if there is one."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    if isinstance(owner, torch.nn.Module):
        yield owner
