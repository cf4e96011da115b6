"""What a plan is searched for: the costs of its stages, and what each rank may hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from bpipe.passes.communicate import computations_only
from bpipe.passes.fit import Budgets
from bpipe.plan.destinations import Destinations
from bpipe.plan.plan import Plan
from bpipe.plan.sizes import Sizes
from bpipe.simulator.costs import Costs

__all__: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The costs of the stages of a plan, and the budgets of its ranks.

    Args:
        costs: how long computations and transfers take.
        sizes: the bytes of a microbatch on each stage, and the static bytes of each rank.
        budgets: the bytes that each rank may hold, static ones included; None: no limit.
        to: the ranks that may store evicted activations.
        evicts: whether activations may move to other ranks, or to the host if `to` says so.
        recomputes: whether microbatches may run forward twice, if stages hand nothing on to later ones than the next.
    """

    costs: Costs
    sizes: Sizes
    budgets: Budgets
    to: Destinations = field(default_factory=Destinations)
    evicts: bool = True
    recomputes: bool = True

    def order_of(self, plan: Plan) -> Plan:
        """Return the computations of a plan, whole and without pairs, with these sizes."""
        return replace(computations_only(plan), sizes=self.sizes, overlapped=frozenset())

    def fits(self, plan: Plan) -> bool:
        """Return whether a plan with transfers keeps every rank within its budget."""
        return self.allows(plan.device_peak_bytes)

    def allows(self, peaks: Sequence[int]) -> bool:
        """Return whether the budgets allow what each rank holds at most."""
        return all(budget is None or peak <= budget for peak, budget in zip(peaks, self.budgets))
