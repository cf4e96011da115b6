"""Balancing in bytes, for both `Balanced` and the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.passes.balance.balance import balance, minimize_peak
from bpipe.passes.communicate import computations_only
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes
from bpipe.simulator.costs import Costs

__all__: list[str] = []


def by_bytes(
    plan: Plan,
    sizes: Sizes,
    budgets: int | Sequence[int | None] | None,
    *,
    to: Destinations | None = None,
    costs: Costs | None = None,
) -> Plan:
    """Balance the computations of a plan in bytes; `finish` adds the transfers to the result.

    Args:
        budgets: the budget in bytes, static bytes included, one number or one per rank; None: as low as possible.
        costs: how long computations and transfers take, if known: hidden evictions come first, if the budgets allow it.
    """
    computations = replace(computations_only(plan), sizes=sizes)
    if budgets is None:
        return minimize_peak(computations, sizes, to=to, costs=costs)
    return balance(computations, sizes=sizes, budgets=budgets, to=to, costs=costs)
