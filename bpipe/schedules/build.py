"""From a schedule's name to its finished, verified plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

from bpipe.errors import ConfigurationError
from bpipe.schedules import gpipe, one_f_one_b
from bpipe.schedules.action import Action
from bpipe.schedules.balance import Destinations, balance, default_slots
from bpipe.schedules.collector import collector_paused
from bpipe.schedules.communicate import communicate, forward_only
from bpipe.schedules.plan import Plan
from bpipe.schedules.verify import verify

__all__ = ["build", "finish", "forward_plan", "names"]

Rule = Callable[[int, int], list[list[Action]]]

_ORDERS: dict[str, tuple[Rule, bool]] = {
    "gpipe": (gpipe.order, False),
    "1f1b": (one_f_one_b.order, False),
    "balanced_1f1b": (one_f_one_b.order, True),
}


def names() -> tuple[str, ...]:
    """The schedules that `build` knows."""
    return tuple(_ORDERS)


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    slots: int | Sequence[int | None] | None = None,
    pairs: Sequence[int] | None = None,
    rule: str = "fewest",
) -> Plan:
    """Make the plan of a schedule, finished and verified.

    Args:
        name: "gpipe", "1f1b" or "balanced_1f1b".
        num_stages: p, at least 1, one stage a rank.
        num_microbatches: m, at least 1.
        slots: the budget in microbatches, one number or one for each rank (None: no limit); any schedule can be balanced.
            Default: ceil((p+2)/2) for "balanced_1f1b", none for the others.
        pairs: the rank to which each rank evicts; default p-1-x.
        rule: "fewest" evictions, or "eager" ones.

    Raises:
        ConfigurationError: an unknown name, or numbers that make no pipeline.
        BudgetError: `slots` cannot be met; the message names the smallest that can.

    Example:
        >>> print(build("balanced_1f1b", 4, 4))
        balanced_1f1b: 4 stages, 4 microbatches, peak slots 3 3 2 2, budget 3 3 3 3
        rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 .. B1 b1 .. B2 b2 .. B3 b3
               |       >1                               <1
        rank 1 | .. F0 F1 F2 .. .. .. .. B0 b0 F3 B1 b1 .. B2 b2 .. B3 b3 .. ..
        rank 2 | .. .. F0 F1 .. .. B0 b0 F2 B1 b1 F3 B2 b2 .. B3 b3 .. .. .. ..
        rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. .. .. .. ..
    """
    if name not in _ORDERS:
        near = get_close_matches(str(name), _ORDERS, n=1)
        raise ConfigurationError(
            f"no schedule is called {name!r}{f', did you mean {near[0]!r}?' if near else ''}; there are {', '.join(_ORDERS)}"
        )
    for what, number in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if not isinstance(number, int) or number < 1:
            raise ConfigurationError(f"{what}={number!r}: give a whole number of at least 1")
    order, balanced = _ORDERS[name]
    if slots is None and balanced:
        slots = default_slots(num_stages)
    with collector_paused():
        plan = Plan(
            name=name,
            num_microbatches=num_microbatches,
            stage_ranks=tuple(range(num_stages)),
            actions=tuple(map(tuple, order(num_stages, num_microbatches))),
            served=((),) * num_stages,
            slots=(None,) * num_stages,
        )
        to = Destinations(pairs=pairs, others=pairs is None)
        return finish(plan if slots is None else balance(plan, slots=slots, to=to, rule=rule))


def finish(plan: Plan) -> Plan:
    """Add the transfers between stages to a plan of computations, and prove the result.

    Raises:
        PlanError: the result breaks a rule.
    """
    finished = communicate(plan)
    verify(finished)
    return finished


def forward_plan(plan: Plan) -> Plan:
    """The verified plan that evaluates with the forwards of another."""
    return finish(forward_only(plan))
