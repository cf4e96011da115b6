"""Balance a plan in bytes, as the command line is asked to, and say what that did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.errors import ConfigurationError
from bpipe.schedules import Action, Costs, Destinations, Op, Plan, Sizes, StageSizes, finish
from bpipe.schedules.action import HOST
from bpipe.schedules.amounts import show_bytes, show_each
from bpipe.schedules.by_bytes import by_bytes
from bpipe.schedules.communicate import communicate, computations_only

__all__: list[str] = []

LOWEST = "lowest"
Budget = int | Sequence[int | None] | str


def balanced(plan: Plan, costs: Costs, budget: Budget, *, num_parts: int = 1, is_inside: bool = False, host: str = "no") -> Plan:
    """The computations of a plan within a budget of bytes, proven.

    Args:
        plan: any; its transfers and budgets are left out.
        costs: what its stages save, send and keep, and how long things take.
        budget: the most bytes of each rank, static ones included, one number or one a rank; or "lowest".
        num_parts: into how many parts a microbatch may be cut.
        is_inside: whether parts also move inside forwards and backwards.
        host: whether a rank's own host takes guests: "no", "last" or "only".

    Raises:
        ConfigurationError: the costs do not fit, or say of no bytes that a microbatch saves.
        BudgetError: the budget cannot be met; the message names the smallest that can.
    """
    costs.check(plan)
    sizes = sizes_of(plan, costs, num_parts)
    if not any(stage.saved for stage in sizes.stages):
        raise ConfigurationError("--budget is in bytes: say what a microbatch saves, such as --saved 1.5GiB")
    budgets = None if isinstance(budget, str) else budget
    to = Destinations(nodes=costs.nodes, host=host)
    return finish(by_bytes(plan, sizes, budgets, is_inside=is_inside, to=to, costs=costs))


def sizes_of(plan: Plan, costs: Costs, num_parts: int) -> Sizes:
    """What costs say in bytes, microbatches in parts of about equal size.

    A stage receives as much as it sends back. What the last stage returns is not known here.
    """
    movable = Sizes.of(map(costs.movable, range(plan.num_stages)), num_parts=num_parts)
    last = plan.num_stages - 1
    stages = tuple(
        StageSizes(
            parts=part.parts,
            fixed=costs.saved(stage) - costs.movable(stage),
            received=costs.carried(Action(Op.SEND_B, stage, 0)) if stage else 0,
            sent=costs.carried(Action(Op.SEND_F, stage, 0)) if stage < last else 0,
        )
        for stage, part in enumerate(movable.stages)
    )
    static = [0] * plan.num_ranks
    for stage, rank in enumerate(plan.stage_ranks):
        static[rank] += costs.static(stage)
    return Sizes(stages=stages, static=tuple(static))


def told(plan: Plan) -> list[str]:
    """What balancing in bytes did, in a line; nothing of a plan that counts slots."""
    if plan.sizes is None:
        return []
    before = unbalanced_peaks(plan)
    moved = sum(len(plan.evicted(rank)) for rank in range(plan.num_ranks))
    if not moved:
        why = "is level already" if len(set(before)) == 1 else "is as low as it gets" if plan.budgets is None else "fits"
        return [f"{plan.name} {why}: nothing moves, peak {show_each(before)}"]
    evictions = [action for lane in plan.actions for action in lane if action.op is Op.EVICT]
    to_hosts = sum(map(plan.sizes.moved, (action for action in evictions if action.peer == HOST)))
    return [
        f"{plan.name} moves {moved} of {plan.num_stages * plan.num_microbatches} microbatches of a stage, "
        f"{show_bytes(sum(map(plan.sizes.moved, evictions)))} each way"
        + f", {show_bytes(to_hosts)} of it to hosts" * bool(to_hosts)
        + f"; its peak was {show_each(before)}, and is {show_each(plan.peak_bytes)}"
    ]


def unbalanced_peaks(plan: Plan) -> tuple[int, ...]:
    """The peaks of a plan's computations without evictions, by its sizes."""
    return communicate(replace(computations_only(plan), sizes=plan.sizes)).peak_bytes
