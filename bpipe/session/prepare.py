"""Prepare a call for a step: its microbatches, the present modules, and a description of both."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import NamedTuple
from weakref import ref

import torch

from bpipe.backward.without_loss import check_loss
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.device import is_capturing
from bpipe.engine.compute import StepInputs, modules_of
from bpipe.engine.run import Run
from bpipe.errors import ConfigurationError
from bpipe.memory.makeup import Makeups
from bpipe.model.call import Call, CutBatch, microbatches_of
from bpipe.model.merging import check_merge
from bpipe.model.plain_numbers import InputForms
from bpipe.model.stage import ModuleSnapshot, mode_of
from bpipe.model.ties import check_ties
from bpipe.parallel.fsdp import trained
from bpipe.plan.plan import Plan
from bpipe.recomputation.reachable import Reachable
from bpipe.session.context import RankContext
from bpipe.session.outside_graphs import check_outside_graphs
from bpipe.slices.loss_check import LossCheck
from bpipe.slices.protocol import check_takes_slices
from bpipe.torch_private.owners_and_versions import FOLLOWS, check_follows

__all__: list[str] = []


class PreparedCall(NamedTuple):
    """A call that is ready to run on this rank."""

    step_inputs: StepInputs
    parts: Mapping[int, ModuleSnapshot]
    losses: list[torch.Tensor] | None
    weights: list[float] | None
    forms: InputForms
    batch_size: int  # in samples, of what this rank's stages use; 0 if unknown


class Preparation:
    """Prepare the calls of one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._loss_makeups = Makeups()
        self._makeups: dict[int, int] = {}  # of the stages that take slices, as they were checked
        self._has_trained = False
        self._of_loss: list[tuple[str, ref[torch.Tensor]]] | None = None  # the parameters that it led to in the first training step

    def inputs(self, call: Call, plan: Plan, *, is_training: bool) -> PreparedCall:
        """Cut a call into a plan's microbatches, and look at the modules that will run."""
        self._check_context(is_training=is_training)
        if call.is_step:
            of_loss = {"target_mbs": call.target_mbs, "losses": call.losses, "loss_kwargs": call.loss_kwargs or None}
            check_loss(self._context.loss_fn, "step()", target=call.target, **of_loss)
        if not FOLLOWS and any(map(plan.evicted, range(plan.num_ranks))):
            check_follows()
        context, holds_last_stage = self._context, any(stage.is_last for stage in self._context.stages.values())
        has_loss = holds_last_stage or plan.flow.arguments("local") is not None
        given = microbatches_of(call, plan.num_microbatches, context.specs, is_training=is_training)
        used = compress(given.sizes, (any(stage.is_first for stage in context.stages.values()), True, has_loss))
        batch_size = next(filter(None, used), 0)
        if context.slicing is not None:
            given = context.slicing.cut(given)
        if is_training:
            self._check_training(call, given, plan, has_loss=has_loss)
        keeps_outputs = call.return_outputs and holds_last_stage
        parts = {index: stage.parts() for index, stage in context.stages.items()}
        if context.slicing is not None:
            self._check_take_slices(parts)
        modes = [mode_of(stage, parts[index]) for index, stage in context.stages.items()]
        if has_loss:
            modes += [ModuleSnapshot.of(loss, self._loss_makeups).mode() for loss in modules_of(context.loss_fn)]
        loss_scales = self._loss_scales(given, plan.num_microbatches)
        forms = self._context.numbers.forms(" ".join([*modes, str(keeps_outputs)]), given.descriptions())
        step_inputs = StepInputs(
            args=given.args,
            kwargs=given.kwargs,
            targets=given.targets,
            descriptions=forms.counted,
            loss_fn=context.loss_fn,
            loss_parameters=self._loss_parameters() if has_loss and is_training else (),
            loss_kwargs=call.loss_kwargs or {},
            loss_scales=loss_scales,
            loss_scale=None if context.scale_grads and context.slicing is not None else loss_scales[0],
            keeps_outputs=keeps_outputs,
            check_output=lambda output: check_merge([output], context.specs.output),
            lengths=given.lengths,
            loss_check=self._loss_check(given, is_training=is_training),
        )
        return PreparedCall(step_inputs, parts, call.losses, given.weights if context.scale_grads else None, forms, batch_size)

    def _check_training(self, call: Call, given: CutBatch, plan: Plan, *, has_loss: bool) -> None:
        """Raise if what a call gives, or what stages share with other processes, would train something else than it seems to."""
        context = self._context
        # What a loss function keeps later it may have made itself, and left out of the loss.
        loss_fn = context.loss_fn if has_loss and not self._has_trained else None
        num_users = plan.num_stages if isinstance(context.transport, LoopbackTransport) else len(context.stages)
        check_outside_graphs(call, loss_fn, plan.num_microbatches * plan.slices, num_users)
        self._has_trained = True
        if has_loss and given.targets is None:
            raise ConfigurationError(
                f"stage {next(iter(context.stages))} has a loss of its own but step() got no target: pass target= (or target_mbs=) "
                "on every rank"
                if plan.flow.arguments("local") is not None
                else "the last stage has a loss_fn but step() got no target: pass target= (or target_mbs=) on the last stage's rank"
            )
        modules = {index: stage.submod for index, stage in context.stages.items()}
        check_ties(modules, trained, are_alone=not isinstance(context.transport, LoopbackTransport))

    def _loss_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that the loss function leads to; a search of all that it keeps takes too long for each step."""
        if self._of_loss is None:
            self._of_loss = [(name, ref(one)) for name, one in Reachable([self._context.loss_fn]).parameters]
        return [(name, one) for name, refer in self._of_loss if (one := refer()) is not None]

    def _check_take_slices(self, parts: Mapping[int, ModuleSnapshot]) -> None:
        """Check again the modules that have changed since the step before."""
        for index, part in parts.items():
            if self._makeups.get(index) != part.makeup:
                check_takes_slices(self._context.stages[index].submod, f"stage {index}")
                self._makeups[index] = part.makeup

    def _loss_check(self, given: CutBatch, *, is_training: bool) -> LossCheck | None:
        slicing, scale_grads = self._context.slicing, self._context.scale_grads
        return slicing.loss_check(given.targets, is_mean=scale_grads) if slicing is not None and is_training else None

    def _loss_scales(self, given: CutBatch, num_microbatches: int) -> list[float]:
        """Return the gradient with which the backward of each loss starts: 1/m, or a slice's part of that."""
        if not self._context.scale_grads:
            return [1.0] * len(given.args)
        return [weight / num_microbatches for weight in given.weights or [1.0] * num_microbatches]

    def _check_context(self, *, is_training: bool) -> None:
        """Raise if a step cannot run in the present context."""
        if is_training and not torch.is_grad_enabled():
            raise ConfigurationError("step() trains, but gradients are disabled (torch.no_grad): call eval() instead")
        try:
            if is_training:
                with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
                    pass
        except RuntimeError as disabled:
            raise ConfigurationError(
                "saved-tensor hooks are disabled here (torch.autograd.graph.disable_saved_tensors_hooks), but bpipe needs them to "
                f"track saved tensors. Call step() outside of that context, whose message is: {disabled}"
            ) from disabled
        if is_capturing(device := self._context.transport.device):
            raise ConfigurationError(
                "a pipeline step cannot be captured in a device graph, because it waits for other ranks and its "
                f"memory changes from step to step. Call it outside of torch.{device.type}.graph()"
            )

    def learn(self, forms: InputForms, run: Run) -> bool:
        """Learn which plain numbers among the inputs affect memory or messages; return whether some affect them again."""
        news = [(microbatch, *one) for microbatch, one in forms.numbered.items() if self._context.numbers.is_news(*one)]
        count_again = [self._context.numbers.learn(form, numbers, run.taken(microbatch)) for microbatch, form, numbers in news]
        return any(count_again)
