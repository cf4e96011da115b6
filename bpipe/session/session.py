"""Run the steps of one rank: prepare a call, agree on it with the other ranks, run it and count its memory."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import util
from pkgutil import resolve_name
from typing import Any, NamedTuple

from bpipe._version import __version__
from bpipe.cleanup import noted_on
from bpipe.comm.health.activity import State
from bpipe.comm.health.agreement import RoomRecord, StepRecord, check, rooms_of
from bpipe.comm.health.collective import Collective
from bpipe.comm.transport.base import Transport
from bpipe.engine.messages import MessageSpecs
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Observer, Run
from bpipe.errors import AgreementError, CommError, PlanError, format_error
from bpipe.memory.ledger import Ledger
from bpipe.memory.optimizers import STEPPED
from bpipe.memory.recent import Recent
from bpipe.memory.static import standing
from bpipe.model import microbatch as mb
from bpipe.model.call import Call
from bpipe.model.merging import merge_or_list
from bpipe.model.ties import hidden_refused
from bpipe.parallel.fsdp import REDUCING, units_in
from bpipe.parallel.settings import changed
from bpipe.parallel.shared_weights import NOTHING, Shared, SharedWeights
from bpipe.plan.plan import Plan
from bpipe.session.context import RankContext
from bpipe.session.filler import Filler, both
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import Preparation, PreparedCall, sums_shared
from bpipe.session.side_by_side import SideBySide
from bpipe.session.stats import Stats
from bpipe.torch_private.fsdp_states import groups_of

__all__: list[str] = []

REMEMBERED_SHAPES = 64  # combinations of input shapes whose message specs are kept
COMPARISONS = {"alternatives": "bpipe.twins.exchange:Comparison"}  # by shape: what makes records of stages

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
        self._comparisons: dict[str, Any] = {}  # by shape
        self._shared = SharedWeights()
        self._doubted: set[type[RoomRecord]] = set()  # the features of which a warning was given
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
        for shape in source.plan.flow.shapes:
            if shape.name in COMPARISONS and shape.name not in self._comparisons:
                self._comparisons[shape.name] = resolve_name(COMPARISONS[shape.name])()
        self.source = source

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
        with guard.entered(), hidden_refused({index: stage.submod for index, stage in self.context.stages.items()}):
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
                    run.exchanges.begin()
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
        num_calls = self.context.transport.control.activity.call
        return PreparedStep(inputs, is_training, self._record(inputs, is_training=is_training).pack(num_calls), num_calls)

    def _record(self, inputs: PreparedCall, *, is_training: bool) -> StepRecord:
        source, context, latest = self.source, self.context, self._latest[1]
        plan, fingerprint = source.announced(is_training=is_training)
        compared = [one.record(inputs.parts, plan, latest, is_training=is_training) for one in self._comparisons.values()]
        is_summed = (is_training or not self._shared.has_compared) and sums_shared(plan, context.transport)
        shared = self._shared.record(inputs.parts if is_summed else {})
        context.held_bytes = max(self._shared.held_bytes, *(one.held_bytes for one in self._comparisons.values()), 0)
        return StepRecord(
            version=__version__,
            schedule=source.rule,
            fingerprint=fingerprint,
            is_training=is_training,
            step=self.guard.num_steps,
            num_stages=plan.num_stages,
            num_ranks=plan.num_ranks,
            num_microbatches=plan.num_microbatches,
            pipeline=context.transport.identity,
            signature=mb.digest(inputs.forms.exact),
            stages=tuple(sorted(context.stages)),
            largest_remote_bytes=context.memory.largest_remote_bytes if context.transport.can_lend() else 0,
            idle=tuple(stage for stage, rank in enumerate(plan.stage_ranks) if not plan.actions[rank]),
            rooms=(*inputs.records, *compared, shared, *source.records(inputs, context.states.of(context.modules))),
        )

    def agree(self, step: PreparedStep, packed: Sequence[bytes], gather: Gather) -> Run:
        """Check that all ranks are about to run the same step, and prepare this rank's first action."""
        context, source = self.context, self.source
        records, shared = self.hear(step, packed)
        plan = source.plan_of(step.inputs, records, gather, is_training=step.is_training)
        context.transport.control.activity.state = State.PREPARING
        self._connect(plan, records)
        key = (step.is_training, tuple(record.signature for record in records)), plan.flow.routes
        is_learning, observer = key not in self._learned, source.observer_of(step.inputs, plan, self.observer)
        return Run(
            plan=plan,
            rank=context.plan_rank,
            step=self.guard.num_steps,
            stages=context.stages,
            parts=step.inputs.parts,
            transport=context.transport,
            given=step.inputs.given,
            specs=self._learned.use(key, {}),  # those agreed for inputs of this form, or to be learned
            is_learning=is_learning,
            memory=context.memory,
            name=f"rank {context.group_rank}",
            conventions=context.cutter.conventions(),
            observer=observer if self.filler is None else both(observer, self.filler),
            shared=shared,
        )

    def hear(self, step: PreparedStep, packed: Sequence[bytes]) -> tuple[Sequence[StepRecord], Shared]:
        """Take what all ranks say of a step, which fits together; return it, and the weights that other ranks have, too."""
        records, shared = self._checked(packed, step.num_calls), NOTHING
        if step.is_training:
            shared = self._shared.agreed(records)
            self.source.share(shared)
        self.context.cutter.agreed(records)
        return records, shared

    def _checked(self, packed: Sequence[bytes], num_calls: int) -> Sequence[StepRecord]:
        """Return the records of all ranks, which agree; if they are those of the latest step, nothing is read or checked again."""
        if packed != self._latest[0]:
            records = [StepRecord.unpack(data, num_calls) for data in packed]
            check(records)
            self._latest = packed, records
            if not self.context.group_ranks:
                self._place(records, self.source.plan)
            if self.context.plan_rank == 0:
                self._warn(records)
        return self._latest[1]

    def _warn(self, records: Sequence[StepRecord]) -> None:
        """Say what may be wrong with a step in which the ranks agree, once for each feature."""
        for kind in rooms_of(records):
            for doubt in () if kind in self._doubted else kind.doubts(records, self.source.plan.depth):
                self._doubted.add(kind)
                self.context.log().warning("%s: %s", self.source.rule, doubt)

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
        context = self.context
        outputs = context.cutter.merged(run.results.outputs)
        return merge_or_list(outputs, context.specs.output) if outputs else None

    def finish(self, step: PreparedStep, run: Run, started: float) -> None:
        """Finish a step whose actions have all run: learn from it, count its bytes and times, and hand out its losses."""
        context, source = self.context, self.source
        run.second_forwards.check()
        self._shared.has_compared = True
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
        if run.setup.with_loss and step.inputs.losses is not None:
            step.inputs.losses[:] = run.results.losses.values()
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
    """Let what concerns all of a step act while its actions run: data parallelism, exchanges, hooks, the factor of its losses."""
    sharding, exchanges = run.sharding, run.exchanges
    parallelism = nullcontext() if sharding is None else sharding.in_charge()
    with parallelism, exchanges.in_charge(sharding), run.hooks.watched(), run.setup.loss_scale.in_force():
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
