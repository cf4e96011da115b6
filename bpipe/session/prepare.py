"""Prepare a call for a step: its microbatches, the present modules, and a description of both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from bpipe.device import is_capturing
from bpipe.engine.compute import StepInputs, modules_of
from bpipe.engine.run import Run
from bpipe.errors import ConfigurationError
from bpipe.memory.makeup import Makeups
from bpipe.model.call import Call, CutBatch, microbatches_of
from bpipe.model.merging import check_merge
from bpipe.model.plain_numbers import InputForms
from bpipe.model.stage import ModuleSnapshot
from bpipe.plan.plan import Plan
from bpipe.session.context import RankContext

__all__: list[str] = []


class PreparedCall(NamedTuple):
    """A call that is ready to run on this rank."""

    step_inputs: StepInputs
    parts: Mapping[int, ModuleSnapshot]
    losses: list[torch.Tensor] | None
    weights: list[float] | None
    forms: InputForms


class Preparation:
    """Prepare the calls of one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._loss_makeups = Makeups()

    def inputs(self, call: Call, plan: Plan, *, is_training: bool) -> PreparedCall:
        """Cut a call into a plan's microbatches, and look at the modules that will run."""
        self._check_context(is_training=is_training)
        context, holds_last_stage = self._context, any(stage.is_last for stage in self._context.stages.values())
        has_loss = holds_last_stage or plan.local
        given = microbatches_of(call, plan.num_microbatches, context.specs, is_training=is_training)
        if context.slicing is not None:
            given = context.slicing.cut(given)
        if is_training and has_loss and given.targets is None:
            raise ConfigurationError(
                f"stage {next(iter(context.stages))} has a loss of its own but step() got no target: pass target= (or target_mbs=) "
                "on every rank"
                if plan.local
                else "the last stage has a loss_fn but step() got no target: pass target= (or target_mbs=) on the last stage's rank"
            )
        keeps_outputs = call.return_outputs and holds_last_stage
        parts = {index: stage.parts() for index, stage in context.stages.items()}
        modes = [stage.mode(parts[index]) for index, stage in context.stages.items()]
        if has_loss:
            modes += [ModuleSnapshot.of(loss, self._loss_makeups).mode() for loss in modules_of(context.loss_fn)]
        forms = self._context.numbers.forms(" ".join([*modes, str(keeps_outputs)]), given.descriptions())
        step_inputs = StepInputs(
            args=given.args,
            kwargs=given.kwargs,
            targets=given.targets,
            descriptions=forms.counted,
            loss_fn=context.loss_fn,
            loss_kwargs=call.loss_kwargs or {},
            loss_scales=self._loss_scales(given, plan.num_microbatches),
            keeps_outputs=keeps_outputs,
            check_output=lambda output: check_merge([output], context.specs.output),
            lengths=given.lengths,
            loss_check=context.slicing.loss_check(is_mean=context.scale_grads) if context.slicing is not None else None,
        )
        return PreparedCall(step_inputs, parts, call.losses, given.weights if context.scale_grads else None, forms)

    def _loss_scales(self, given: CutBatch, num_microbatches: int) -> list[float]:
        """Return the gradient with which the backward of each loss starts: 1/m, or a slice's part of that."""
        if not self._context.scale_grads:
            return [1.0] * len(given.args)
        return [weight / num_microbatches for weight in given.weights or [1.0] * num_microbatches]

    def _check_context(self, *, is_training: bool) -> None:
        """Raise if a step cannot run in the present context."""
        if is_training and not torch.is_grad_enabled():
            raise ConfigurationError("step() trains, but gradients are disabled (torch.no_grad): call eval() instead")
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if is_training and disabled is not None:
            raise ConfigurationError(
                "saved-tensor hooks are disabled here (torch.autograd.graph.disable_saved_tensors_hooks), but bpipe needs them to "
                f"track saved tensors. Call step() outside of that context, whose message is: {disabled}"
            )
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
