"""Passes as values: a name and a function from a valid plan to a valid plan, and pipelines that run several in order.

computations -> budget: balance or recompute, or both -> communicate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import combinations
from typing import Concatenate, ParamSpec

from bpipe.errors import ConfigurationError
from bpipe.passes.balance.balance import balance, by_count
from bpipe.passes.communicate import communicate, computations_only, forward_only
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.passes.overlap import overlap
from bpipe.passes.profiling_order import profiling_order
from bpipe.passes.recompute import recompute, recompute_by_count
from bpipe.plan.plan import Plan

__all__ = ["Pass", "Phase", "Pipeline"]

P = ParamSpec("P")


class Phase(IntEnum):
    """The purpose of a pass, in the order in which a pipeline runs passes."""

    COMPUTATIONS = 0  # choose the computations and their order
    BUDGET = 1  # evict or recompute to keep to a budget
    TRANSFERS = 2  # add the transfers between stages


PHASES: Mapping[Callable[..., Plan], Phase] = {
    computations_only: Phase.COMPUTATIONS,
    forward_only: Phase.COMPUTATIONS,
    profiling_order: Phase.COMPUTATIONS,
    overlap: Phase.COMPUTATIONS,
    balance: Phase.BUDGET,
    by_count: Phase.BUDGET,
    recompute: Phase.BUDGET,
    recompute_by_count: Phase.BUDGET,
    evict_or_recompute: Phase.BUDGET,
    communicate: Phase.TRANSFERS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """A named step from a valid plan to a valid plan.

    Args:
        name: its name in messages.
        phase: its purpose, which decides the passes that may come before and after it.
        apply: takes a plan and returns a new one.
    """

    name: str
    phase: Phase
    apply: Callable[[Plan], Plan]

    @classmethod
    def of(cls, function: Callable[Concatenate[Plan, P], Plan], *args: P.args, **kwargs: P.kwargs) -> Pass:
        """Return the pass that calls one of the functions in `PHASES` with these arguments after the plan.

        Raises:
            ConfigurationError: the function is not among them.
        """
        phase = PHASES.get(function)
        name = getattr(function, "__name__", repr(function))
        if phase is None:
            raise ConfigurationError(f"{name} is not a pass of bpipe: give Pass(name=..., phase=..., apply=...)")

        def apply(plan: Plan) -> Plan:
            return function(plan, *args, **kwargs)

        return cls(name=name, phase=phase, apply=apply)


@dataclass(frozen=True, slots=True, init=False)
class Pipeline:
    """Passes that run one after the other.

    Args:
        passes: in the order in which they run.

    Raises:
        ConfigurationError: a pass would undo the work of an earlier one, or find nothing to do.

    Example:
        >>> from bpipe.schedules import build, verify
        >>> pipeline = Pipeline(Pass.of(computations_only), Pass.of(balance, slots=3), Pass.of(communicate))
        >>> plan = pipeline.apply(build("1f1b", 4, 8))
        >>> verify(plan)
        >>> plan.peak_slots
        (3, 3, 2, 3)
    """

    passes: tuple[Pass, ...]

    def __init__(self, *passes: Pass) -> None:
        object.__setattr__(self, "passes", passes)
        for first, second in combinations(passes, 2):
            if why := _conflict(first, second):
                raise ConfigurationError(f"{second.name} after {first.name} makes no sense: {why}")

    def apply(self, plan: Plan) -> Plan:
        """Run the passes on a plan, and return the result."""
        for one in self.passes:
            plan = one.apply(plan)
        return plan


def _conflict(first: Pass, second: Pass) -> str:
    """Return why a pass may not come after another one, and what to do instead; an empty text if it may."""
    if first.phase is second.phase is Phase.BUDGET:
        return f"it decides again what moves and what is recomputed. Use one of them, or {evict_or_recompute.__name__} for both"
    if first.phase is second.phase is Phase.TRANSFERS:
        return "the transfers are there already. Leave one of them out"
    if second.phase < first.phase:
        return f"it drops what {first.name} adds. Put {second.name} before {first.name}"
    if first.name == forward_only.__name__ and second.phase is Phase.BUDGET:
        return "forwards alone save nothing for a backward. Leave it out"
    return ""
