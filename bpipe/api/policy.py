"""The settings of `Balanced`: a budget, the places for evicted memory, and sizes or costs that are known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from bpipe.api.options import Measure, Options
from bpipe.checks import budgets_of, check_choice
from bpipe.errors import ConfigurationError
from bpipe.passes.balance.balance import balance, by_count
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.passes.fit import asked_as_budget
from bpipe.passes.recompute import recompute, recompute_by_count
from bpipe.plan.amounts import show_each
from bpipe.plan.destinations import Destinations
from bpipe.schedules import Costs, Plan, Sizes, finish

__all__: list[str] = []

NamedBudget = Literal["auto", "lowest"]
Budget = int | Sequence[int | None] | NamedBudget | None
Way = Literal["evict", "recompute", "evict_or_recompute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The arguments of `Balanced` that decide the plan; its docstring and that of `Options` describe them.

    All ranks have the same, but for `reserve_bytes`.
    """

    budget: Budget
    to: Destinations
    costs: Costs | None
    sizes: Sizes | None
    by: Way = "evict"
    parts: int = Options.parts
    measure: Measure = Options.measure
    margin: float = Options.margin
    reserve_bytes: int | None = field(default=None, repr=False)

    def check(self, plan: Plan) -> None:
        """Raise unless the settings fit together, and fit a plan."""
        check_choice("by", self.by, get_args(Way))
        given = {"parts": self.parts > 1, "to": self.to != Destinations(), "costs": self.costs is not None}
        if self.by == "recompute":
            _check_used(given, "by='recompute' evicts nothing", "leave them out")
        if self.by == "evict_or_recompute" and (self.costs is None or self.budget is None or isinstance(self.budget, str)):
            raise ConfigurationError("by='evict_or_recompute' compares costs: give costs=, and a budget in bytes")
        if self.budget is None:
            given |= {"to": False, "sizes": self.sizes is not None, "measure": self.measure != "auto"}
            _check_used(given, "budget=None counts microbatches", "give a budget in bytes")
        elif not isinstance(self.budget, str):
            self.budgets(plan.num_ranks)
        elif self.budget not in get_args(NamedBudget):
            raise ConfigurationError(f"budget={self.budget!r}: give bytes, 'auto', 'lowest', or None to count microbatches")
        if self.costs is not None:
            self.costs.check(plan)
        self.to.check(plan.num_ranks)
        if self.sizes is not None:
            self._check_sizes(self.sizes, plan)

    def _check_sizes(self, sizes: Sizes, plan: Plan) -> None:
        parts = max((len(stage.parts) for stage in sizes.stages), default=0)
        if (len(sizes.stages), len(sizes.static)) != (plan.num_stages, plan.num_ranks) or parts > self.parts:
            raise ConfigurationError(
                f"sizes= has {len(sizes.stages)} stages in up to {parts} parts and {len(sizes.static)} ranks: "
                f"give {plan.num_stages} stages, each in at most parts={self.parts}, and {plan.num_ranks} ranks"
            )

    def plan_by_count(self, computations: Plan) -> Plan:
        """Make and prove the plan that counts microbatches."""
        return finish(recompute_by_count(computations) if self.by == "recompute" else by_count(computations, self.to))

    def plan_in_bytes(self, computations: Plan, sizes: Sizes, budgets: Sequence[int | None] | None) -> Plan:
        """Make and prove the plan for some sizes, with as little memory as possible if there are no budgets."""
        with asked_as_budget():
            if self.by == "recompute":
                return finish(recompute(computations, sizes=sizes, budgets=budgets))
            if self.by == "evict_or_recompute":
                assert budgets is not None and self.costs is not None, "`check` asks for them"
                return finish(evict_or_recompute(computations, sizes=sizes, budgets=budgets, costs=self.costs, to=self.to))
            return finish(balance(computations, sizes=sizes, budgets=budgets, to=self.to, costs=self.costs))

    def said_budget(self) -> str:
        """Return the budget in words."""
        if self.budget is None or isinstance(self.budget, str):
            return f"budget={self.budget!r}"
        return f"budget {show_each([self.budget] if isinstance(self.budget, int) else self.budget)}"

    def budgets(self, num_ranks: int) -> tuple[int | None, ...]:
        """Return the given budget of each rank in bytes; None for no limit."""
        assert self.budget is not None and not isinstance(self.budget, str), "a budget in bytes"
        of_each = f"give bytes, at least 1, or None for each of {num_ranks} ranks"
        advice = of_each if isinstance(self.budget, Sequence) else "give a whole number of bytes of at least 1"
        return budgets_of("budget", self.budget, num_ranks, advice)


def _check_used(given: Mapping[str, bool], why: str, remedy: str) -> None:
    """Raise if something was given that a plan would not use."""
    if unused := [name for name, is_given in given.items() if is_given]:
        raise ConfigurationError(f"{why} and does not use {', '.join(unused)}: {remedy}")
