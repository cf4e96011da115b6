"""Balance any schedule in bytes: sizes come from a dry run before the first step, and a new plan is made when they change."""

from __future__ import annotations

from typing import Any

import torch

from bpipe.api.description import described
from bpipe.api.measured_plans import MeasuredPlans
from bpipe.api.options import BALANCING, Options, options_for, values_of
from bpipe.api.policy import Budget, Policy, Way
from bpipe.api.schedule import Schedule
from bpipe.backward.without_loss import check_loss
from bpipe.comm.transport.process_group import group_of
from bpipe.device import is_asynchronous
from bpipe.errors import ConfigurationError
from bpipe.logs import RankLog
from bpipe.memory.optimizers import Optimizers, States
from bpipe.passes.communicate import computations_only
from bpipe.plan.destinations import Destinations
from bpipe.plan.sizes import Sizes
from bpipe.schedules import Costs, Plan
from bpipe.session.fullest import Fullest
from bpipe.session.plan_source import PlanSource

__all__ = ["Balanced"]


class Balanced(Schedule):
    """A schedule whose ranks keep within a budget of bytes: activations over the budget are evicted to ranks with free memory.

    The order of computations is the schedule's, and so are the gradients, to the bit. Before the first step, and before each first
    step with inputs of new shapes or with modules that have changed (docs/how-to/modules-that-change.md), each rank runs its stages
    once on fake tensors, which hold no data: forwards and backwards of one microbatch of each kind, in pipeline order. That
    computes nothing, draws no random number, calls no hook on your modules and leaves them and the loss as they were, but their
    code runs (docs/limits.md says what bpipe cannot see). Ranks exchange the sizes, and all make and prove the same plan. The step
    itself then shows whether they are right; if not, the logger "bpipe" says so, and the next plan is made from the step's own.

    Where only a forward with data shows what is saved (control flow that asks for activations, stages under FSDP2 or DDP, compiled
    ones, and others: docs/how-to/balance-in-bytes.md), a step measures instead, which the logger says with the reason. It keeps the
    schedule's order and is balanced by count, as with budget=None, and the plan is made before the step after it. bpipe notices
    sizes that grow although shapes are the same when it computes `schedule.stats`, and plans again; if sizes vary within a step,
    plans leave a margin.

    A whole number among the inputs (`step(x, it=step)`) counts as part of their shapes until three of its values have taken
    the same memory and messages; one that changes messages later, or lets evicted microbatches grow, counts again. True, text
    and members of an IntEnum always count, and so does a number that stages hand on with their outputs.

    A rank's bytes are those of its parameters, gradients, buffers and optimizer states, of other tensors of its modules, of the
    outputs and losses that a step returns, of saved activations, messages between stages, and buffers for remote activations.

    Optimizers make their states in their first step, and only they know how large these are: the pipeline's next step counts them,
    makes a new plan without measuring again, and raises a BudgetError on all ranks if a budget has no room for them. Weights that
    FSDP gathers do not count, nor does memory that operations need only while they run.

    Args:
        schedule: the schedule to balance, of any class and not yet used; use the balanced one in its place. Its own `slots` are
            dropped.
        budget: the most bytes that each rank may use, static ones included, one number or one for each rank of the plan (None:
            no limit); "auto": on CUDA the bytes that the rank uses already plus those that are free when the plan is made, less
            `Options.reserve_bytes`, on CPU as low as possible; "lowest": as low as possible; None: count microbatches, as
            `BalancedOneFOneB` does.
        to: the ranks that may store a rank's evicted activations; default: its pair p-1-x, then any rank with free memory.
            `Destinations(host="last")` lets ranks use their host's memory if no rank has free memory.
        costs: how long computations and transfers take, if known: transfers that can be hidden are evicted first.
        sizes: the bytes of a microbatch on each stage and the static bytes of each rank, if known: then nothing is found out.
        optimizer: the optimizer whose states count as static bytes of this rank, or several in a list or a dict. A
            torch.optim.Optimizer is found without it once it has stepped. Give one whose states were loaded, so that they count
            from the first step on, or an object of another kind that has a mapping `state` with a pytree of tensors for each
            parameter. States that grow (LBFGS's do in its first steps) cause a new plan each time. The states of this rank's
            parameters count, or all of them if it has none of these, because it works on copies.
        replicas: a process group of the ranks that hold the same stages in other pipelines: their sizes are compared, and
            refused if they differ. Collective over it in the second training step with inputs of a form, so replicas change
            the shapes and the plain values of their inputs in the same steps. Their modules may change in different ones.
        by: "evict", or "recompute": a microbatch over the budget keeps only its input and runs forward once more before its
            backward, on its own rank, with the same random numbers, buffers and attributes of its modules. The two forwards are
            compared: state that cannot be restored raises a `StageError` (docs/recomputation.md). It costs one forward per
            microbatch and no transfer, and on CUDA one wait at the end of the step. Copies of buffers and attributes are not in
            the plan's bytes. Stages next to each other on one rank, as in a V, keep their activations. "evict_or_recompute"
            evicts as long as transfers can be hidden according to `costs`, and recomputes the rest if a simulated step is then
            shorter, or if no rank has free memory; it needs `costs` and a budget in bytes.
        options: `parts`, `measure`, `margin` and `reserve_bytes`.

    Raises:
        ConfigurationError: the arguments cannot work together, or the schedule has run or is balanced already.
        BudgetError: a budget that cannot be met, when the sizes are known: here, or on all ranks in the first step (in the second
            one if that measures), before anything is sent; with the states of optimizers in the step after theirs.
        AgreementError: in the second step, replicas with different sizes.

    Example:
        >>> import bpipe
        >>> from torch import nn
        >>> loopback = bpipe.Loopback(6)
        >>> parts = [nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)) for _ in range(6)]
        >>> stages = [bpipe.PipelineStage(part, i, 6, "cpu", group=loopback.rank(i)) for i, part in enumerate(parts)]
        >>> plain = [bpipe.OneFOneB(stage, 8, loss_fn=nn.functional.mse_loss) for stage in stages]
        >>> schedules = [bpipe.Balanced(schedule, budget="lowest") for schedule in plain]
        >>> x = torch.randn(512, 8)
        >>> _ = loopback.step(schedules, x, target=x, return_outputs=False)
        >>> len(schedules[0].plan.evicted(1)) > 0
        True
    """

    _makes_plans = True

    def __init__(
        self,
        schedule: Schedule,
        budget: Budget = "auto",
        *,
        to: Destinations | None = None,
        costs: Costs | None = None,
        sizes: Sizes | None = None,
        optimizer: Optimizers | None = None,
        replicas: Any = None,
        by: Way = "evict",
        options: Options | None = None,
    ) -> None:
        check_unused(schedule)
        replicas = group_of(replicas)
        if replicas is not None and not isinstance(replicas, torch.distributed.ProcessGroup):
            raise ConfigurationError(f"replicas must be a process group of torch.distributed, got {type(replicas).__qualname__}")
        to = Destinations() if to is None else to
        chosen = values_of(options_for("Balanced", options, BALANCING), BALANCING)
        policy = Policy(budget=budget, to=to, costs=costs, sizes=sizes, by=by, **chosen)
        policy.check(schedule.plan)
        context = schedule.session.context
        check_loss(context.loss_fn, "Balanced", optimizer=optimizer)
        device, asked = context.transport.device, f"{policy} {replicas is not None}"
        is_lowest = budget == "lowest" or (budget == "auto" and not is_asynchronous(device))
        states = States(device, optimizer)
        what = schedule.plan, schedule.rule, policy
        if budget is None or sizes is not None:
            self._source = _planned(*what, context.plan_rank, is_lowest=is_lowest, asked=asked)
        else:
            self._source = MeasuredPlans(*what, context, replicas=replicas, is_lowest=is_lowest, asked=asked)
        self.rule, self.group, self._session = schedule.rule, schedule.group, schedule.hand_over()
        self._budget = policy.said_budget()
        context.states = states
        self.session.adopt(self._source)

    def __repr__(self) -> str:
        return described(self, vars(self).get("_budget", ""))


def _planned(plan: Plan, rule: str, policy: Policy, plan_rank: int, *, is_lowest: bool, asked: str) -> PlanSource:
    """Make a plan before the first step, which counts microbatches or given bytes; rank 0 logs the warnings about it."""
    base, sizes = computations_only(plan), policy.sizes
    if sizes is None:
        return PlanSource(policy.plan_by_count(base), rule, asked)
    if policy.budget == "auto" and not is_lowest:
        raise ConfigurationError("budget='auto' needs measured sizes, but sizes= is given: give a budget in bytes, or 'lowest'")
    budgets = None if is_lowest else policy.budgets(plan.num_ranks)
    source = PlanSource(policy.plan_in_bytes(base, sizes, budgets), rule, asked)
    if not is_lowest:
        source.fullest = Fullest(source.plan.budgets)
        if plan_rank == 0:
            names = [f"rank {rank} of the plan" for rank in range(plan.num_ranks)]
            source.fullest.check_plan(source.plan, names, rule, RankLog(0).warning)
    return source


def check_unused(schedule: object) -> None:
    if isinstance(schedule, Balanced):
        raise ConfigurationError("this schedule is balanced already: give Balanced the schedule that it was made from")
    if not isinstance(schedule, Schedule):
        raise ConfigurationError(
            f"Balanced takes a schedule such as OneFOneB(stage, 8, loss_fn), got {type(schedule).__qualname__}"
        )
    if schedule.is_handed_over:
        raise ConfigurationError("this schedule was given to Balanced already: use the schedule that Balanced returned")
    if not schedule.session.is_unused:
        raise ConfigurationError("Balanced takes a schedule that has not run and is not closed: make a new one")
