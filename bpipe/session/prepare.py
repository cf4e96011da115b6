"""Prepare a call for a step: its microbatches, the present modules, and a description of both."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import compress
from typing import NamedTuple
from weakref import ref

import torch

from bpipe.backward.without_loss import check_loss
from bpipe.comm.health.agreement import RoomRecord
from bpipe.comm.transport.base import Transport
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.device import is_capturing
from bpipe.engine.run import Run
from bpipe.engine.setup import StepInputs, modules_of
from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import has_own_losses
from bpipe.memory.makeup import Makeups
from bpipe.model.call import Call, CutBatch, microbatches_of
from bpipe.model.cut import Cut, cut_of
from bpipe.model.merging import check_merge
from bpipe.model.plain_numbers import InputForms
from bpipe.model.stage import ModuleSnapshot, mode_of
from bpipe.model.state.reachable import Reachable
from bpipe.model.ties import check_ties
from bpipe.parallel.fsdp import trained
from bpipe.plan.plan import Plan
from bpipe.session.batches import NOTHING, BatchRecord, BatchSample
from bpipe.session.context import RankContext
from bpipe.session.outside_graphs import check_outside_graphs
from bpipe.torch_private.owners_and_versions import FOLLOWS, check_follows

__all__: list[str] = []


class PreparedCall(NamedTuple):
    """A call that is ready to run on this rank."""

    given: StepInputs
    parts: Mapping[int, ModuleSnapshot]
    losses: list[torch.Tensor] | None
    forms: InputForms
    records: tuple[RoomRecord, ...]  # of what ranks have to agree on


def sums_shared(plan: Plan, transport: Transport) -> bool:
    """Return whether a step adds up the gradients of weights that stages share: those of copies in several processes."""
    has_one_stage_each, is_local = plan.depth == plan.num_stages, has_own_losses(plan.flow)
    return has_one_stage_each and not is_local and not isinstance(transport, LoopbackTransport)


class Preparation:
    """Prepare the calls of one rank."""

    def __init__(self, context: RankContext) -> None:
        self._context = context
        self._loss_makeups = Makeups()
        self._has_trained = False
        self._of_loss: list[tuple[str, ref[torch.Tensor]]] | None = None  # the parameters that it led to in the first training step

    def inputs(self, call: Call, plan: Plan, *, is_training: bool) -> PreparedCall:
        """Cut a call into a plan's microbatches, and look at the modules that will run."""
        self._check_context(is_training=is_training)
        self._check_call(call, plan)
        context, is_local = self._context, has_own_losses(plan.flow)
        holds_last_stage = any(stage.is_last for stage in context.stages.values())
        has_loss = holds_last_stage or is_local
        whole = microbatches_of(call, plan.num_microbatches, context.specs, is_training=is_training)
        used = compress(whole.sizes, (any(stage.is_first for stage in context.stages.values()), True, has_loss))
        batch_size = next(filter(None, used), 0)
        given = context.cutter.cut(whole)
        if is_training:
            self._check_training(call, given, plan, has_loss=has_loss)
        keeps_outputs = call.return_outputs and holds_last_stage
        parts = {index: stage.parts() for index, stage in context.stages.items()}
        context.cutter.check(context.stages, parts)
        modes = [mode_of(stage, parts[index]) for index, stage in context.stages.items()]
        if has_loss:
            modes += [ModuleSnapshot.of(loss, self._loss_makeups).mode() for loss in modules_of(context.loss_fn)]
        gradient = 1 / plan.num_microbatches if context.scale_grads else 1.0
        forms = context.numbers.forms(" ".join([*modes, str(keeps_outputs)]), given.descriptions())
        inputs = StepInputs(
            args=given.args,
            kwargs=given.kwargs,
            targets=given.targets,
            descriptions=forms.counted,
            loss_fn=context.loss_fn,
            loss_parameters=self._loss_parameters() if has_loss and is_training else (),
            loss_kwargs=call.loss_kwargs or {},
            loss_gradient=gradient,
            loss_scale=None if context.scale_grads and not context.cutter.is_whole else gradient,
            keeps_outputs=keeps_outputs,
            check_output=lambda output: check_merge(context.cutter.expected(output), context.specs.output),
        )
        is_sampled = is_training and not is_local and compares_batches(context.guard.num_steps)
        cut = next(filter(None, map(cut_of, context.modules())), Cut())
        records = cut, BatchRecord(batch_size, BatchSample.of(call) if is_sampled else NOTHING), *given.records
        return PreparedCall(inputs, parts, call.losses, forms, records)

    def _check_call(self, call: Call, plan: Plan) -> None:
        """Raise if a call has values for a loss that there is not, or if nothing shows who owns what the plan evicts."""
        if call.is_step and self._context.loss_fn is None:
            of_loss = {"target_mbs": call.target_mbs, "losses": call.losses, "loss_kwargs": call.loss_kwargs or None}
            check_loss(None, "step()", target=call.target, **of_loss)
        if not FOLLOWS and any(map(plan.evicted, range(plan.num_ranks))):
            check_follows()

    def _check_training(self, call: Call, given: CutBatch, plan: Plan, *, has_loss: bool) -> None:
        """Raise if what a call gives, or what stages share with other processes, would train something else than it seems to."""
        context = self._context
        is_alone = not isinstance(context.transport, LoopbackTransport)
        if not self._has_trained or any((call.arg_mbs, call.kwarg_mbs, call.target_mbs, call.loss_kwargs)):
            # What a loss function keeps later it may have made itself, and left out of the loss.
            loss_fn = context.loss_fn if has_loss and not self._has_trained else None
            num_users = len(context.stages) if is_alone else plan.num_stages
            check_outside_graphs(call, loss_fn, plan.num_units, num_users)
            self._has_trained = True
        if has_loss and given.targets is None:
            raise ConfigurationError(
                f"stage {next(iter(context.stages))} has a loss of its own but step() got no target: pass target= (or target_mbs=) "
                "on every rank"
                if has_own_losses(plan.flow)
                else "the last stage has a loss_fn but step() got no target: pass target= (or target_mbs=) on the last stage's rank"
            )
        if is_alone:  # a loopback has checked all of its stages together
            modules, within_step = {i: stage.submod for i, stage in context.stages.items()}, sums_shared(plan, context.transport)
            check_ties(modules, trained, are_alone=True, within_step=within_step)

    def _loss_parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters that the loss function leads to; a search of all that it keeps takes too long for each step."""
        if self._of_loss is None:
            self._of_loss = [(name, ref(one)) for name, one in Reachable([self._context.loss_fn]).parameters]
        return [(name, one) for name, refer in self._of_loss if (one := refer()) is not None]

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


def compares_batches(step: int) -> bool:
    """Return whether the ranks' batches are compared in a step: in steps 1, 2, 4, 8 and so on.

    In step 0, ranks with the same seed still draw the same batch; a shuffled loader draws another order in its second epoch.
    """
    return step.bit_count() == 1
