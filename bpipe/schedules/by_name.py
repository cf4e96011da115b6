"""Build a schedule's finished, verified plan from its name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from bpipe.checks import check_count
from bpipe.errors import ConfigurationError, PlanError
from bpipe.flow.shaping import shaped
from bpipe.passes.balance.balance import balance
from bpipe.passes.balance.problem import Choice
from bpipe.passes.communicate import communicate, forward_only
from bpipe.plan.action import Action
from bpipe.plan.collector import collector_paused
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.schedules.registry import rule_named
from bpipe.schedules.rule import Rule
from bpipe.verifier.proof import verify

__all__ = ["build", "finish", "forward_plan"]


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None = None,
    slots: int | Sequence[int | None] | None = None,
    pairs: Sequence[int] | None = None,
    rule: Choice = "fewest",
    slices: int = 1,
    skips: Iterable[Sequence[int]] = (),
    overlapped: bool = False,
) -> Plan:
    """Build the finished and verified plan of a schedule.

    Args:
        name: one of `names()`, in capitals or not, or the name of its class, such as "OneFOneB" or torch's "Schedule1F1B";
            `rules()` describes each.
        num_stages: the stages of all ranks together, at least 1.
        num_microbatches: m, at least 1; some schedules take only certain numbers.
        num_ranks: p; default: `num_stages` if the schedule takes one stage per rank, half of that if it takes several.
        slots: the budget in microbatches of one stage (in slices, if there are several), one number or one for each rank (None: no
            limit); any schedule can be balanced. Default: ceil((p+2)/2) for "balanced_1f1b", none for the others.
        pairs: the rank to which each rank evicts; default p-1-x.
        rule: "fewest" evictions, or "eager" ones.
        slices: k, for "seq_1f1b" and the others that cut each microbatch along its sequence into k slices of about equal cost.
        skips: what stages hand on to later ones than the next: the stage that makes a value and those that use it, such as
            (0, 2, 3), as numbers of the model's stages.
        overlapped: whether "dualpipe_v" or "interleaved_1f1b" run forwards side by side with backwards in their steady state.

    Raises:
        ConfigurationError: an unknown name, numbers that form no pipeline or that the schedule does not take, several slices
            for a schedule of whole microbatches, pairs for one that has none, or a skip to a stage that is not a later one.
        BudgetError: `slots` cannot be met; the message names the smallest that can.
        PlanError: the order of a rule that you registered breaks a rule of the verifier.

    Example:
        >>> print(build("balanced_1f1b", 4, 4))
        balanced_1f1b: 4 stages, 4 microbatches, peak slots 3 3 2 2, budget 3 3 3 3
        rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 .. B1 b1 .. B2 b2 .. B3 b3
               |       >1                               <1
        rank 1 | .. F0 F1 F2 .. .. .. .. B0 b0 F3 B1 b1 .. B2 b2 .. B3 b3 .. ..
        rank 2 | .. .. F0 F1 .. .. B0 b0 F2 B1 b1 F3 B2 b2 .. B3 b3 .. .. .. ..
        rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. .. .. .. ..
        >>> build("zbv", num_stages=8, num_microbatches=8).stage_ranks
        (0, 1, 2, 3, 3, 2, 1, 0)
    """
    to = Destinations(pairs=pairs, others=pairs is None)
    check_count("slices", slices)
    counts = num_stages, num_microbatches
    named = rule_named(name).with_slices(slices)
    named = named.with_pairs() if overlapped else named
    return plan_by(named, *counts, num_ranks=num_ranks, slots=slots, to=to, choice=rule, skips=skips)


def plan_by(
    rule: Rule,
    num_stages: int,
    num_microbatches: int,
    *,
    num_ranks: int | None,
    slots: int | Sequence[int | None] | None = None,
    to: Destinations | None = None,
    choice: Choice = "fewest",
    skips: Iterable[Sequence[int]] = (),
) -> Plan:
    """Build the finished and verified plan of a rule, whether it is registered or not; `build` explains the arguments."""
    with collector_paused():
        plan = _with_skips(computations_of(rule, num_stages, num_microbatches, num_ranks), skips)
        if slots is None and rule.slots is not None:
            slots = rule.slots(plan.num_ranks)
        return finish(plan if slots is None else balance(plan, slots=slots, to=to or Destinations(), rule=choice))


def computations_of(rule: Rule, num_stages: int, num_microbatches: int, num_ranks: int | None) -> Plan:
    """Return the plan of a schedule without transfers, which nobody has proven yet; `build` explains the arguments."""
    check_count("num_stages", num_stages)
    check_count("num_microbatches", num_microbatches)
    if num_ranks is None:
        num_ranks = max(1, num_stages // rule.default_stages_per_rank)
    check_count("num_ranks", num_ranks)
    rule.check(num_stages, num_microbatches, num_ranks)
    stages_per_rank = num_stages // num_ranks
    lanes = rule.order(num_ranks, num_microbatches, stages_per_rank)
    if len(lanes) != num_ranks or not all(issubclass(kind, Action) for lane in lanes for kind in set(map(type, lane))):
        raise PlanError(
            f"rule {rule.name!r}: order() must return a list of actions for each of {num_ranks} ranks, got {lanes!r:.80}"
        )
    return Plan(
        name=rule.name,
        flow=rule.flow(num_ranks, num_microbatches, stages_per_rank),
        actions=tuple(map(tuple, lanes)),
        served=((),) * num_ranks,
        slots=(None,) * num_ranks,
        overlapped=frozenset() if rule.pairs is None else rule.pairs(num_ranks, num_microbatches, stages_per_rank),
    )


def _with_skips(plan: Plan, skips: Iterable[Sequence[int]]) -> Plan:
    """Return a plan without transfers whose stages hand on skips."""
    if isinstance(skips, Mapping):
        raise ConfigurationError("build takes skips without their names: give skips.values()")
    given = [tuple(skip) if isinstance(skip, Sequence) and not isinstance(skip, str) else (skip,) for skip in skips]
    try:
        for skip in given:
            shaped(plan.flow, "skips", (skip,))
        return replace(plan, flow=shaped(plan.flow, "skips", tuple(sorted(set(given))))) if given else plan
    except ValueError as error:
        raise ConfigurationError(str(error)) from error


def finish(plan: Plan) -> Plan:
    """Add the transfers between stages to a plan of computations, and verify the result.

    Raises:
        PlanError: the result breaks a rule.

    Example:
        >>> from bpipe.schedules import overlap
        >>> finish(overlap(build("1f1b", 2, 2))).peak_slots
        (2, 1)
    """
    try:
        finished = communicate(plan)
    except PlanError as error:
        raise PlanError(f"plan {plan.name!r}: {error}") from error
    verify(finished)
    return finished


def forward_plan(plan: Plan) -> Plan:
    """Return a verified plan for evaluation, with the forwards of another plan."""
    return finish(forward_only(plan))
