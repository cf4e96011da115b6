"""Compare a rule's formulas for its memory and its bubble with its plans."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from bpipe.errors import PlanError
from bpipe.plan.plan import Plan
from bpipe.schedules.by_name import plan_by
from bpipe.schedules.rule import Rule
from bpipe.simulator.costs import Costs
from bpipe.simulator.simulation import simulate

__all__ = ["check_rule"]

TOLERANCE = 1e-9


def check_rule(rule: Rule, num_ranks: int, num_microbatches: int) -> Plan:
    """Build a rule's plan, verify it, and compare its memory and its bubble with the rule's `peak` and `bubble`.

    The peak must be exact on the fullest rank, and an upper bound on the others; the bubble must be exact if F, I and W of a stage
    take the same time, or an upper bound if `bubble_text` says "at most".

    Args:
        rule: registered or not.
        num_ranks: p.
        num_microbatches: m.

    Returns:
        The plan.

    Raises:
        PlanError: the plan breaks a rule of the verifier, or a formula differs from it; the message has both numbers.
        ConfigurationError: the rule does not take these numbers.

    Example:
        >>> from bpipe.schedules import rules
        >>> check_rule(rules()[1], num_ranks=4, num_microbatches=8).peak_slots
        (4, 3, 2, 1)
    """
    stages_per_rank, directions = rule.default_stages_per_rank, rule.placement.directions
    plan = plan_by(rule, num_ranks * stages_per_rank, num_microbatches, num_ranks=num_ranks)
    sizes = (num_ranks, num_microbatches, stages_per_rank)
    at = f"rule {rule.name!r} with p = {num_ranks} and m = {num_microbatches}"
    passed = stages_per_rank // directions * rule.slices  # computations of a microbatch on a rank
    if rule.peak is not None:
        said = [rule.peak(*sizes, rank) * passed for rank in range(num_ranks)]
        if max(plan.peak_slots) != max(said) or any(found > most for found, most in zip(plan.peak_slots, said)):
            raise PlanError(f"{at}: its peaks are {_numbers(plan.peak_slots)} slots, but its formula gives {_numbers(said)}")
    if rule.bubble is not None:
        given = rule.bubble(*sizes, *[float(passed)] * 3)
        found = simulate(plan, Costs(forward_s=1.0, backward_s=2.0)).bubble_s(0)
        if found > given + TOLERANCE or (found < given - TOLERANCE and "at most" not in rule.bubble_text):
            unit = "a slice on a stage" if rule.slices > 1 else "a stage"
            raise PlanError(f"{at}: its bubble is {found:g} forwards of {unit}, but its formula gives {given:g}")
    return plan


def _numbers(values: Iterable[Fraction | int]) -> str:
    return " ".join(f"{float(value):g}" for value in values)
