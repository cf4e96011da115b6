"""The schedules people call: a rule bound to a stage, a loss and a transport."""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch

from bpipe import microbatch as mb
from bpipe._version import __version__
from bpipe.call import Call, Specs, call_of, microbatches_of
from bpipe.comm.agreement import MOST_STAGES, Record, check
from bpipe.comm.loopback import LoopbackTransport
from bpipe.comm.transport import Transport
from bpipe.errors import ConfigurationError, PipelineBrokenError
from bpipe.loopback import Loopback, LoopbackGroup
from bpipe.memory.guests import Rooms
from bpipe.memory.ledger import Ledger
from bpipe.runtime.compute import Job
from bpipe.runtime.evictions import Memory
from bpipe.runtime.messages import Layouts
from bpipe.runtime.observe import Observer
from bpipe.runtime.run import Run
from bpipe.runtime.serve import Server
from bpipe.schedules import Plan, build
from bpipe.schedules.build import forward_plan
from bpipe.stage import PipelineStage
from bpipe.stats import stats_of

__all__ = ["BalancedOneFOneB", "GPipe", "OneFOneB", "Schedule"]

REMEMBERED_SHAPES = 64  # combinations of input shapes whose messages stay agreed


class _Proven(NamedTuple):
    """A verified plan and its fingerprint."""

    plan: Plan
    fingerprint: str


class _Step(NamedTuple):
    """A step that this rank is ready for."""

    record: bytes
    plan: Plan
    job: Job
    losses: list[torch.Tensor] | None
    is_training: bool


class Schedule:
    """A pipeline schedule over the ranks of a group; subclasses name the rule.

    The interface is torch.distributed.pipelining's: the same loop runs with either. `step` and `eval` are collective over the
    pipeline's ranks and block the host until this rank's part is done.

    Args:
        stage: this rank's `PipelineStage`, ours or torch's. Several schedules may share it.
        n_microbatches: m; a batch is cut into so many.
        loss_fn: `loss_fn(output, target, **loss_kwargs)`, one number; without it `step` evaluates.
        args_chunk_spec: a `TensorChunkSpec` for each positional argument; default: cut dimension 0 of every tensor.
        kwargs_chunk_spec: likewise for each keyword argument.
        output_merge_spec: along which dimensions the outputs are put together; default 0.
        scale_grads: scale the loss of each microbatch by 1/m, so that gradients are those of the mean and steps accumulate.
        slots: the most microbatches a rank may hold, one number or one for each rank (None: no limit); ranks with more evict.
            Default: no limit, but ceil((p+2)/2) for `BalancedOneFOneB`.

    Raises:
        ConfigurationError: arguments that cannot work together, or no process group.
        BudgetError: `slots` cannot be met; the message names the smallest that can.
    """

    rule: ClassVar[str]

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
    ) -> None:
        stages = [PipelineStage.adopt(one) for one in (stage if isinstance(stage, (list, tuple)) else [stage])]
        if not stages or len(stages) > MOST_STAGES:
            raise ConfigurationError(f"a rank holds 1 to {MOST_STAGES} stages, got {len(stages)}")
        self._stages = {one.stage_index: one for one in stages}
        self._loss_fn = loss_fn
        self._specs = Specs(args_chunk_spec, kwargs_chunk_spec, output_merge_spec)
        self.plan = build(self.rule, stages[0].num_stages, n_microbatches, slots=slots)
        self._loss_scale = 1.0 / n_microbatches if scale_grads else 1.0
        self._check_placement()
        self._plans = {
            is_training: _Proven(p, p.fingerprint()) for is_training, p in ((True, self.plan), (False, forward_plan(self.plan)))
        }
        self.group = stages[0].group
        if self.group is None and self.plan.num_ranks == 1 and not torch.distributed.is_initialized():
            self.group = Loopback(1, own_random_state=False).rank(0)
        self._transport = _transport_for(self.group, stages[0].device, self.plan.num_ranks)
        self._plan_rank = self.plan.stage_ranks[stages[0].stage_index]
        self._group_ranks: list[int] = []
        self._memory = Memory()
        self._learned: OrderedDict[tuple[bool, tuple[bytes, ...]], Layouts] = OrderedDict()
        self._side_streams: dict[int, torch.cuda.Stream] = {}
        self._num_steps = 0
        self._is_running = False
        self._broken: BaseException | str | None = None
        self._observer: Observer | None = None
        self._finalizer = weakref.finalize(self, _close, self._transport, self._memory)
        self._transport.enlist()
        self.stats: dict[str, float] = {}
        self.ledger = Ledger()

    def _check_placement(self) -> None:
        expected = {index for index, rank in enumerate(self.plan.stage_ranks) if rank == self.plan.stage_ranks[min(self._stages)]}
        if set(self._stages) != expected:
            raise ConfigurationError(f"{self.rule} puts stages {sorted(expected)} on one rank, got {sorted(self._stages)}")

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
        """Run one training step: all microbatches forward and backward, gradients added to the parameters'.

        Collective over the pipeline; blocks the host.

        Args:
            args: the first stage's positional arguments, whole batches; used on the first rank, allowed on all.
            target: the whole batch of targets; used on the last rank, allowed on all.
            losses: a list to be filled with the loss of each microbatch, unscaled, on the last rank.
            return_outputs: whether the last rank keeps and returns the outputs; False saves their memory.
            loss_kwargs: further arguments of `loss_fn`, whole.
            arg_mbs: instead of `args`, a tuple of positional arguments for each microbatch; sizes may differ.
            kwarg_mbs: instead of `kwargs`, a dict for each microbatch.
            target_mbs: instead of `target`, one for each microbatch.
            kwargs: keyword arguments of this rank's stage, whole batches.

        Returns:
            On the last rank the outputs of the whole batch, without graph; None elsewhere and with `return_outputs=False`.

        Raises:
            ConfigurationError: a batch that does not divide into m, a missing target.
            AgreementError: the ranks are about to run different things; raised on all of them, nothing was sent.
            StageError: the module or the loss returned something that cannot be used.
            CommError: a transfer failed. The pipeline is broken then, as after any error inside a step.
        """
        call = Call(args, kwargs, target, losses, return_outputs, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(lambda: self._begin_step(call))

    def eval(self, *args: Any, target: Any = None, losses: list[torch.Tensor] | None = None, **kwargs: Any) -> Any:
        """Run the forwards alone, without a graph; the losses too where a target is given.

        Takes what `step` takes, and returns what it returns. Collective over the pipeline; blocks the host. Modules are
        left in train or eval mode as they are.
        """
        call = call_of(*args, target=target, losses=losses, **kwargs)
        return self._run(lambda: self._begin_eval(call))

    def close(self) -> None:
        """Give groups, threads and the guests' memory back; also happens when the schedule is garbage collected."""
        if isinstance(self._broken, BaseException):
            self._broken = _told(self._broken)  # the error's frames keep the step's tensors alive
        self._finalizer()

    # A step in its phases, which a loopback runs for all ranks side by side

    def _begin_step(self, call: Call) -> _Step:
        if self._loss_fn is not None and not torch.is_grad_enabled():
            raise ConfigurationError("step() trains, and gradients are off here (torch.no_grad): use eval()")
        return self._begin(call, is_training=self._loss_fn is not None)

    def _begin_eval(self, call: Call) -> _Step:
        return self._begin(call, is_training=False)

    def _begin(self, call: Call, *, is_training: bool) -> _Step:
        args, kwargs, targets = inputs = microbatches_of(call, self.plan.num_microbatches, self._specs, is_training=is_training)
        holds_last_stage = self.plan.num_stages - 1 in self._stages
        if is_training and holds_last_stage and targets is None:
            raise ConfigurationError(
                "the last stage has a loss_fn and got no target: pass target= (or target_mbs=) to step() there"
            )
        mode = " ".join(stage.mode() for stage in self._stages.values())
        job = Job(
            args=args,
            kwargs=kwargs,
            targets=targets,
            descriptions=[f"{mode} {description}" for description in inputs.descriptions()],
            loss_fn=self._loss_fn,
            loss_kwargs=call.loss_kwargs or {},
            loss_scale=self._loss_scale,
            keeps_outputs=call.return_outputs and holds_last_stage,
        )
        record = self._record(is_training, mb.digest(job.descriptions)).pack()
        return _Step(record, self._plans[is_training].plan, job, call.losses, is_training)

    def _record(self, is_training: bool, signature: bytes = bytes(16), refusal: str = "") -> Record:
        plan, fingerprint = self._plans[is_training]
        return Record(
            version=__version__,
            fingerprint=fingerprint,
            is_training=is_training,
            step=self._num_steps,
            num_stages=plan.num_stages,
            num_microbatches=plan.num_microbatches,
            pipeline=self._transport.identity,
            signature=signature,
            stages=tuple(sorted(self._stages)),
            refusal=refusal,
        )

    def _agreed(self, step: _Step, packed: Sequence[bytes]) -> Run:
        """Check that all ranks are about to run the same, and make this rank ready for its first action."""
        records = [Record.unpack(data) for data in packed]
        check(records)
        if not self._group_ranks:
            self._place(records)
        key = (step.is_training, tuple(record.signature for record in records))
        is_learning = key not in self._learned
        layouts = self._learned.setdefault(key, {})
        self._learned.move_to_end(key)
        while len(self._learned) > REMEMBERED_SHAPES:
            self._learned.popitem(last=False)
        return Run(
            plan=step.plan,
            rank=self._plan_rank,
            step=self._num_steps,
            stages=self._stages,
            transport=self._transport,
            job=step.job,
            layouts=layouts,
            is_learning=is_learning,
            memory=self._memory,
            observer=self._observer,
        )

    def _place(self, records: Sequence[Record]) -> None:
        """Learn which rank of the group holds which of the plan's ranks, and open the channels."""
        owner = {stage: rank for rank, record in enumerate(records) for stage in record.stages}
        stage_of = {rank: stage for stage, rank in enumerate(self.plan.stage_ranks)}
        self._group_ranks = [owner[stage_of[rank]] for rank in range(self.plan.num_ranks)]
        self._transport.connect(self.plan.channels(), self._group_ranks)
        self._memory.rooms |= {
            evictor: Rooms([0] * len(rooms), self._transport.device) for evictor, rooms in self.plan.rooms(self._plan_rank).items()
        }

    def _finish(self, step: _Step, run: Run, started: float) -> Any:
        self._num_steps += 1
        self.ledger = run.evictions.ledger
        self.stats = stats_of(run, self._memory.guest_bytes, time.perf_counter() - started)
        if self._observer is not None:
            self._observer.finished(run, self.stats)
        if run.holds_last_stage and step.losses is not None:
            step.losses[:] = run.compute.losses
        return mb.merge(run.compute.outputs, self._specs.output) if run.compute.outputs else None

    # Driving them

    def _run(self, begin: Callable[[], _Step]) -> Any:
        if isinstance(self.group, LoopbackGroup):
            return self._run_alone(begin)
        with self._guarded():
            started = time.perf_counter()
            step = self._begin_or_refuse(begin)
            run = self._agreed(step, self._transport.agree(step.record))
            with self._breaking():
                self._execute(run)
            return self._finish(step, run, started)

    def _run_alone(self, begin: Callable[[], _Step]) -> Any:
        loopback: Loopback = self.group.loopback
        if loopback.num_ranks > 1:
            raise ConfigurationError(
                "on a Loopback, call loopback.step(schedules, ...) and loopback.eval(schedules, ...) for all ranks"
            )
        return loopback._run([self], lambda schedule: begin())

    def _begin_or_refuse(self, begin: Callable[[], _Step]) -> _Step:
        """Prepare a step; if this rank cannot, tell the others before raising, so that none of them waits."""
        try:
            return begin()
        except Exception as error:
            self._transport.agree(self._record(True, refusal=_told(error)).pack())
            raise

    def _execute(self, run: Run) -> None:
        chains = run.plan.chains(run.rank)
        servers = [Server(run.execute, chain, self._side_stream(evictor)) for evictor, chain in chains.items()]
        for action in run.plan.actions[run.rank]:
            run.execute(action)
        for server in servers:
            server.finish()

    def _side_stream(self, evictor: int) -> torch.cuda.Stream | None:
        """The stream on which an evictor's rooms live and its transfers run; the same in every step."""
        device = self._transport.device
        if device.type == "cuda" and evictor not in self._side_streams:
            self._side_streams[evictor] = torch.cuda.Stream(device)
        return self._side_streams.get(evictor)

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """One step at a time, and none after an error."""
        if self._broken is not None:
            cause = self._broken if isinstance(self._broken, BaseException) else None
            raise PipelineBrokenError(
                f"this pipeline broke in step {self._num_steps} ({self._broken if cause is None else _told(cause)}). "
                "Gradients may be incomplete: zero them, close() this schedule and build a new one over the same process group."
            ) from cause
        if not self._finalizer.alive:
            raise PipelineBrokenError("this schedule was closed: build a new one")
        if self._is_running:
            raise PipelineBrokenError("step() was called from inside a step, or from a second thread: one step at a time")
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    @contextmanager
    def _breaking(self) -> Iterator[None]:
        """An error in here leaves messages under way: the pipeline is broken."""
        try:
            yield
        except BaseException as error:
            self._broken = error
            self._transport.is_broken = True
            raise


class OneFOneB(Schedule):
    """1F1B: rank x of p holds at most min(p-x, m) microbatches (Narayanan et al., arXiv 2104.04473).

    Example:
        >>> from torch import nn
        >>> loopback = Loopback(1)
        >>> stage = PipelineStage(nn.Linear(4, 4), 0, 1, "cpu", group=loopback.rank(0))
        >>> schedule = OneFOneB(stage, n_microbatches=2, loss_fn=nn.functional.mse_loss)
        >>> schedule.step(torch.zeros(4, 4), target=torch.zeros(4, 4)).shape
        torch.Size([4, 4])
    """

    rule = "1f1b"


class GPipe(Schedule):
    """GPipe: all forwards, then all backwards; every rank holds m microbatches (Huang et al., arXiv 1811.06965)."""

    rule = "gpipe"


class BalancedOneFOneB(Schedule):
    """1F1B in which early ranks evict saved activations to late ones (BPipe, Kim et al., ICML 2023).

    Every rank holds at most `slots` microbatches, by default ceil((p+2)/2), guests and transfers in flight included. The
    gradients are `OneFOneB`'s to the bit.

    Arguments, methods and errors are `Schedule`'s.
    """

    rule = "balanced_1f1b"


def _transport_for(group: Any, device: torch.device, num_ranks: int) -> Transport:
    if isinstance(group, LoopbackGroup):
        _check_size(group.loopback.num_ranks, num_ranks)
        return LoopbackTransport(group.loopback.wires, device)
    from bpipe.comm.c10d import C10dTransport

    transport = C10dTransport(group, device)
    _check_size(transport.size, num_ranks)
    return transport


def _check_size(size: int, num_ranks: int) -> None:
    if size != num_ranks:
        raise ConfigurationError(
            f"the plan needs {num_ranks} ranks and the group has {size}: give the stages the process group of their own pipeline"
        )


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _close(transport: Transport, memory: Memory) -> None:
    transport.close()
    for rooms in memory.rooms.values():
        rooms.clear()
