"""Any schedule, balanced in bytes: sizes come from the first real step, and the plan is made again when they change."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from bpipe.api.fullest import Fullest
from bpipe.api.loopback import LoopbackGroup
from bpipe.api.measured import Comparisons, KnownShapes, Measured, Shapes
from bpipe.api.policy import MARGIN, Budget, Measure, Policy, Way
from bpipe.api.report import Report
from bpipe.api.schedule import Gather, Proven, Schedule, Step, StepKey
from bpipe.comm.health.agreement import Record
from bpipe.comm.health.failure import told
from bpipe.device import is_asynchronous
from bpipe.engine.ordered import OrderWatch
from bpipe.engine.run import Observer, Run
from bpipe.engine.shared import why_in_order
from bpipe.errors import AgreementError, BudgetError, CommError, ConfigurationError
from bpipe.logs import RankLog
from bpipe.memory.optimizers import States
from bpipe.memory.static import available_bytes, bytes_under, present_bytes, static_bytes
from bpipe.model import microbatch as mb
from bpipe.model.plain_numbers import Looks
from bpipe.parallel.replicas import difference
from bpipe.passes.balance.outcome import outcome
from bpipe.passes.communicate import computations_only
from bpipe.passes.one_at_a_time import one_at_a_time
from bpipe.plan.action import COMPUTE
from bpipe.plan.amounts import show_each
from bpipe.plan.destinations import Destinations
from bpipe.plan.sizes import Sizes
from bpipe.schedules import Costs, Op, Plan, finish

__all__ = ["Balanced"]

RESERVE_BYTES = 2**30
GUEST_CHANNELS = 4  # opened by a plan on a rank: its own guests go and come back, and so do another rank's
LATEST, OFTEN = 20, 16  # steps: it warns when OFTEN of the LATEST ones have measured


class Balanced(Schedule):
    """A schedule whose ranks keep within a budget of bytes: what does not fit is evicted to ranks with room.

    The order of computations is the schedule's, and so are the gradients, to the bit. The first step measures, and so does
    each first step with inputs of new shapes or with modules that have changed (docs/composing.md). It runs one microbatch at a
    time, which needs no more memory than the later steps: ranks take turns in it, so it may take p times as long. Before the second
    step the ranks exchange what they measured, and all make and prove the same plan. Sizes that grow although shapes are the same
    are noticed as `schedule.stats` counts them, and measured again; where they vary within a step, plans leave a `margin`.

    Where the order decides about results, a step that measures keeps the schedule's own, on all ranks: where stages of a rank
    share a parameter or a buffer, or one of them has a Dropout, RReLU, RNN or MultiheadAttention that draws random numbers. What
    only the step itself shows raises a StageError in the first microbatch that shows it, and `measure="in_order"` is the way
    out: a backward that draws random numbers (torch's, Python's, NumPy's, a generator of the module), or that changes a
    parameter or a buffer, which a later forward may read; with several stages on a rank, a forward that draws, or a tensor in
    which gradients of two stages add up. A backward that changes another attribute of a module (a log, a bucket of gradients) is
    named in a warning, because only its author knows whether a forward reads it. bpipe does not see what only a global or a
    closure holds, nor a forward that reads gradients or a backward that reads what later forwards change: such modules need
    `measure="in_order"` too.

    A whole number among the inputs (`step(x, it=step)`) counts as a part of their shapes until three of its values have taken
    the same memory and messages; one that changes messages later, or lets evicted microbatches grow, counts again. True, text
    and members of an IntEnum always count, and so does a number that stages hand on with their outputs.

    A rank's bytes are those of its parameters, gradients, buffers and optimizer states, of what its modules hold besides, of the
    outputs and losses that a step returns, of saved activations, messages between stages, and rooms for guests. Optimizers make
    their states in their first step, and only they know how large these are: the pipeline's next step counts them, makes a new
    plan without measuring again, and raises a BudgetError on all ranks if a budget has no room for them. Weights that FSDP
    gathers do not count, nor does memory that operations need only while they run.

    Args:
        schedule: what to balance, of any class and not yet used; use the balanced one in its place. Its own `slots` are dropped.
        budget: the most bytes that each rank may use, static ones included, one number or one for each rank of the plan (None:
            no limit); "auto": on CUDA what the rank uses already and what is free when the plan is made, less `reserve_bytes`,
            on CPU as low as possible; "lowest": as low as possible; None: count microbatches, as `BalancedOneFOneB` does.
        parts: the most parts, up to 64, into which a microbatch may be cut, each of which can move by itself. Parts are whole
            storages, so there are never more of them than it saves.
        inside: whether parts also leave and return inside forwards and backwards, which reaches the mean of the ranks. Where a
            part is cut off, operations may hold up to one part and one message more than is planned.
        to: who may take a rank's guests; default: its pair p-1-x, then any rank with room. `Destinations(host="last")` lets
            ranks use their host's memory where no rank has room.
        costs: how long computations and transfers take, if known: what can be hidden is evicted first.
        sizes: the bytes of a microbatch on each stage and of what stays on each rank, if known: then no step is measured.
        reserve_bytes: with budget "auto", what stays free: room for what operations need while they run, such as the last
            stage's softmax, and for fragments. Default: 1 GiB.
        optimizer: whose states count as static bytes of this rank. A torch.optim.Optimizer is found without it when it has
            stepped. Give one whose states were loaded, so that they count from the first step on, or an object of another kind
            that has a mapping `state` with a nest of tensors for each parameter. States that grow (LBFGS's do in its first steps)
            make a new plan each time. The states of this rank's parameters count, or all of them if it has none of these, because
            it works on copies.
        replicas: a process group of the ranks that hold the same stages in other pipelines: their sizes are compared, and
            refused where they differ. Collective over it in the second training step with inputs of a form, so replicas change
            the shapes and the plain values of their inputs in the same steps. Their modules may change in different ones.
        by: "evict", or "recompute": what is over the budget keeps its input alone and runs forward once more ahead of its
            backward, on its own rank, with the same random numbers, buffers and attributes of its modules. The two forwards are
            compared: what cannot be restored is a `StageError` (docs/recomputation.md). It costs a forward a microbatch and no
            transfer, and on CUDA one wait at the end of the step. Copies of buffers and attributes are not in the plan's bytes.
            Stages next to each other on one rank, as in a V, keep theirs. "evict_or_recompute" evicts what transfers can hide by
            `costs`, and recomputes the rest where a simulated step is then shorter, or where no rank has room; it needs `costs`
            and a budget in bytes.
        measure: "auto", or "in_order": steps that measure keep the schedule's own order in any case. They are balanced by count
            then, as with budget=None, and need the memory for that: on one stage a rank, at most ceil((p+2)/2) microbatches.
        margin: of a stage whose microbatches took different memory in one step (stochastic depth, sizes that depend on data),
            plan for the largest that was seen and this share of its saved bytes more, so that not each new largest one is
            measured again; 0.1 is a tenth. Stages that never varied, and `sizes`, get no margin.

    Raises:
        ConfigurationError: the arguments cannot work together, or the schedule has run or is balanced already.
        BudgetError: a budget that cannot be met, when the sizes are known: here, or with measured ones on all ranks in the
            second step, before anything is sent; with the states of optimizers in the step after theirs.
        AgreementError: in the second step, replicas with different sizes.
        StageError: in a step that measures, a computation whose results depend on the order; see above.

    Example:
        >>> import bpipe
        >>> from torch import nn
        >>> loopback = bpipe.Loopback(6)
        >>> parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(6)]
        >>> stages = [bpipe.PipelineStage(part, i, 6, "cpu", group=loopback.rank(i)) for i, part in enumerate(parts)]
        >>> plain = [bpipe.OneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
        >>> schedules = [bpipe.Balanced(schedule, budget="lowest") for schedule in plain]
        >>> x = torch.randn(512, 8)
        >>> _ = [loopback.step(schedules, x, target=x, return_outputs=False) for _ in range(2)]
        >>> len(schedules[0].plan.evicted(1)) > 0
        True
    """

    def __init__(
        self,
        schedule: Schedule,
        budget: Budget = "auto",
        *,
        parts: int = 1,
        inside: bool = False,
        to: Destinations | None = None,
        costs: Costs | None = None,
        sizes: Sizes | None = None,
        reserve_bytes: int = RESERVE_BYTES,
        optimizer: torch.optim.Optimizer | None = None,
        replicas: Any = None,
        by: Way = "evict",
        measure: Measure = "auto",
        margin: float = MARGIN,
    ) -> None:
        _check_unused(schedule)
        if replicas is not None and not isinstance(replicas, torch.distributed.ProcessGroup):
            raise ConfigurationError(f"replicas is a process group of torch.distributed, got {type(replicas).__qualname__}")
        to = Destinations() if to is None else to
        self.rule = schedule.rule
        self._policy = Policy(
            budget=budget, parts=parts, inside=inside, to=to, costs=costs, sizes=sizes, by=by, measure=measure, margin=margin
        )
        self._policy.check(schedule.plan)
        self._is_lowest = budget == "lowest" or (budget == "auto" and not is_asynchronous(schedule._transport.device))
        self._reserve_bytes, self._replicas = reserve_bytes, replicas
        self._asked = f"{self._policy} {replicas is not None}"
        self._base = computations_only(schedule.plan)
        self._plain = schedule.plan if _is_plain(schedule.plan) else None  # which is proven already
        self._first_plan = self._plan_before_measuring()
        self._one_at_a_time = None if self._first_plan is not None else finish(one_at_a_time(self._base))
        self._in_order: Plan | None = None  # the other one that measures, where it was needed
        self._shapes = KnownShapes()
        self._comparisons = Comparisons()
        self._revision = 0  # how often this rank has asked to measure again
        self._revisions: tuple[int, ...] = ()  # of all ranks, in the latest step that trained
        self._recent: deque[bool] = deque(maxlen=LATEST)  # whether the latest steps measured
        self._has_warned = False
        states = States(schedule._transport.device, optimizer)
        schedule.close()
        super().__init__(*schedule._arguments, **schedule._how)
        self._states = states
        if sizes is not None and self._first_plan is not None and not self._is_lowest:
            self._fullest = Fullest(self._first_plan.budgets)
            self._check_fullest(self._first_plan)
        self._memory.is_inside, self._memory.grows = inside, self._one_at_a_time is not None
        self._memory.most_parts = {s: parts if sizes is None else len(sizes.stages[s].parts) for s in self._stages}

    def _proven(self, plan: Plan) -> Proven:
        """Return a plan with a fingerprint of it and of what was asked for, which the ranks must agree on before they measure."""
        return Proven(plan, hashlib.sha256(f"{plan.fingerprint()} {self._asked}".encode()).hexdigest()[:32])

    def _plan_before_measuring(self) -> Plan | None:
        """Make the plan to train with; return None if sizes have to be measured for it first."""
        policy, sizes = self._policy, self._policy.sizes
        if policy.budget is None:
            return policy.plan_by_count(self._base)
        if sizes is None:
            return None
        if policy.budget == "auto" and not self._is_lowest:
            raise ConfigurationError("budget='auto' asks the devices when a plan is made: with sizes=, give bytes or 'lowest'")
        return policy.plan_in_bytes(self._base, sizes, None if self._is_lowest else policy.budgets(self._base.num_ranks))

    def _make_plan(self, *_: Any) -> Plan:
        return self._first_plan or self._plain or finish(self._base)

    def _record(self, is_training: bool, looks: Looks) -> Record:
        inputs = bytes(16) if self._replicas is None else mb.digest([one.form for one in looks.descriptions])
        return super()._record(is_training, looks)._replace(revision=self._revision, inputs=inputs)

    def _compares(self) -> bool:
        return self._one_at_a_time is None  # what was measured is planned in these bytes

    def _plan_to_run(self, step: Step, records: Sequence[Record], gather: Gather) -> Plan:
        if not step.is_training or self._one_at_a_time is None:
            return step.plan
        key = (True, tuple(record.form for record in records))
        shapes = self._shapes.of(key)
        if self._replicas is not None:
            self._compare(tuple(record.inputs for record in records), shapes, gather)
        revisions = tuple(record.revision for record in records)
        if shapes.revise(revisions):
            self._memory.kinds.clear()
        if revisions != self._revisions:  # some rank's microbatches take more, for whatever reason
            self._revisions = revisions
            self._numbers.count_again(step.looks)
        if shapes.replan(tuple(record.states for record in records)):
            self._say("optimizers have made other states, which this step's plan counts")
        self._warn_if_often(shapes.measured is None)
        if shapes.measured is None:
            self.plan = self._plan_to_measure(gather)
        else:
            shapes.plan = self.plan = shapes.plan or self._planned(key, gather)
        return self.plan

    def _plan_to_measure(self, gather: Gather) -> Plan:
        """Return the plan of a step that measures: one microbatch at a time, if that gives the same results on all ranks."""
        assert self._one_at_a_time is not None, "nothing is measured where sizes are known"
        if self._policy.measure == "in_order":
            reasons = ["as it was asked for"]
        else:
            reasons = [reason for reason in (data.decode() for data in gather(lambda one: one._needs_order())) if reason]
        if len(self._shapes) > 1 or reasons:
            how = f"in the schedule's own order ({reasons[0]})" if reasons else "one microbatch at a time"
            self._say(f"new shapes or sizes: this step runs {how} and measures them")
        if not reasons:
            return self._one_at_a_time
        if self._in_order is None:
            self._in_order = self._made_once("in order", lambda: self._policy.plan_by_count(self._base))
        return self._in_order

    def _needs_order(self) -> bytes:
        return why_in_order(self._stages, self._loss_fn, shares_random=self._shares_random()).encode()

    def _shares_random(self) -> bool:
        """Return whether this rank's forwards and those of another stage draw from the same random numbers."""
        with_ranks = isinstance(self.group, LoopbackGroup) and not self.group.loopback.own_random_state
        return self.plan.num_stages > 1 if with_ranks else len(self._stages) > 1

    def _observer_of(self, step: Step, plan: Plan) -> Observer | None:
        if plan is not self._one_at_a_time:
            return self._observer
        shares_random = self._shares_random()
        if not shares_random and _computed(plan, self._plan_rank) == _computed(self._base, self._plan_rank):
            return self._observer
        return OrderWatch(self._stages, step.job, self._transport.device, shares_random=shares_random, inner=self._observer)

    def _warn_if_often(self, measures: bool) -> None:
        """Warn once when nearly all of the latest steps have measured."""
        self._recent.append(measures)
        if self._recent.count(True) == OFTEN and self._plan_rank == 0 and not self._has_warned:
            self._has_warned = True
            self._log().warning(
                "%s: %d of the latest %d steps had inputs of new shapes, or modules that had changed, and ran one microbatch at "
                "a time to measure them: pad inputs to a few shapes, or give Balanced the sizes",
                self.rule,
                OFTEN,
                len(self._recent),
            )

    def _finish(self, step: Step, run: Run, started: float) -> None:
        if step.is_training and (run.plan is self._one_at_a_time or run.plan is self._in_order):
            ledger, returned = run.evictions.ledger, bytes_under(run.compute.kept(), run.device)
            self._shapes.latest().measured = Measured(
                stages=run.evictions.settled(), held_bytes=ledger.held_bytes, returned_bytes=returned
            )
        elif self._one_at_a_time is not None and run.plan.sizes is not None:
            for stage in self._shapes.latest().outgrown(run.plan.sizes, run.evictions.measured()):
                self._measure_anew(f"a microbatch of stage {stage} saves more than planned")
        if step.is_training and self._one_at_a_time is not None:
            self._shapes.latest().varying |= run.evictions.varying()
        super()._finish(step, run, started)
        if self._one_at_a_time is not None and step.is_training and run.plan.sizes is not None:
            self._check_static(self._shapes.latest(), self._static.num_bytes)

    def _check_static(self, shapes: Shapes, static: int) -> None:
        """Measure again if more stays on this rank with the same modules, such as gradients of parameters that are frozen again."""
        if shapes.static_bytes and static > shapes.static_bytes:
            shapes.static_bytes = static
            self._measure_anew("more stays on this rank than planned")

    def _learn_numbers(self, looks: Looks, run: Run) -> bool:
        counts_again = super()._learn_numbers(looks, run)
        if counts_again and self._one_at_a_time is not None:
            self._measure_anew("a plain number among the inputs has changed what a microbatch takes")
        return counts_again

    def _measure_anew(self, why: str) -> None:
        self._revision += 1
        self._log().info("%s: %s, so that the next step measures anew", self.rule, why)

    # What replicas compare, when their inputs say so and before anything may fail in one of them alone

    def _compare(self, inputs: tuple[bytes, ...], shapes: Shapes, gather: Gather) -> None:
        """Raise on all ranks if microbatches of one of them take different memory than on its replicas."""
        if self._comparisons.is_due(inputs, shapes):
            refusals = [data.decode() for data in gather(lambda schedule: schedule._difference(inputs))]
            refusal = next(filter(None, refusals), None)
            if refusal is not None:
                raise AgreementError(refusal)

    def _difference(self, inputs: tuple[bytes, ...]) -> bytes:
        one = self._comparisons.of(inputs)
        if one.difference is None:  # a loopback asks once for each of its ranks
            try:
                assert one.shapes.measured is not None, "the first step with some inputs measures"
                assert self._replicas is not None, "only replicas compare"
                one.difference = difference(self._replicas, one.shapes.measured.stages, one.shapes.varying, self._transport.device)
            except Exception as error:
                one.difference = f"rank {self._group_ranks[self._plan_rank]} cannot compare its memory with replicas: {told(error)}"
        return one.difference.encode()

    # The plan for what was measured, which all ranks make from the same numbers

    def _planned(self, key: StepKey, gather: Gather) -> Plan:
        packed = gather(lambda schedule: schedule._report(key))
        reports = sorted((Report.unpack(data, sender) for sender, data in enumerate(packed)), key=lambda report: report.rank)
        self._say("making the plan for what was measured")
        refusal = next((report.refusal for report in reports if report.refusal), None)
        if refusal is not None:
            raise AgreementError(refusal)
        by_stage = {stage: sizes for report in reports for stage, sizes in report.stages.items()}
        if sorted(by_stage) != list(range(self._base.num_stages)):
            raise CommError(f"the ranks sent sizes of stages {sorted(by_stage)}, of {self._base.num_stages}")
        stages = tuple(by_stage[stage] for stage in range(self._base.num_stages))
        sizes = Sizes(stages=stages, static=tuple(report.static for report in reports))
        budgets = None if self._is_lowest else [report.budget for report in reports]
        plan = self._agreed_plan(sizes, budgets, [report.states for report in reports], gather)
        self._say(outcome(plan))
        self._check_fullest(plan, self._group_ranks)
        return plan

    def _check_fullest(self, plan: Plan, group_ranks: Sequence[int] | None = None) -> None:
        """Warn of what a plan shows; warnings name the plan's ranks as long as the group's are unknown."""
        if self._plan_rank == 0:
            names = [f"rank {rank}" + " of the plan" * (group_ranks is None) for rank in group_ranks or range(plan.num_ranks)]
            self._fullest.check_plan(plan, names, self.rule, RankLog(0 if group_ranks is None else group_ranks[0]).warning)

    def _agreed_plan(self, sizes: Sizes, budgets: Sequence[int | None] | None, states: Sequence[int], gather: Gather) -> Plan:
        """Make the plan, and raise on all ranks if one of them failed to make it, or made a different one."""
        error: BaseException | None = None
        try:
            with _naming(states):
                plan = self._made_plan(sizes, budgets)
            outcome = plan.fingerprint()
        except BaseException as failure:  # told before it is raised, so that no rank waits
            error, outcome = failure, told(failure)
        outcomes = [data.decode() for data in gather(lambda _: outcome.encode())]
        if error is not None:
            self._told = error
            raise error
        if len(set(outcomes)) > 1:
            raise AgreementError(
                f"the ranks made different plans from the same sizes: {outcomes}. Run one version of bpipe on all."
            )
        return plan

    def _made_plan(self, sizes: Sizes, budgets: Sequence[int | None] | None) -> Plan:
        """Make the plan for some sizes, only once for all ranks of a loopback, because they are one process."""
        return self._made_once((sizes, budgets), lambda: self._policy.plan_in_bytes(self._base, sizes, budgets))

    def _made_once(self, asked: object, make: Callable[[], Plan]) -> Plan:
        if isinstance(self.group, LoopbackGroup):
            return self.group.loopback.once((self._policy, self._base, asked), make)
        return make()

    def _report(self, key: StepKey) -> bytes:
        """Return what this rank tells the others: its stages' sizes, its static bytes and its budget, or why it cannot go on."""
        try:
            report = self._own_report(self._shapes.of(key))
        except Exception as error:
            report = Report(
                self._plan_rank, {}, refusal=f"rank {self._group_ranks[self._plan_rank]} cannot make a plan: {told(error)}"
            )
        return report.pack()

    def _own_report(self, shapes: Shapes) -> Report:
        measured, device = shapes.measured, self._transport.device
        assert measured is not None, "a plan is made of what was measured"
        states = self._states.of(self._modules)
        shapes.static_bytes = max(shapes.static_bytes, static_bytes(self._modules(), device))
        static = shapes.static_bytes + states + measured.held_bytes + measured.returned_bytes
        budget = self._own_budget(measured)
        return Report(self._plan_rank, shapes.stages(self._policy.margin), static, budget, states=states)

    def _own_budget(self, measured: Measured) -> int | None:
        """Return this rank's budget in bytes; None for no limit, or for as low as possible."""
        if self._is_lowest:
            return None
        if self._policy.budget != "auto":
            return self._policy.budgets(self._base.num_ranks)[self._plan_rank]
        device = self._transport.device
        num_sharing = self.group.loopback.num_ranks if isinstance(self.group, LoopbackGroup) else 1
        states = self._states.of(self._modules)
        used = present_bytes(self._modules(), device) + states + measured.held_bytes + self._memory.guest_bytes
        reserve = self._reserve_bytes + GUEST_CHANNELS * self._transport.connection_bytes()
        return used + available_bytes(device, reserve) // num_sharing

    def _say(self, what: str) -> None:
        if self._plan_rank == 0:
            self._log().info("%s: %s", self.rule, what)


def _computed(plan: Plan, rank: int) -> list[tuple[object, ...]]:
    """Return the computations of a rank, in order."""
    return [action[:3] for action in plan.actions[rank] if action.op in COMPUTE]


@contextmanager
def _naming(states: Sequence[int]) -> Iterator[None]:
    """Add the bytes of optimizer states to the error of a refused budget, because no rank had them when it chose the budget."""
    try:
        yield
    except BudgetError as error:
        if not any(states):
            raise
        raise BudgetError(
            f"{error} Of what each rank holds, {show_each(states)} are states that optimizers have made. Give such a budget, shard "
            "the states over replicas (ZeroRedundancyOptimizer, FSDP2), or train with an optimizer that keeps less"
        ) from error


def _is_plain(plan: Plan) -> bool:
    """Return whether a plan does nothing but compute and send: no budget, nothing evicted or recomputed, no pieces."""
    if plan.sizes is not None or any(slots is not None for slots in plan.slots):
        return False
    return not any(action.op in (Op.EVICT, Op.R) or action.part for lane in plan.actions for action in lane)


def _check_unused(schedule: object) -> None:
    if isinstance(schedule, Balanced):
        raise ConfigurationError("this schedule is balanced already: give Balanced the schedule that it was made from")
    if not isinstance(schedule, Schedule):
        raise ConfigurationError(
            f"Balanced takes a schedule such as OneFOneB(stage, 8, loss_fn), got {type(schedule).__qualname__}"
        )
    if schedule._num_steps or schedule._broken is not None or not schedule._finalizer.alive:
        raise ConfigurationError("Balanced takes a schedule that has not run and is not closed: make a new one")
