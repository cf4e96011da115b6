"""The base of all schedules: it runs a verified plan over a rank's stages, a loss and a transport."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import util
from typing import Any, NamedTuple, TypeVar

import torch

from bpipe._version import __version__
from bpipe.api.fullest import Fullest
from bpipe.api.loopback import Loopback, LoopbackGroup
from bpipe.api.stats import Stats
from bpipe.api.transports import transport_for
from bpipe.cleanup import noted_on
from bpipe.comm.health.activity import State
from bpipe.comm.health.agreement import UNKNOWN_CUT, Record, check
from bpipe.comm.health.collective import Collective
from bpipe.comm.health.watchdog import SLOW_S
from bpipe.comm.transport.base import Transport
from bpipe.comm.transport.in_flight import TRANSFERS_AT_ONCE
from bpipe.device import is_asynchronous, is_capturing
from bpipe.device.waits import DeviceWaits
from bpipe.engine.compute import Job, modules_of
from bpipe.engine.lanes import Lanes
from bpipe.engine.messages import Layouts
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Observer, Run
from bpipe.errors import AgreementError, CommError, ConfigurationError, PipelineBrokenError, PlanError, format_error
from bpipe.logs import RankLog
from bpipe.memory.ledger import Ledger
from bpipe.memory.makeup import Makeups
from bpipe.memory.optimizers import STEPPED, States
from bpipe.memory.static import StaticBytes, standing
from bpipe.model import microbatch as mb
from bpipe.model.call import Call, Specs, call_of, microbatches_of
from bpipe.model.cut import cut_of
from bpipe.model.merging import merge
from bpipe.model.plain_numbers import CountedNumbers, Looks
from bpipe.model.stage import Parts, stages_of
from bpipe.schedules import Plan, build
from bpipe.schedules.by_name import check_counts, forward_plan

__all__ = ["Schedule"]

RELEASED_S = 5.0  # for threads that wait in a transfer to return once it was ended
REMEMBERED_SHAPES = 64  # combinations of input shapes whose messages stay agreed


T = TypeVar("T", float, float | None)
StepKey = tuple[bool, tuple[bytes, ...]]  # whether it trains, and what each rank's inputs look like
Gather = Callable[[Callable[["Schedule"], bytes]], list[bytes]]  # what each rank's schedule tells, by rank of the group


class Proven(NamedTuple):
    """A verified plan and its fingerprint."""

    plan: Plan
    fingerprint: str


class Step(NamedTuple):
    """A step that this rank is ready for."""

    record: bytes
    plan: Plan
    job: Job
    parts: Mapping[int, Parts]
    losses: list[torch.Tensor] | None
    is_training: bool
    looks: Looks


class Schedule:
    """A pipeline schedule over the ranks of a group; subclasses name the rule.

    The interface is torch.distributed.pipelining's: the same loop runs with either. `step` and `eval` are collective over the
    pipeline's ranks and block the host until this rank's part is done.

    Args:
        stage: this rank's `PipelineStage`, ours or torch's, or a list of them where the rule puts several on a rank. Several
            schedules may share it.
        n_microbatches: m, the number of microbatches that a batch is cut into.
        loss_fn: `loss_fn(output, target, **loss_kwargs)`, one number; without it `step` evaluates.
        args_chunk_spec: for each positional argument a `TensorChunkSpec`, None to repeat it whole, or a nest of these; default: cut
            dimension 0 of every tensor and of anything else that holds samples, as docs/batches.md says.
        kwargs_chunk_spec: likewise for each keyword argument.
        output_merge_spec: the dimensions along which the outputs are put together; default 0.
        scale_grads: scale the loss of each microbatch by 1/m, so that gradients are those of the mean and steps accumulate.
        slots: the most microbatches a rank may hold, one number or one for each rank (None: no limit); ranks with more evict.
            Default: no limit, but ceil((p+2)/2) for `BalancedOneFOneB`.
        timeout_s: seconds that a rank waits for another one, in a transfer or at the start of a step, before the pipeline fails
            on all ranks; default: the process group's timeout.
        slow_s: seconds in one wait after which the logger "bpipe" shows, once a step, what every rank is doing; default 30.
        transfers_at_once: over NCCL, how many transfers may be in flight on a device, where each takes some of its multiprocessors
            until the other rank comes to it; any number from 1 on is free of deadlock.

    Raises:
        ConfigurationError: the arguments cannot work together, or there is no process group.
        BudgetError: `slots` cannot be met; the message names the smallest that can.
    """

    rule: str

    def __init__(
        self,
        stage: Any,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: Any = None,
        scale_grads: bool = True,
        slots: int | Sequence[int | None] | None = None,
        *,
        timeout_s: float | None = None,
        slow_s: float = SLOW_S,
        transfers_at_once: int = TRANSFERS_AT_ONCE,
    ) -> None:
        self._arguments = (stage, n_microbatches, loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads)
        self._how: dict[str, Any] = {
            "timeout_s": _positive("timeout_s", timeout_s),
            "slow_s": _positive("slow_s", slow_s),
            "transfers_at_once": transfers_at_once,
        }
        check_counts(transfers_at_once=transfers_at_once)
        self._stages = stages_of(stage)
        first = next(iter(self._stages.values()))
        self._loss_fn = loss_fn
        self._specs = Specs.checked(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self.plan = self._make_plan(first.num_stages, first.num_stages // len(self._stages), n_microbatches, slots)
        self._loss_scale = 1.0 / n_microbatches if scale_grads else 1.0
        self._check_placement()
        self._plans = {True: self._proven(self.plan)}
        self.group = first.group
        if self.group is None and self.plan.num_ranks == 1 and not torch.distributed.is_initialized():
            self.group = Loopback(1, own_random_state=False).rank(0)
        self._transport = transport_for(self.group, first.device, self.plan.num_ranks, **self._how)
        self._plan_rank = self.plan.stage_ranks[first.stage_index]
        self._group_ranks: list[int] = []
        self._memory = Memory()
        if self._transport.waits_on_device and is_asynchronous(first.device):
            self._memory.device_waits = DeviceWaits(first.device)
        self._learned: OrderedDict[StepKey, Layouts] = OrderedDict()
        self._numbers = CountedNumbers()
        self._lanes = Lanes(self._transport)
        self._lanes.prepare(self.plan, self._plan_rank)
        self._num_steps = 0
        self._running = threading.Lock()
        self._connected: Plan | None = None
        self._broken: BaseException | str | None = None
        self._told: BaseException | None = None  # an error that all ranks know of, before anything was sent
        self._observer: Observer | None = None
        self._finalizer = weakref.finalize(self, _close, self._transport, self._memory, os.getpid(), STEPPED.open())
        util.Finalize(self, self._finalizer, exitpriority=0)  # processes of multiprocessing end without atexit
        self._transport.enlist()
        self.stats: dict[str, float] = {}
        self._counted = Stats(self._memory)
        self._loss_makeups = Makeups()
        self._static = StaticBytes(self._transport.device)  # without the states of optimizers
        self._states = States(self._transport.device)
        self._fullest = Fullest()
        self.ledger = Ledger()

    def _make_plan(self, num_stages: int, num_ranks: int, n_microbatches: int, slots: int | Sequence[int | None] | None) -> Plan:
        """Build the plan that this schedule trains with."""
        return build(self.rule, num_stages, n_microbatches, num_ranks=num_ranks, slots=slots)

    def _proven(self, plan: Plan) -> Proven:
        """Return a plan with the fingerprint by which ranks notice that they have different ones."""
        return Proven(plan, plan.fingerprint())

    def _plan_of(self, is_training: bool) -> Proven:
        """Return the plan of a training step or of an evaluation, which is made and proven for the first one."""
        if is_training not in self._plans:
            plan = forward_plan(self._plans[True].plan)
            self._lanes.prepare(plan, self._plan_rank)
            self._plans[is_training] = self._proven(plan)
        return self._plans[is_training]

    def _modules(self) -> list[torch.nn.Module]:
        return [stage.submod for stage in self._stages.values()]

    def _check_placement(self) -> None:
        expected = {index for index, rank in enumerate(self.plan.stage_ranks) if rank == self.plan.stage_ranks[min(self._stages)]}
        if set(self._stages) != expected:
            raise ConfigurationError(
                f"{self.rule} puts stages {sorted(expected)} on one rank, got {sorted(self._stages)}: "
                f"of {self.plan.num_stages} stages, ranks 0 to {self.plan.num_ranks - 1} hold {self._placement()}"
            )

    def _placement(self) -> str:
        held: list[list[int]] = [[] for _ in range(self.plan.num_ranks)]
        for stage, rank in enumerate(self.plan.stage_ranks):
            held[rank].append(stage)
        return ", ".join(map(str, held))

    # What users call

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
            kwargs: keyword arguments of this rank's stages, whole batches; each of them gets all.

        Returns:
            On the rank of the last stage the outputs of the whole batch, without graph; None elsewhere and with
            `return_outputs=False`.

        Raises:
            ConfigurationError: a batch that does not divide into m or that bpipe cannot cut, a missing target.
            AgreementError: the ranks are about to run different things; raised on all of them, nothing was sent.
            StageError: the module or the loss returned something that cannot be used.
            RankFailedError: another rank failed in this step, or between steps. The pipeline is broken then, as after any error
                inside a step; on the rank where it happened, the error is its own.
            RankLostError: another rank's process ended.
            TransferTimeoutError: this rank, or another one, waited longer than `timeout_s`.
            CommError: a message is not what was agreed.
            PipelineBrokenError: an earlier step failed, the schedule is closed, or a step of it is running.
        """
        call = Call(args, kwargs, target, losses, return_outputs, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(lambda: self._begin_step(call))

    def eval(self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the forwards alone, without a graph; the losses too where a target is given.

        Takes what `step` takes, and returns what it returns. Collective over the pipeline; blocks the host. Modules stay
        in the train or eval mode that they are in. The first evaluation makes and proves its plan.
        """
        call = call_of(*args, target=target, losses=losses, **kwargs)
        return self._run(lambda: self._begin_eval(call))

    def close(self) -> None:
        """Release groups, threads and the guests' memory; this also happens when the schedule is garbage collected.

        Raises:
            PipelineBrokenError: a step of it is running.
        """
        if self._running.locked():
            raise PipelineBrokenError("close() was called inside a step: close a schedule when its step has returned or raised")
        if isinstance(self._broken, BaseException):
            self._broken = format_error(self._broken)  # the error's frames keep the step's tensors alive
        self._finalizer()

    # A step in its phases, which a loopback runs for all ranks side by side

    def _begin_step(self, call: Call) -> Step:
        if self._loss_fn is not None and not torch.is_grad_enabled():
            raise ConfigurationError("step() trains, and gradients are off here (torch.no_grad): use eval()")
        disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        if self._loss_fn is not None and disabled is not None:
            raise ConfigurationError(
                "saved-tensor hooks are disabled here (torch.autograd.graph.disable_saved_tensors_hooks), and bpipe follows with "
                f"them what microbatches save. Call step() outside of that context, whose message is: {disabled}"
            )
        return self._begin(call, is_training=self._loss_fn is not None)

    def _begin_eval(self, call: Call) -> Step:
        return self._begin(call, is_training=False)

    def _begin(self, call: Call, *, is_training: bool) -> Step:
        if is_capturing(self._transport.device):
            raise ConfigurationError(
                "a graph of the device is being captured, and a step of a pipeline cannot be: it waits for other ranks, and its "
                f"memory changes from step to step. Call it outside of torch.{self._transport.device.type}.graph()"
            )
        inputs = microbatches_of(call, self.plan.num_microbatches, self._specs, is_training=is_training)
        holds_last_stage = self.plan.num_stages - 1 in self._stages
        if is_training and holds_last_stage and inputs.targets is None:
            raise ConfigurationError(
                "the last stage has a loss_fn and got no target: pass target= (or target_mbs=) to step() there"
            )
        keeps_outputs = call.return_outputs and holds_last_stage
        parts = {index: stage.parts() for index, stage in self._stages.items()}
        modes = [stage.mode(parts[index]) for index, stage in self._stages.items()]
        if holds_last_stage:
            modes += [Parts.of(loss, self._loss_makeups).mode() for loss in modules_of(self._loss_fn)]
        mode = " ".join([*modes, str(keeps_outputs)])
        looks = self._numbers.looks(mode, inputs.descriptions())
        job = Job(
            args=inputs.args,
            kwargs=inputs.kwargs,
            targets=inputs.targets,
            descriptions=looks.counted,
            loss_fn=self._loss_fn,
            loss_kwargs=call.loss_kwargs or {},
            loss_scale=self._loss_scale,
            keeps_outputs=keeps_outputs,
            merge_spec=self._specs.output,
        )
        record = self._record(is_training, looks).pack()
        return Step(record, self._plan_of(is_training).plan, job, parts, call.losses, is_training, looks)

    def _record(self, is_training: bool, looks: Looks) -> Record:
        plan, fingerprint = self._plan_of(is_training)
        states = self._states.of(self._modules)
        peak, plain_peak = self._fullest.peaks(states)
        return Record(
            version=__version__,
            schedule=self.rule,
            fingerprint=fingerprint,
            is_training=is_training,
            step=self._num_steps,
            num_stages=plan.num_stages,
            num_ranks=plan.num_ranks,
            num_microbatches=plan.num_microbatches,
            pipeline=self._transport.identity,
            signature=(signature := mb.digest(looks.exact)),
            stages=tuple(sorted(self._stages)),
            cut=next((cut.digest for stage in self._stages.values() if (cut := cut_of(stage.submod)) is not None), UNKNOWN_CUT),
            form=mb.digest(looks.counted) if looks.numbered else signature,
            states=states,
            peak=peak,
            plain_peak=plain_peak,
        )

    def _agreed(self, step: Step, packed: Sequence[bytes], gather: Gather) -> Run:
        """Check that all ranks are about to run the same step, and make this rank ready for its first action."""
        records = [Record.unpack(data) for data in packed]
        check(records)
        if not self._group_ranks:
            self._place(records)
        if self._plan_rank == 0 and self._fullest.is_open:
            names = [f"rank {rank}" for rank in self._group_ranks]
            self._fullest.check([records[rank] for rank in self._group_ranks], names, self.rule, self._log().warning)
        key = (step.is_training, tuple(record.signature for record in records))
        plan = self._plan_to_run(step, records, gather)
        self._connect(plan)
        is_learning = key not in self._learned
        layouts = self._learned.setdefault(key, {})
        self._learned.move_to_end(key)
        while len(self._learned) > REMEMBERED_SHAPES:
            self._learned.popitem(last=False)
        return Run(
            plan=plan,
            rank=self._plan_rank,
            step=self._num_steps,
            stages=self._stages,
            parts=step.parts,
            transport=self._transport,
            job=step.job,
            layouts=layouts,
            is_learning=is_learning,
            memory=self._memory,
            name=f"rank {self._group_ranks[self._plan_rank]}",
            observer=self._observer_of(step, plan),
        )

    def _observer_of(self, step: Step, plan: Plan) -> Observer | None:
        """Return the observer that follows a step that runs a plan."""
        return self._observer

    def _place(self, records: Sequence[Record]) -> None:
        """Learn which rank of the group holds which of the plan's ranks, and open the channels."""
        owner = {stage: rank for rank, record in enumerate(records) for stage in record.stages}
        stage_of = {rank: stage for stage, rank in enumerate(self.plan.stage_ranks)}
        self._group_ranks = [owner[stage_of[rank]] for rank in range(self.plan.num_ranks)]
        self._connect(self.plan)

    def _plan_to_run(self, step: Step, records: Sequence[Record], gather: Gather) -> Plan:
        """Return the plan of a step that all ranks have described. Collective where it calls `gather`."""
        return step.plan

    def _report(self, key: StepKey) -> bytes:
        """Return what this rank tells the others before a plan is made for inputs of this form."""
        raise NotImplementedError

    def _difference(self, inputs: tuple[bytes, ...]) -> bytes:
        """Return where this rank's replicas take different memory for some inputs; collective over them."""
        raise NotImplementedError

    def _needs_order(self) -> bytes:
        """Return why this rank cannot measure one microbatch at a time; empty if it knows of no reason."""
        raise NotImplementedError

    def _connect(self, plan: Plan) -> None:
        """Open a plan's channels, and reserve rooms for the guests that it sends to this rank."""
        if plan is self._connected or (self._connected is not None and not plan.has_backward):
            return
        self._transport.connect(plan.channels(), self._group_ranks)
        self._memory.reserve(plan, self._plan_rank, self._transport.device, self._transport.streams)
        self._connected = plan

    def _finish(self, step: Step, run: Run, started: float) -> None:
        """Finish a step whose actions have all run: learn from it, count its bytes and times, and hand out its losses."""
        run.compute.reruns.check()
        self._num_steps += 1
        self.ledger = run.evictions.ledger
        if step.is_training:
            self._learn_numbers(step.looks, run)
        static = self._static_bytes(step)
        states = self._states.of(self._modules)
        self.stats = self._counted.of(run, static + states, time.perf_counter() - started)
        if step.is_training and run.plan is not self._fullest.plan and self._compares():
            self._fullest.note(run, self.stats, states, self.group)
        if self._observer is not None:
            self._observer.finished(run, self.stats)
        if run.holds_last_stage and step.losses is not None:
            step.losses[:] = run.compute.losses

    def _static_bytes(self, step: Step) -> int:
        """Return the bytes that stay on this rank between steps, as at the end of this one, without optimizer states."""
        seen = [(one.makeup, standing(one.modules, one.parameters)) for one in step.parts.values()]
        if self._static.has_changed(self._modules(), seen):
            self._states.forget()
        return self._static.num_bytes

    def _compares(self) -> bool:
        """Return whether plans are made without knowing each rank's bytes, so that a step must show how balance changes them."""
        return True

    def _log(self) -> RankLog:
        return RankLog(self._group_ranks[self._plan_rank])

    def _learn_numbers(self, looks: Looks, run: Run) -> bool:
        """Learn which plain numbers among the inputs decide what microbatches take here; return whether some count again."""
        news = [(microbatch, *one) for microbatch, one in looks.numbered.items() if self._numbers.is_news(*one)]
        count_again = [self._numbers.learn(form, numbers, run.taken(microbatch)) for microbatch, form, numbers in news]
        return any(count_again)

    def _result(self, run: Run) -> Any:
        """Return what the step returns: the merged outputs; None if there are none."""
        return merge(run.compute.outputs, self._specs.output) if run.compute.outputs else None

    # Driving them

    def _run(self, begin: Callable[[], Step]) -> Any:
        if isinstance(self.group, LoopbackGroup):
            return self._run_alone(begin)
        with self._guarded():
            started = time.perf_counter()
            step = self._begin_or_refuse(begin)
            with self._failing_together(AgreementError, PlanError):
                records = self._transport.exchange(Collective.STEP, step.record)
                control = self._transport.control
                control.activity.state = State.PREPARING
                run = self._agreed(step, records, lambda told: self._transport.exchange(Collective.PLAN, told(self)))
            with self._failing_together():
                with run.sharding.in_charge(), run.hooks.watched(), control.interruptible():
                    self._lanes.drive(run, control, self._group_ranks)
                result = self._result(run)
                self._finish(step, run, started)
            return result

    def _run_alone(self, begin: Callable[[], Step]) -> Any:
        loopback: Loopback = self.group.loopback
        if loopback.num_ranks > 1:
            raise ConfigurationError(
                "on a Loopback, call loopback.step(schedules, ...) and loopback.eval(schedules, ...) for all ranks"
            )
        return loopback._run([self], lambda schedule: begin())

    def _begin_or_refuse(self, begin: Callable[[], Step]) -> Step:
        """Prepare a step; if this rank cannot, tell the others before raising, so that none of them waits."""
        try:
            return begin()
        except BaseException as error:
            with noted_on(error), self._failing_together(), suppress(CommError):
                self._transport.refuse(format_error(error))
            raise

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Allow one step at a time, and none after an error."""
        if self._running.locked():
            raise PipelineBrokenError("step() was called from inside a step, or from a second thread: one step at a time")
        with self._running:
            self._check_whole()
            yield

    def _check_whole(self) -> None:
        """Raise if a step has failed, here or on another rank, or if this schedule is closed."""
        if self._broken is not None:
            cause = self._broken if isinstance(self._broken, BaseException) else None
            raise PipelineBrokenError(
                f"this pipeline broke in step {self._num_steps} ({self._broken if cause is None else format_error(cause)}). "
                "Gradients may be incomplete: zero them, close() this schedule and build a new one over the same process group."
            ) from cause
        if not self._finalizer.alive:
            raise PipelineBrokenError("this schedule was closed: build a new one")
        with self._breaking():
            self._transport.control.check()

    @contextmanager
    def _failing_together(self, *told: type[Exception]) -> Iterator[None]:
        """Tell all ranks of an error raised inside, and raise its cause: the pipeline is broken.

        Args:
            told: errors that all ranks raise alike, before anything is sent: they break nothing.
        """
        try:
            yield
        except BaseException as error:
            control = self._transport.control
            if control.failure is None and (isinstance(error, told) or error is self._told):
                raise
            reason = self._broken = error
            with noted_on(error):
                reason = self._broken = control.broke(error, control.activity.place())
            with noted_on(reason):
                self._lanes.join(RELEASED_S)
                self._transport.settle(RELEASED_S)
                self._transport.streams.join()
            if reason is error:
                raise
            raise reason from error
        finally:
            self._transport.control.activity.end(self._num_steps)

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """Mark the pipeline as broken by an error raised inside, because it leaves messages in flight."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            raise


def _positive(name: str, seconds: T) -> T:
    if seconds is not None and not seconds > 0:
        raise ConfigurationError(f"{name}={seconds!r}: give a positive number of seconds")
    return seconds


def _close(transport: Transport, memory: Memory, process: int, opened: object) -> None:
    if os.getpid() == process:  # a forked child has no part in it
        STEPPED.close(opened)
        transport.close()
        memory.clear()
