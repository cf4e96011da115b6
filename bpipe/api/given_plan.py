"""A balanced plan that is made before the first step: it counts microbatches, or bytes that the user gives."""

from __future__ import annotations

from collections.abc import Collection

from bpipe.api.policy import Policy
from bpipe.engine.remembered import Memory
from bpipe.errors import ConfigurationError
from bpipe.logs import RankLog
from bpipe.passes.communicate import computations_only
from bpipe.plan.plan import Plan
from bpipe.session.fullest import Fullest
from bpipe.session.plan_source import PlanSource

__all__: list[str] = []


class GivenPlan(PlanSource):
    """A plan that `Balanced` makes without measuring anything; rank 0 logs the warnings about it."""

    def __init__(self, plan: Plan, rule: str, policy: Policy, plan_rank: int, *, is_lowest: bool, asked: str) -> None:
        super().__init__(_planned(plan, policy, is_lowest=is_lowest), rule, asked)
        self._policy = policy
        if policy.sizes is not None and not is_lowest:
            self.fullest = Fullest(self.plan.budgets)
            if plan_rank == 0:
                names = [f"rank {rank} of the plan" for rank in range(plan.num_ranks)]
                self.fullest.check_plan(self.plan, names, rule, RankLog(0).warning)

    def prepare(self, memory: Memory, plan_rank: int, stages: Collection[int]) -> None:
        sizes = self._policy.sizes
        memory.most_parts = {stage: 1 if sizes is None else len(sizes.stages[stage].parts) for stage in stages}


def _planned(plan: Plan, policy: Policy, *, is_lowest: bool) -> Plan:
    base, sizes = computations_only(plan), policy.sizes
    if sizes is None:
        return policy.plan_by_count(base)
    if policy.budget == "auto" and not is_lowest:
        raise ConfigurationError("budget='auto' needs measured sizes, but sizes= is given: give a budget in bytes, or 'lowest'")
    return policy.plan_in_bytes(base, sizes, None if is_lowest else policy.budgets(plan.num_ranks))
