"""The base of all schedules: it runs a verified plan over a rank's stages, a loss and a transport."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bpipe.api.description import described
from bpipe.api.loopback import Loopback, LoopbackGroup, once, run_alone
from bpipe.api.options import RUNNING, SLICING, TRANSPORT, Options, options_for, values_of
from bpipe.api.torch_attributes import TorchAttributes
from bpipe.backward.without_loss import refusing_backward
from bpipe.cleanup import concise
from bpipe.comm.transport.base import Transport
from bpipe.comm.transport.in_process import LoopbackTransport
from bpipe.comm.transport.process_group import is_fake
from bpipe.errors import ConfigurationError, PipelineBrokenError
from bpipe.flow.shape_arguments import directions_of, has_own_losses, paths_of
from bpipe.memory.ledger import Ledger
from bpipe.model.call import ArgsSpec, Call, KwargsSpec, Loss, Specs
from bpipe.model.stage import PipelineStage, stages_of
from bpipe.not_copied import NotCopied
from bpipe.schedules import Plan, build
from bpipe.session.context import Cutter, RankContext
from bpipe.session.plan_source import PlanSource
from bpipe.session.session import Session
from bpipe.session.side_by_side import Overlap, SideBySide

__all__ = ["Schedule"]


class Schedule(NotCopied, TorchAttributes):
    """A pipeline schedule over the ranks of a group; subclasses name the rule.

    The interface is torch.distributed.pipelining's: the same loop runs with either. `step` and `eval` are collective over the
    pipeline's ranks and block the host until this rank's part is done.

    Args:
        stage: this rank's `PipelineStage`, ours or torch's, or a list of them if the rule puts several on a rank. Several
            schedules may share it.
        n_microbatches: m, the number of microbatches that a batch is cut into.
        loss_fn: `loss_fn(output, target, **loss_kwargs)`, one number; without it `step` evaluates.
        args_chunk_spec: for each positional argument a `TensorChunkSpec`, None to repeat it whole, or a pytree of these; default:
            cut dimension 0 of every tensor and of anything else that holds samples, as docs/batches.md says.
        kwargs_chunk_spec: likewise for each keyword argument.
        output_merge_spec: the dimensions along which the outputs are concatenated; default 0.
        scale_grads: scale the loss of each microbatch by 1/m, so that gradients are those of the mean. What is in `.grad` already
            stays, so that steps without `zero_grad()` in between add up; torch.distributed.pipelining divides that by m, too
            (docs/torch-pipelining.md).
        options: what few people set, such as `slots`, `target_chunk_spec` and `timeout_s`.

    Raises:
        ConfigurationError: the arguments cannot work together, or there is no process group.
        BudgetError: `Options.slots` cannot be met; the message names the smallest number that can.

    Example:
        A class of your own for a rule by its name:

        >>> from torch import nn
        >>> class Plain(Schedule):
        ...     rule = "1f1b"
        >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, "cpu")
        >>> schedule = Plain(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        >>> losses = []
        >>> schedule.step(torch.zeros(4, 4), target=torch.zeros(4, 4), losses=losses).shape, len(losses)
        (torch.Size([4, 4]), 2)
        >>> schedule.eval(torch.zeros(4, 4)).shape
        torch.Size([4, 4])
        >>> schedule.close()
    """

    rule: str
    _takes: tuple[str, ...] = ("slots", *RUNNING)  # of the options
    _slices: int | None = None  # of a microbatch; None: stages take it whole
    _overlapped = False  # whether forwards run side by side with backwards
    _may_be_uneven = False  # whether ranks may hold different numbers of stages

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = concise(cls.__init__)  # type: ignore[method-assign]

    @concise
    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Loss = None,
        args_chunk_spec: ArgsSpec = None,
        kwargs_chunk_spec: KwargsSpec = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        *,
        options: Options | None = None,
    ) -> None:
        self._options = options = options_for(type(self).__name__, options, self._takes)
        stages = stages_of(stage, may_be_uneven=self._may_be_uneven)
        first = next(iter(stages.values()))
        specs = Specs.checked(args_chunk_spec, kwargs_chunk_spec, output_merge_spec, options.target_chunk_spec)
        self._skips = tuple(sorted(set(first.skips.values())))
        plan = self._make_plan(first.num_stages, first.num_stages // len(stages), n_microbatches)
        cutter = self._make_cutter(plan, stages)
        self._check_directions(plan, first.directions)
        self._check_placement(plan, stages)
        self._source = PlanSource(plan, self.rule)
        self.group = group = group_or_alone(first.group, plan.num_ranks)
        transport, session = ends_for(group, first.device, plan, options)
        context = RankContext(
            stages=stages,
            loss_fn=loss_fn,
            specs=specs,
            cutter=cutter,
            scale_grads=scale_grads,
            group=group,
            transport=transport,
            plan_rank=plan.stage_ranks[first.stage_index],
            once=partial(once, group.loopback) if isinstance(group, LoopbackGroup) else lambda asked, make: make(),
        )
        self._session: Session | None = session(context, self._source)
        for one in stages.values():
            one.original.has_backward = loss_fn is not None

    def _make_plan(self, num_stages: int, num_ranks: int, n_microbatches: int) -> Plan:
        """Build the plan that this schedule trains with."""
        return build(
            self.rule,
            num_stages,
            n_microbatches,
            num_ranks=num_ranks,
            slots=self._options.slots,
            slices=1 if self._slices is None else self._slices,
            skips=self._skips,
            overlapped=self._overlapped,
        )

    def _plan_for(self, num_microbatches: int) -> Plan:
        plan = self.plan
        made = self._make_plan(plan.num_stages, plan.num_ranks, num_microbatches)
        return made if made.num_microbatches == num_microbatches else super()._plan_for(num_microbatches)

    def _make_cutter(self, plan: Plan, stages: Mapping[int, PipelineStage]) -> Cutter:
        """Return what cuts microbatches into slices; it leaves them whole, if stages take them so."""
        given = {*self._options.changed()} & {*SLICING}
        if self._slices is None and not given:
            return Cutter()
        from bpipe.slices.slicing import cutter_for  # loaded for schedules with slices

        values = values_of(self._options, SLICING)
        return cutter_for(plan, stages, values.values(), is_given=bool(given), may_slice=self._slices is not None)

    def _check_directions(self, plan: Plan, directions: int) -> None:
        needed = directions_of(plan.flow)
        if needed != directions:
            raise ConfigurationError(
                f"{self.rule} has {needed} direction{'s' * (needed > 1)}, and its stages were made for "
                f"{directions}: give PipelineStage(directions={needed})"
            )
        if paths_of(plan.flow):
            raise ConfigurationError(
                f"{self.rule}: microbatches of this plan have paths through replicas, whose gradients only bpipe.Routes adds up: "
                "it plans whole microbatches in one chain"
            )
        if has_own_losses(plan.flow) and plan.num_stages > plan.num_ranks:
            raise ConfigurationError(
                f"{self.rule} keeps gradients in their stages, and `losses` of a rank has those of one stage: give each rank one"
            )

    def _check_placement(self, plan: Plan, stages: Mapping[int, PipelineStage]) -> None:
        expected = plan.stages_of(plan.stage_ranks[min(stages)])
        if sorted(stages) != expected:
            held = ", ".join(str(plan.stages_of(rank)) for rank in range(plan.num_ranks))
            raise ConfigurationError(
                f"{self.rule} puts stages {expected} on one rank, got {sorted(stages)}: "
                f"of {plan.num_stages} stages, ranks 0 to {plan.num_ranks - 1} hold {held}"
            )

    # The interface for users

    @concise
    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        **kwargs: Any,
    ) -> Any:
        """Run one training step: forward and backward of all microbatches, with gradients added to the parameters'.

        Collective over the pipeline; blocks the host.

        Args:
            args: the first stage's positional arguments, whole batches; used on its rank, allowed on all.
            target: the whole batch of targets; used on the rank of the last stage, allowed on all.
            losses: a list to be filled with the loss of each microbatch, unscaled, on the rank of the last stage.
            return_outputs: whether the rank of the last stage keeps and returns the outputs; False saves their memory.
            loss_kwargs: further arguments of `loss_fn`, whole.
            arg_mbs: instead of `args`, a tuple of positional arguments for each microbatch; sizes may differ.
            kwarg_mbs: instead of `kwargs`, a dict for each microbatch.
            target_mbs: instead of `target`, one for each microbatch.
            finalize_gradients: False leaves the reduction of gradients under FSDP2 to a later step, as its
                `set_requires_gradient_sync(False)` does, for this step alone; the same on all data-parallel ranks of a stage.
            kwargs: keyword arguments of this rank's stages, whole batches; each of them gets all.

        Returns:
            On the rank of the last stage the outputs of the whole batch, without graph, or the list of those of all microbatches
            if they do not fit together; None elsewhere and with `return_outputs=False`. Without a loss_fn, a step only evaluates;
            in train mode and with gradients enabled, its outputs seem to need a gradient, as torch's do, and a backward through
            them raises a ConfigurationError.

        Raises:
            ConfigurationError: a batch does not divide into m microbatches, bpipe cannot cut it, a target is missing, or a target,
                `losses` or `loss_kwargs` are given and there is no loss_fn.
            AgreementError: the ranks are about to run different things; raised on all of them, nothing was sent.
            StageError: the module or the loss returned a value that cannot be used, or a stage cuts off the gradients of all its
                microbatches from stages before it that want them.
            RankFailedError: another rank failed in this step, or between steps. The pipeline is broken then, as after any error
                inside a step; the rank where the error happened raises it with its own type.
            RankLostError: another rank's process ended.
            TransferTimeoutError: this rank, or another one, waited longer than `Options.timeout_s`.
            CommError: a message differs from the one that was agreed on.
            PipelineBrokenError: an earlier step failed, the schedule is closed, or a step of it is running.
        """
        microbatches, context = (arg_mbs, kwarg_mbs, target_mbs), self.session.context
        call = Call(args, kwargs, target, losses, return_outputs, loss_kwargs, *microbatches, finalize_gradients, True)
        outputs = self._run(call, is_training=context.trains)
        return outputs if context.loss_fn is not None else refusing_backward(outputs, context.last_modules())

    @concise
    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[torch.Tensor] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the forwards alone, without a graph; also the losses if a target is given.

        It takes and returns the same as `step`, but for `finalize_gradients`. Collective over the pipeline; blocks the host.
        Modules stay in their present train or eval mode. The first evaluation makes and verifies its plan.
        """
        microbatches = arg_mbs, kwarg_mbs, target_mbs
        call = Call(args, kwargs, target, losses, return_outputs, loss_kwargs, *microbatches)
        return self._run(call, is_training=False)

    def close(self) -> None:
        """Release groups, threads and the memory kept for other ranks; this also happens when the schedule is garbage collected.

        Raises:
            PipelineBrokenError: a step of it is running.
        """
        if self._session is not None:
            self._session.close()

    def _run(self, call: Call, *, is_training: bool) -> Any:
        session = self.session
        if isinstance(self.group, LoopbackGroup):
            return run_alone(self.group.loopback, session, call, is_training=is_training)
        with session.reducing(call):
            return session.run(lambda: session.begin(call, is_training=is_training))

    @property
    def fill(self) -> Any:
        """The fill job of this rank: work that it does while it waits for others, as docs/fill.md describes; None if it has none.

        Set it between steps, to any object with `step(seconds, num_bytes)`, such as a `bpipe.fill.Job`. Ranks may have different
        ones. It is None again after an error that has stopped the job.

        Raises:
            ConfigurationError: from setting it, if the job's settings are not valid, or the ranks are a `Loopback`'s.
            FillError: likewise, if no thread can start for the job.
        """
        return None if self.session.filler is None else self.session.filler.job

    @fill.setter
    def fill(self, job: Any) -> None:
        from bpipe.fill.job_filler import give_job

        if job is not None:
            with self.session.guard.entered():
                give_job(job, self.session)
        elif self.session.filler is not None:  # also of a pipeline that is broken or closed
            self.session.filler.drop()

    @property
    def overlap(self) -> Overlap | None:
        """The function that runs each pair of a forward and a backward of this rank side by side, as docs/overlap.md describes.

        It is called as `overlap(forward, backward)`, with two functions without arguments, and has to call each of them once, the
        first in its own thread; such as `bpipe.overlap.TwoThreads()`. None, the default, runs them one after the other. Set it
        between steps, on ranks whose plan has pairs; stages under FSDP2 or DDP run one after the other all the same. Ranks that
        communicate within their stages, such as those of experts, need the same function.

        Raises:
            ConfigurationError: from setting it, if the plan has no pairs, this is no function, or the ranks are a `Loopback`'s.
        """
        return None if self.session.overlap is None else self.session.overlap.function

    @overlap.setter
    def overlap(self, function: Overlap | None) -> None:
        if function is not None and not callable(function):
            raise ConfigurationError(f"overlap={function!r}: give a function of a forward and a backward, or None")
        if function is not None and not self.plan.overlapped:
            raise ConfigurationError(
                f"{self.plan.name} runs no forward side by side with a backward: make the schedule with overlapped=True, such as "
                "DualPipeV or Interleaved1F1B, or give FromPlan a plan with such pairs"
            )
        if function is not None and isinstance(self.group, LoopbackGroup):
            raise ConfigurationError("a Loopback runs one action of all ranks after the other: leave overlap unset there")
        with self.session.guard.entered():
            self.session.overlap = None if function is None else SideBySide(function)

    def __repr__(self) -> str:
        return described(self)

    # The interface for bpipe's other modules

    @property
    def session(self) -> Session:
        """The session of this rank, which a `Loopback`, a trace and `Balanced` use.

        Raises:
            PipelineBrokenError: the session was handed over to another schedule.
        """
        if self._session is None:
            raise PipelineBrokenError("this schedule was given to Balanced: call the schedule that Balanced returned")
        return self._session

    @property
    def is_handed_over(self) -> bool:
        """Whether another schedule has its session."""
        return self._session is None

    def hand_over(self) -> Session:
        """Give this schedule's session to another schedule; this one does not run any more."""
        session, self._session = self.session, None
        return session

    @property
    def plan(self) -> Plan:
        """The plan of the latest training step, or of the first one."""
        return self._source.plan

    @property
    def stats(self) -> dict[str, float]:
        """The numbers of the latest step; empty before the first one."""
        return self.session.stats

    @property
    def ledger(self) -> Ledger:
        """The bytes of the latest step, as they came and went."""
        return self.session.ledger


def group_or_alone(group: Any, num_ranks: int) -> Any:
    """Return the group of a pipeline; a single rank without torch.distributed gets a loopback."""
    is_alone = group is None and num_ranks == 1 and not torch.distributed.is_initialized()
    return Loopback(1, own_random_state=False).rank(0) if is_alone else group


def transport_for(group: Any, device: torch.device, plan: Plan, options: Options) -> Transport:
    """Make this rank's end of a pipeline over a process group, or over a loopback."""
    if isinstance(group, LoopbackGroup):
        _check_size(plan, group.loopback.num_ranks, "make a Loopback of {} ranks")
        return LoopbackTransport(group.loopback.wires, device)
    from bpipe.comm.transport.c10d import C10dTransport

    transport = C10dTransport(group, device, **values_of(options, TRANSPORT))
    _check_size(plan, transport.size, "start {} processes")
    return transport


def ends_for(group: Any, device: torch.device, plan: Plan, options: Options) -> tuple[Transport, type[Session]]:
    """Return this rank's end of a pipeline, and the kind of session that steps over it: one without peers over a fake group."""
    if isinstance(group, LoopbackGroup) or not is_fake(group, device):
        return transport_for(group, device, plan, options), Session
    from bpipe.dry_run.dry_session import DrySession
    from bpipe.dry_run.fake_transport import FakeTransport

    transport = FakeTransport(device, dist.get_rank(group), dist.get_world_size(group))
    _check_size(plan, transport.size, "make a fake group of {} ranks")
    return transport, DrySession


def _check_size(plan: Plan, size: int, start: str) -> None:
    """Raise unless a group has as many ranks as a plan."""
    p, stages = plan.num_ranks, plan.num_stages
    if size == p:
        return
    each, other = stages // p, size * (stages // p)
    ways = [start.format(p)]
    if size > p:
        ways = ["give the stages group=, the process group of their own pipeline, if the other ranks train other ones"]
    elif stages % size == 0:
        ways.append(f"give each rank a list of {stages // size} stages, with a schedule such as Interleaved1F1B")
    raise ConfigurationError(
        f"num_stages={stages} with {each} on each rank needs {p} ranks, but the group has {size}: "
        f"{', '.join(ways)}, or cut the model into num_stages={other}"
    )
