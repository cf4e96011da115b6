"""Balancing in microbatches instead of bytes: the paper's rule, and its counterpart for other schedules."""

from __future__ import annotations

from dataclasses import replace

from bpipe.errors import BudgetError
from bpipe.passes.balance.balance import balance, default_slots, minimize_peak
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes

__all__: list[str] = []


def by_count(plan: Plan, to: Destinations | None = None) -> Plan:
    """Balance a plan of computations to at most ceil((p+2)/2) microbatches per rank, or else to as few as the pass reaches.

    The former (Kim et al., ICML 2023) is for plans with one stage per rank that can meet it.
    """
    if plan.num_stages == plan.num_ranks:
        try:
            return balance(plan, slots=default_slots(plan.num_stages), to=to)
        except BudgetError:
            pass
    lowest = minimize_peak(plan, Sizes.of([1] * plan.num_stages, num_ranks=plan.num_ranks), to=to)
    slots = (None,) * plan.num_ranks if lowest.budgets is None else lowest.budgets
    return replace(lowest, sizes=None, budgets=None, slots=slots)
