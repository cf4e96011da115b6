"""Plans in bytes for a schedule that `Balanced` wraps, made from sizes that a dry run says, or a step measures."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from bpipe.api.known_shapes import Comparison, Shapes
from bpipe.api.loopback import LoopbackGroup
from bpipe.api.policy import Policy
from bpipe.comm.health.agreement import RoomRecord, StepRecord
from bpipe.comm.wire.codec import decode_text
from bpipe.engine.remembered import Memory
from bpipe.engine.run import Run
from bpipe.errors import AgreementError, BudgetError, CommError, format_error
from bpipe.memory.recent import Recent
from bpipe.memory.static import available_bytes, bytes_under, present_bytes, static_bytes
from bpipe.model import microbatch as mb
from bpipe.parallel.replicas import difference
from bpipe.parallel.shared_weights import NOTHING, Shared
from bpipe.passes.balance.outcome import outcome
from bpipe.passes.communicate import computations_only
from bpipe.passes.gradient_exchanges import summing
from bpipe.plan.amounts import show_each
from bpipe.plan.sizes import Sizes
from bpipe.schedules import Op, Plan, finish
from bpipe.session.context import RankContext
from bpipe.session.plan_source import Gather, PlanSource
from bpipe.session.prepare import PreparedCall
from bpipe.session.report import RankSizes, Report
from bpipe.session.session import REMEMBERED_SHAPES, StepKey

if TYPE_CHECKING:
    from bpipe.prediction.dry_run import DryRun

__all__: list[str] = []

RESERVE_BYTES = 2**30
REMOTE_CHANNELS = 4  # channels that a plan opens on a rank: to and from its acceptor, and to and from its evictor
LATEST, OFTEN = 20, 16  # steps: a warning is due if OFTEN of the LATEST ones needed new sizes


@dataclass(frozen=True, slots=True)
class MeasuredRecord(RoomRecord):
    """What plans are made from besides the sizes, and when.

    Args:
        revision: how often a rank has asked to measure its microbatches again.
        form: a digest of its inputs without those plain numbers that do not decide what is saved.
        states: the bytes of its optimizer states, and of the gradients that it sets aside.
        inputs: where replicas compare, a digest of what the inputs look like, apart from the modules.
        num_wrong: how often a step has shown other sizes on the rank than a dry run.
    """

    revision: int = 0
    form: bytes = b""
    states: int = 0
    inputs: bytes = b""
    num_wrong: int = 0


class MeasuredPlans(PlanSource):
    """Plans in bytes, each from sizes that a dry run says before the first step with inputs of its shapes, or that this measures.

    Ranks exchange their sizes before they make a plan, and all make the same one. `Balanced` describes the rest.

    Args:
        replicas: a process group of the ranks that hold the same stages in other pipelines, or None.
    """

    compares = False  # plans count the measured bytes, so there is nothing to compare
    predicts = True  # whether a dry run before the first step takes the place of a step that measures

    def __init__(
        self,
        plan: Plan,
        rule: str,
        policy: Policy,
        context: RankContext,
        *,
        replicas: Any,
        is_lowest: bool,
        asked: str,
    ) -> None:
        self._base = computations_only(plan)
        super().__init__(plan if _is_plain(plan) else finish(self._base), rule, asked)
        self._in_order: Plan | None = None  # the plan that measures in the schedule's order, once it was needed
        self._policy, self._context, self._replicas = policy, context, replicas
        self._is_lowest = is_lowest
        self._shapes = Recent[StepKey, Shapes](REMEMBERED_SHAPES)  # by the form of their inputs
        self._latest: Shapes  # those of the latest training step
        self._comparisons = Recent[tuple[bytes, ...], Comparison](REMEMBERED_SHAPES)  # by inputs
        self.revision = 0  # how often this rank has asked to measure again
        self._revisions: tuple[int, ...] = ()  # those of all ranks, in the latest training step
        self._num_wrong = 0  # the predictions that a step has shown to be wrong
        self._call: PreparedCall | None = None  # what the step that begins is given
        self._dry_run: DryRun | None = None  # of that step
        self._shared = NOTHING
        self._recent: deque[bool] = deque(maxlen=LATEST)  # whether the latest steps needed new sizes
        self._has_warned = False

    def share(self, shared: Shared) -> bool:
        self._shared = shared
        if not super().share(shared):
            return False
        self._base = replace(self._base, flow=summing(self._base.flow, shared.holders))
        self._in_order = None
        for shapes in self._shapes.values():
            shapes.measured = shapes.plan = None
        return True

    def prepare(self, memory: Memory, plan_rank: int, stages: Collection[int]) -> None:
        memory.grows = True
        memory.most_parts = dict.fromkeys(stages, self._policy.parts)

    def records(self, inputs: PreparedCall, states: int) -> tuple[RoomRecord, ...]:
        self._call, self._dry_run, forms = inputs, None, inputs.forms
        looks = b"" if self._replicas is None else mb.digest([one.form for one in forms.descriptions])
        states += self._context.held_bytes
        return (MeasuredRecord(self.revision, mb.digest(forms.counted), states, looks, self._num_wrong),)

    def plan_of(self, inputs: PreparedCall, records: Sequence[StepRecord], gather: Gather, *, is_training: bool) -> Plan:
        if not is_training:
            self._call = None
            return super().plan_of(inputs, records, gather, is_training=is_training)
        given = MeasuredRecord.of(records)
        key = (True, tuple(one.form for one in given))
        shapes = self._latest = self._shapes.use(key, Shapes())
        if self._replicas is not None:
            self._compare(tuple(one.inputs for one in given), shapes, gather)
        revisions = tuple(one.revision for one in given)
        self._revise(shapes, revisions)
        if revisions != self._revisions:  # microbatches of a rank take more memory, for any reason
            self._revisions = revisions
            self._context.numbers.count_again(inputs.forms)
        if shapes.replan(tuple((one.states, one.num_wrong) for one in given)):
            self._say("this step's plan counts what the steps before have shown, such as the states of optimizers")
        self._agree_with_replicas(shapes)
        self._warn_if_often(shapes.measured is None)
        if shapes.measured is None and self.predicts and self._policy.measure == "auto" and not shapes.must_measure:
            self._predict(key, revisions, gather)
        self._call = None
        if shapes.measured is None:
            self.plan = self._plan_to_measure(gather)
        else:
            shapes.plan = self.plan = shapes.plan or self._planned(key, gather)
        return self.plan

    def _revise(self, shapes: Shapes, revisions: tuple[int, ...]) -> None:
        if shapes.revise(revisions):
            self._context.memory.kinds.clear()

    def _agree_with_replicas(self, shapes: Shapes) -> None:
        """Forget what replicas have to find out together: nothing, because they make the same plans from the same sizes."""

    def _predict(self, key: StepKey, revisions: tuple[int, ...], gather: Gather) -> None:
        """Find the sizes by a dry run on all ranks, or why a step has to measure them."""
        from bpipe.prediction.dry_run import last_round

        if self._dry_run is None or not self._dry_run.is_over:  # a loopback asks once for each of its ranks
            packed = last_round(lambda before: gather(lambda source: _measured(source)._advance(before)))
            gather(lambda source: _measured(source)._conclude(packed, key, revisions))
            if self._dry_run is not None and self._dry_run.failure:
                self._say(f"this step measures, because sizes cannot be known before it: {self._dry_run.failure}")

    def _conclude(self, packed: Sequence[bytes], key: StepKey, revisions: tuple[int, ...]) -> bytes:
        """End this rank's dry run, and keep what it says."""
        assert self._dry_run is not None, "all ranks have begun one"
        self._dry_run.hear(packed)
        shapes = self._shapes.use(key, Shapes())
        self._revise(shapes, revisions)
        shapes.must_measure = bool(self._dry_run.failure)
        if not shapes.must_measure:
            shapes.measured, shapes.is_predicted = self._dry_run.sizes, True
        return b""

    def _advance(self, packed: Sequence[bytes]) -> bytes:
        """Go on with this rank's dry run."""
        from bpipe.prediction.dry_run import DryRun

        if self._dry_run is None:
            assert self._call is not None, "a step has begun"
            plan = self.announced(is_training=True).plan
            self._dry_run = DryRun(self._context, self._call, plan, self._shared, self._policy.parts)
        return self._dry_run.advance(packed)

    def _plan_to_measure(self, gather: Gather) -> Plan:
        """Return the plan of a step that measures: in the schedule's own order, balanced by the number of microbatches."""
        if self._in_order is None:
            make = partial(self._policy.plan_by_count, self._base)
            self._in_order = self._context.once((self._policy, self._base, "in order"), make)
        return self._in_order

    def _warn_if_often(self, is_new: bool) -> None:
        """Warn once if nearly all of the latest steps needed sizes that were not known."""
        self._recent.append(is_new)
        if self._recent.count(True) == OFTEN and self._context.plan_rank == 0 and not self._has_warned:
            self._has_warned = True
            self._context.log().warning(
                "%s: %d of the latest %d steps had inputs of new shapes, or modules that had changed, and each of them needs new "
                "sizes and a new plan: pad inputs to a few shapes, or give Balanced sizes=",
                self.rule,
                OFTEN,
                len(self._recent),
            )

    # After a step

    def learn(self, run: Run) -> None:
        shapes = self._latest
        if run.plan.sizes is None:
            shapes.measured = _sizes_of(run)
        elif shapes.is_predicted:
            self._compare_with_dry_run(shapes, _sizes_of(run), run.plan)
        else:
            for stage in shapes.outgrown(run.plan, run.evictions.measured()):
                self.measure_again(f"a microbatch of stage {stage} saves more than planned")
        varying = run.evictions.varying() - shapes.varying
        if varying and run.plan.sizes is not None:
            self._num_wrong += 1  # the next plan leaves a margin
        shapes.varying |= varying

    def _compare_with_dry_run(self, shapes: Shapes, found: RankSizes, plan: Plan) -> None:
        """Take what the first step has shown; say so if it is something else than a dry run had said."""
        if shapes.prove(found):
            return
        self._num_wrong += 1
        assert plan.sizes is not None, "its sizes were predicted"
        units = [(stage, unit, sizes.saved) for stage, some in found.stages.items() for unit, sizes in enumerate(some)]
        over = [stage for stage, unit, saved in units if saved > plan.sizes.at(stage, unit).saved]
        log = self._context.log()
        if over:
            log.warning("%s: microbatches of stage %d saved more than a dry run had said, and this step's plan", self.rule, over[0])
        else:
            log.info("%s: this rank's microbatches took other memory than a dry run had said", self.rule)

    def counted(self, run: Run, stats: Mapping[str, float]) -> None:
        """Measure again if static bytes grow with the same modules, such as gradients of parameters that are frozen again."""
        shapes, static = self._latest, self._context.static.num_bytes
        if run.plan.sizes is not None and shapes.static_bytes and static > shapes.static_bytes:
            shapes.static_bytes = static
            self.measure_again("the static bytes of this rank exceed the plan")

    def measure_again(self, why: str) -> None:
        self.revision += 1
        self._context.log().info("%s: %s, so that sizes are found anew before the next step, or in it", self.rule, why)

    # The comparison of replicas, when their inputs require it and before anything may fail in one of them alone

    def _compare(self, inputs: tuple[bytes, ...], shapes: Shapes, gather: Gather) -> None:
        """Raise on all ranks if microbatches of one of them take different memory than on its replicas."""
        comparison = self._comparisons.use(inputs, Comparison(shapes))
        comparison.num_steps += 1
        refusals = _answers(gather, lambda source: source._difference(inputs)) if comparison.num_steps == 2 else []
        if refusal := next(filter(None, refusals), ""):
            raise AgreementError(refusal)

    def _difference(self, inputs: tuple[bytes, ...]) -> str:
        """Return where this rank's replicas take different memory for some inputs; collective over them."""
        one = self._comparisons[inputs]
        if one.difference is None:  # a loopback asks once for each of its ranks
            try:
                assert one.shapes.measured is not None, "they are known before the second step"
                device = self._context.transport.device
                one.difference = difference(self._replicas, one.shapes.measured.stages, one.shapes.varying, device)
            except Exception as error:
                one.difference = f"rank {self._context.group_rank} cannot compare its memory with replicas: {format_error(error)}"
        return one.difference

    # The plan for the measured sizes, which all ranks make from the same numbers

    def _planned(self, key: StepKey, gather: Gather) -> Plan:
        packed = gather(lambda source: _measured(source)._report(key))
        reports = sorted((Report.unpack(data, sender) for sender, data in enumerate(packed)), key=lambda report: report.rank)
        self._say("making the plan")
        if refusal := next((report.refusal for report in reports if report.refusal), ""):
            raise AgreementError(refusal)
        by_stage = {stage: sizes for report in reports for stage, sizes in report.stages.items()}
        if sorted(by_stage) != list(range(self._base.num_stages)):
            raise CommError(f"the ranks sent the sizes of stages {sorted(by_stage)}, but there are {self._base.num_stages} stages")
        slices = [by_stage[stage] for stage in range(self._base.num_stages)]
        if {len(of_stage) for of_stage in slices} != {self._base.slices}:
            raise CommError(f"the ranks sent sizes of {[*map(len, slices)]} slices, but a microbatch has {self._base.slices}")
        sizes = Sizes.of_slices(zip(*slices), static=tuple(report.static for report in reports))
        budgets = None if self._is_lowest else [report.budget for report in reports]
        plan = self._agreed_plan(sizes, budgets, [report.states for report in reports], gather)
        self._say(outcome(plan))
        if self._context.plan_rank == 0:
            names = [f"rank {rank}" for rank in self._context.group_ranks]
            self.fullest.check_plan(plan, names, self.rule, self._context.log().warning)
        return plan

    def _agreed_plan(self, sizes: Sizes, budgets: Sequence[int | None] | None, states: Sequence[int], gather: Gather) -> Plan:
        """Make the plan, and raise on all ranks if one of them failed to make it, or made a different one."""
        error: BaseException | None = None
        try:
            with naming(states):
                plan = self._made_plan(sizes, budgets)
            outcome = plan.fingerprint()
        except BaseException as failure:  # reported to all ranks before it is raised, so that none waits
            error, outcome = failure, format_error(failure)
        outcomes = _answers(gather, lambda _: outcome)
        if error is not None:
            self._context.guard.known_to_all = error
            raise error
        if len(set(outcomes)) > 1:
            raise AgreementError(
                f"the ranks made different plans from the same sizes: {outcomes}. Run the same version of bpipe on all ranks."
            )
        return plan

    def _made_plan(self, sizes: Sizes, budgets: Sequence[int | None] | None) -> Plan:
        make = partial(self._policy.plan_in_bytes, self._base, sizes, budgets)
        return self._context.once((self._policy, self._base, sizes, budgets), make)

    def _report(self, key: StepKey) -> bytes:
        """Return this rank's report for the others: its stages' sizes, its static bytes and its budget, or why it cannot go on."""
        try:
            report = self._own_report(self._shapes.use(key, Shapes()))
        except Exception as error:
            refusal = f"rank {self._context.group_rank} cannot make a plan: {format_error(error)}"
            report = Report(self._context.plan_rank, {}, refusal=refusal)
        return report.pack()

    def _own_report(self, shapes: Shapes) -> Report:
        measured, context = shapes.measured, self._context
        assert measured is not None, "a plan is made from measurements"
        states = context.states.of(context.modules) + context.held_bytes
        shapes.static_bytes = max(shapes.static_bytes, static_bytes(context.modules(), context.transport.device))
        static = shapes.static_bytes + states + measured.held_bytes + measured.returned_bytes
        budget = self._own_budget(measured, states)
        return Report(context.plan_rank, shapes.stages(self._policy.margin), static, budget, states=states)

    def _own_budget(self, measured: RankSizes, states: int) -> int | None:
        """Return this rank's budget in bytes; None for no limit, or for as low as possible."""
        if self._is_lowest:
            return None
        context = self._context
        if self._policy.budget != "auto":
            return self._policy.budgets(self._base.num_ranks)[context.plan_rank]
        device = context.transport.device
        num_sharing = context.group.loopback.num_ranks if isinstance(context.group, LoopbackGroup) else 1
        used = present_bytes(context.modules(), device) + states + measured.held_bytes + context.memory.remote_buffer_bytes
        kept_free = RESERVE_BYTES if self._policy.reserve_bytes is None else self._policy.reserve_bytes
        reserve = kept_free + REMOTE_CHANNELS * context.transport.connection_bytes()
        return used + available_bytes(device, reserve) // num_sharing

    def budget(self, plan_rank: int) -> int | None:
        budget = self._policy.budget
        return None if budget is None or isinstance(budget, str) else self._policy.budgets(self._base.num_ranks)[plan_rank]

    def _say(self, what: str) -> None:
        if self._context.plan_rank == 0:
            self._context.log().info("%s: %s", self.rule, what)


def _sizes_of(run: Run) -> RankSizes:
    return RankSizes.of(run, bytes_under(run.results.returned, run.device))


def _measured(source: PlanSource) -> MeasuredPlans:
    assert isinstance(source, MeasuredPlans), "ranks whose records agree have plans from the same kind of source"
    return source


def _answers(gather: Gather, ask: Callable[[MeasuredPlans], str]) -> list[str]:
    """Ask the sources of all ranks, and return what each of them says."""
    return [decode_text(data) for data in gather(lambda source: ask(_measured(source)).encode(errors="replace"))]


@contextmanager
def naming(states: Sequence[int]) -> Iterator[None]:
    """Add the bytes of optimizer states to the error of a refused budget, because no rank had them when it chose the budget."""
    try:
        yield
    except BudgetError as error:
        if not any(states):
            raise
        raise BudgetError(
            f"{error} Each rank's bytes include {show_each(states)} of optimizer states. Give such a budget, shard "
            "the states over replicas (ZeroRedundancyOptimizer, FSDP2), or train with an optimizer that keeps less state",
            smallest=error.smallest,
        ) from None


def _is_plain(plan: Plan) -> bool:
    """Return whether a plan only computes and sends: no budget, no eviction, no recomputation."""
    if plan.sizes is not None or any(slots is not None for slots in plan.slots):
        return False
    return not any(action.op in (Op.EVICT, Op.R) or action.part for lane in plan.actions for action in lane)
