"""Run the steps of one rank: prepare a call, agree on it with the other ranks, run it and count its memory."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing import util
from typing import Any, NamedTuple

from bpipe._version import __version__
from bpipe.cleanup import noted_on
from bpipe.comm.health.activity import State
from bpipe.comm.health.agreement import UNKNOWN_CUT, StepRecord, check, slices_of, unlike_twins
from bpipe.comm.health.collective import Collective
from bpipe.comm.transport.base import Transport
from bpipe.engine.compute import StepInputs
from bpipe.engine.messages import MessageSpecs
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Observer, Run
from bpipe.engine.settings import changed
from bpipe.errors import AgreementError, CommError, PlanError, format_error
from bpipe.logs import RankLog
from bpipe.memory.ledger import Ledger
from bpipe.memory.optimizers import STEPPED
from bpipe.memory.recent import Recent
from bpipe.memory.static import standing
from bpipe.model import microbatch as mb
from bpipe.model.call import Call
from bpipe.model.cut import cut_of
from bpipe.model.merging import check_merge, merge_or_list
from bpipe.parallel.directions import directions_of
from bpipe.parallel.fsdp import REDUCING, units_in
from bpipe.parallel.twins import held_by, kinds_of, weights_of
from bpipe.plan.plan import Plan
from bpipe.session.batches import BatchSample, difference, is_compared
from bpipe.session.context import RankContext
from bpipe.session.filler import Filler, both
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import Preparation, PreparedCall
from bpipe.session.side_by_side import SideBySide
from bpipe.session.stats import Stats
from bpipe.skips.routes import skips_of
from bpipe.torch_private.fsdp_states import groups_of

__all__: list[str] = []

REMEMBERED_SHAPES = 64  # combinations of input shapes whose message specs are kept

StepKey = tuple[bool, tuple[bytes, ...]]  # whether it trains, and a description of each rank's inputs
SpecsKey = tuple[StepKey, tuple[tuple[int, ...], ...]]  # messages go elsewhere where microbatches take other paths


class PreparedStep(NamedTuple):
    """A step that this rank is ready for, and the record of it that is sent to the other ranks."""

    inputs: PreparedCall
    is_training: bool
    record: bytes
    num_calls: int  # that it counts from


class Session:
    """The steps of one rank of a pipeline.

    `run` drives one step over a process group. A `Loopback` calls its phases for all ranks side by side: `begin`, `agree`, the
    actions of the runs, `result` and `finish`. A caller that steps, or works between steps as a trace does, enters `guard` first.
    """

    is_dry = False  # whether the other ranks do not exist

    def __init__(self, context: RankContext, source: PlanSource) -> None:
        self.context, self.source = context, source
        self.guard = context.guard
        self.observer: Observer | None = None
        self.filler: Filler | None = None
        self.overlap: SideBySide | None = None
        self.stats: dict[str, float] = {}
        self.ledger = Ledger()
        self._preparation = Preparation(context)
        self._learned = Recent[SpecsKey, MessageSpecs](REMEMBERED_SHAPES)
        self._connected: Plan | None = None
        self._largest: list[int] = []  # of each rank of a plan that counts slots, for which its buffers are reserved
        self._compares_weights = True  # of twins
        self._makeups: dict[int, int] | None = None  # of each stage in the latest step
        self._has_told_twins = False  # that they differ
        self._has_told_batches = False  # that the ranks were given different ones
        self._latest: tuple[Sequence[bytes], Sequence[StepRecord]] = (), ()  # that agreed, but for the number of the step
        self._counted = Stats(context.memory)
        self.adopt(source)
        self._finalizer = weakref.finalize(self, _close, context.transport, context.memory, os.getpid(), STEPPED.open())
        util.Finalize(self, self._finalizer, exitpriority=0)  # processes of multiprocessing end without atexit
        context.transport.enlist()

    def adopt(self, source: PlanSource) -> None:
        """Take plans from another source, from the next step on."""
        context = self.context
        context.lanes.prepare(source.plan, context.plan_rank)
        source.prepare(context.memory, context.plan_rank, context.stages)
        self.source = source
        plan = source.plan
        if context.plan_rank == 0 and skips_of(plan.flow) and any(map(plan.recomputed, range(plan.num_ranks))):
            RankLog(0).warning(
                "%s: the plan recomputes stages of a model with skips, whose bytes are not counted exactly: peaks in stats, "
                "predicted and counted ones, may be other than what a rank holds. Evict instead (by='evict') if they matter",
                source.rule,
            )

    @property
    def is_unused(self) -> bool:
        """Whether no step has run or failed, and the pipeline is open."""
        return not self.guard.num_steps and self.guard.broken is None and not self.guard.is_closed

    def close(self) -> None:
        """Release groups, threads and the buffers that are kept for other ranks."""
        self.guard.leave()
        self._finalizer()

    def run(self, begin: Callable[[], PreparedStep]) -> Any:
        """Run a step over a process group, and return its result. Collective; blocks the host."""
        transport, guard = self.context.transport, self.guard
        with guard.entered():
            started = time.perf_counter()
            step = self._begin_or_refuse(begin)
            meanwhile = None if self.filler is None else self.filler.between_steps
            with guard.failing_together(AgreementError, PlanError):
                records = transport.exchange(Collective.STEP, step.record, meanwhile)
                transport.control.activity.state = State.AGREEING
                run = self.agree(step, records, lambda ask: transport.exchange(Collective.PLAN, ask(self.source)))
            with guard.failing_together():
                with under_way(run), transport.control.interruptible():
                    users = *self.context.modules(), self.context.loss_fn
                    pair = self.overlap if self.overlap is not None and self.overlap.runs(run, users) else None
                    self.context.lanes.drive(run, transport.control, self.context.group_ranks, pair)
                result = self.result(run)
                self.finish(step, run, started)
                if self.filler is not None:
                    self.filler.returned(result)
            return result

    def reducing(self, call: Call) -> AbstractContextManager[None]:
        """Leave the reduction of gradients under FSDP2 to a later step, if a call says so, as the user's own switch would."""
        if call.finalize_gradients:
            return nullcontext()
        units = units_in(one for module in self.context.modules() for one in module.modules())
        return changed((group, name, False) for unit in units for group in groups_of(unit) for name in REDUCING)

    def _begin_or_refuse(self, begin: Callable[[], PreparedStep]) -> PreparedStep:
        """Prepare a step; if this rank cannot, notify the others before raising, so that none of them waits."""
        try:
            return begin()
        except BaseException as error:
            with noted_on(error), self.guard.failing_together(), suppress(CommError):
                self.context.transport.refuse(format_error(error))
            raise

    # The phases of a step

    def begin(self, call: Call, *, is_training: bool) -> PreparedStep:
        """Prepare a call, without communication."""
        plan = self.source.announced(is_training=is_training).plan
        if not is_training:  # `adopt` has prepared the plan of training steps
            self.context.lanes.prepare(plan, self.context.plan_rank)
        inputs = self._preparation.inputs(call, plan, is_training=is_training)
        record = self.source.completed(self._record(inputs, is_training=is_training), inputs.forms)
        if is_training and is_compared(self.guard.num_steps):
            record = record._replace(batch=BatchSample.of(call))
        num_calls = self.context.transport.control.activity.call
        return PreparedStep(inputs, is_training, record.pack(num_calls), num_calls)

    def _record(self, inputs: PreparedCall, *, is_training: bool) -> StepRecord:
        source, stages, forms = self.source, self.context.stages, inputs.forms
        plan, fingerprint = source.announced(is_training=is_training)
        states = self.context.states.of(self.context.modules)
        peak, plain_peak = source.fullest.peaks(states)
        return StepRecord(
            version=__version__,
            schedule=source.rule,
            fingerprint=fingerprint,
            is_training=is_training,
            step=self.guard.num_steps,
            num_stages=plan.num_stages,
            num_ranks=plan.num_ranks,
            num_microbatches=plan.num_microbatches,
            pipeline=self.context.transport.identity,
            signature=(signature := mb.digest(forms.exact)),
            stages=tuple(sorted(stages)),
            cut=next((cut.digest for stage in stages.values() if (cut := cut_of(stage.submod)) is not None), UNKNOWN_CUT),
            form=mb.digest(forms.counted) if forms.numbered else signature,
            states=states + self.context.held_bytes,
            peak=peak,
            plain_peak=plain_peak,
            largest_remote_bytes=self.context.memory.largest_remote_bytes if self.context.transport.can_lend() else 0,
            slices=tuple(inputs.step_inputs.lengths or ()),
            batch_size=inputs.batch_size,
            idle=tuple(stage for stage, rank in enumerate(plan.stage_ranks) if not plan.actions[rank]),
            **self._twins(inputs, plan, is_training=is_training),
        )

    def _twins(self, inputs: PreparedCall, plan: Plan, *, is_training: bool) -> dict[str, Any]:
        """Return what twins compare: values in the first step, and in the one after a module of any rank has changed."""
        if directions_of(plan.flow) == 1:
            return {}
        if is_training:  # an evaluation sets nothing aside
            self.context.held_bytes = max(self.context.held_bytes, held_by(inputs.parts))
        kinds, settings = kinds_of(inputs.parts)
        makeups = {stage: one.makeup for stage, one in inputs.parts.items()}
        is_changed, self._makeups = self._makeups not in (None, makeups), makeups
        weights = weights_of(inputs.parts, plan.depth, with_values=self._compares_weights)
        return {"weights": weights, "kinds": kinds, "settings": settings, "is_changed": is_changed}

    def agree(self, step: PreparedStep, packed: Sequence[bytes], gather: Gather) -> Run:
        """Check that all ranks are about to run the same step, and prepare this rank's first action."""
        context, source = self.context, self.source
        records = self._checked(packed, step.num_calls)
        self._compares_weights = any(record.is_changed for record in records)
        if not context.group_ranks:
            self._place(records, source.plan)
        if context.plan_rank == 0 and source.fullest.is_open:
            names = [f"rank {rank}" for rank in context.group_ranks]
            source.fullest.check([records[rank] for rank in context.group_ranks], names, source.rule, context.log().warning)
        is_due = context.plan_rank == 0 and not self._has_told_batches and is_compared(self.guard.num_steps)
        if is_due and (found := difference(records, source.plan)):
            self._has_told_batches = True
            context.log().warning("%s: %s", source.rule, found)
        if context.plan_rank == 0 and not self._has_told_twins and directions_of(source.plan.flow) > 1:
            self._compare_twins(records)
        plan = source.plan_of(step.inputs, records, gather, is_training=step.is_training)
        context.transport.control.activity.state = State.PREPARING
        self._connect(plan, records)
        key = (step.is_training, tuple(record.signature for record in records)), plan.flow.routes
        is_learning = key not in self._learned
        return Run(
            plan=plan,
            rank=context.plan_rank,
            step=self.guard.num_steps,
            stages=context.stages,
            parts=step.inputs.parts,
            transport=context.transport,
            step_inputs=self._informed(step.inputs.step_inputs, records),
            specs=self._learned.use(key, {}),  # those agreed for inputs of this form, or to be learned
            is_learning=is_learning,
            memory=context.memory,
            name=f"rank {context.group_rank}",
            takes_slices=context.slicing is not None,
            observer=both(source.observer_of(step.inputs, plan, self.observer), self.filler),
        )

    def _compare_twins(self, records: Sequence[StepRecord]) -> None:
        """Warn if twins differ in what may decide what they compute."""
        if found := unlike_twins(records, lambda record: record.settings):
            self._has_told_twins = True
            self.context.log().warning(
                "%s: stages %d and %d are twins, on ranks %d and %d, and have other attributes or hooks: if these change what a "
                "stage computes, the gradients are of two different models; give both the same",
                *(self.source.rule, *found),
            )

    def _informed(self, inputs: StepInputs, records: Sequence[StepRecord]) -> StepInputs:
        """Let the last stage know how long slices are, though only the first one may have got a sequence."""
        slicing = self.context.slicing
        if slicing is None:
            return inputs
        lengths = slices_of(records) or None

        def check_output(output: Any) -> None:
            check_merge(slicing.expected(output, lengths), self.context.specs.output)

        return replace(inputs, lengths=lengths, check_output=check_output)

    def _checked(self, packed: Sequence[bytes], num_calls: int) -> Sequence[StepRecord]:
        """Return the records of all ranks, which agree; if they are those of the latest step, nothing is read or checked again."""
        if packed != self._latest[0]:
            records = [StepRecord.unpack(data, num_calls) for data in packed]
            check(records)
            self._latest = packed, records
        return self._latest[1]

    def _place(self, records: Sequence[StepRecord], plan: Plan) -> None:
        """Learn which rank of the group runs which rank of the plan, and open the channels."""
        owner = {stage: rank for rank, record in enumerate(records) for stage in record.stages}
        stage_of = {rank: stage for stage, rank in enumerate(plan.stage_ranks)}
        self.context.group_ranks[:] = [owner[stage_of[rank]] for rank in range(plan.num_ranks)]
        self._connect(plan, records)

    def _connect(self, plan: Plan, records: Sequence[StepRecord]) -> None:
        """Open a plan's channels, and reserve buffers for the activations that it evicts to this rank."""
        if self._connected is not None and not plan.has_backward:
            return
        context, transport = self.context, self.context.transport
        largest = [] if plan.sizes is not None else [records[rank].largest_remote_bytes for rank in context.group_ranks]
        if plan is self._connected and largest == self._largest:
            return
        transport.connect(plan.channels(), context.group_ranks, are_sized=plan.sizes is not None or any(largest))
        context.memory.reserve(plan, context.plan_rank, transport, largest)
        self._connected, self._largest = plan, largest

    def result(self, run: Run) -> Any:
        """Return the result of the step: the merged outputs, or their list if they do not fit together; None if there are none."""
        outputs, slicing = list(run.compute.outputs.values()), self.context.slicing
        if outputs and slicing is not None:
            outputs = slicing.merged(outputs, run.compute.lengths)
        return merge_or_list(outputs, self.context.specs.output) if outputs else None

    def finish(self, step: PreparedStep, run: Run, started: float) -> None:
        """Finish a step whose actions have all run: learn from it, count its bytes and times, and hand out its losses."""
        context, source = self.context, self.source
        run.compute.reruns.check()
        if step.is_training:
            source.learn(run)
        self.guard.num_steps += 1
        self.ledger = run.evictions.ledger
        if step.is_training and self._preparation.learn(step.inputs.forms, run):
            source.measure_again("a plain number among the inputs has changed the memory of a microbatch")
        static, states = self._static_bytes(step.inputs), context.states.of(context.modules)
        self.stats = self._counted.of(run, static + states, time.perf_counter() - started)
        if step.is_training and run.plan is not source.fullest.plan and source.compares:
            source.fullest.note(run, self.stats, states, context.once)
        if self.filler is not None:
            self.filler.finished(run, self.stats)
            self.stats |= self.filler.numbers()
        if self.observer is not None:
            self.observer.finished(run, self.stats)
        if run.has_loss and step.inputs.losses is not None:
            losses, slicing = list(run.compute.losses.values()), self.context.slicing
            step.inputs.losses[:] = losses if slicing is None else slicing.losses(losses, step.inputs.weights)
        if step.is_training:
            source.counted(run, self.stats)

    def _static_bytes(self, inputs: PreparedCall) -> int:
        """Return the bytes that stay on this rank between steps, as at the end of this one, without optimizer states."""
        context = self.context
        seen = [(one.makeup, standing(one.modules, one.parameters)) for one in inputs.parts.values()]
        if context.static.has_changed(context.modules(), seen):
            context.states.forget()
        return context.static.num_bytes


@contextmanager
def under_way(run: Run) -> Iterator[None]:
    """Let what concerns all of a step act while its actions run: data parallelism, twins, hooks, the factor of its losses."""
    with run.sharding.in_charge(), run.twins.in_charge(), run.hooks.watched(), run.compute.loss_scale.in_force():
        yield


def _close(transport: Transport, memory: Memory, process: int, opened: object) -> None:
    if os.getpid() == process:  # a forked child must not release its parent's resources
        STEPPED.close(opened)
        if transport.control.failure is None:
            # What an evictor does not give back stays as long as it has it.
            with suppress(CommError, RuntimeError):
                memory.reclaim(transport)
        transport.close()
        memory.clear()
