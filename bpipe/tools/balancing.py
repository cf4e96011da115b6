"""Balance a plan in bytes, as the command line asks, and say what that did."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bpipe.errors import ConfigurationError
from bpipe.flow.flow import Kind, value_name
from bpipe.flow.shape_arguments import skips_of
from bpipe.passes.balance.balance import balance
from bpipe.passes.balance.outcome import outcome
from bpipe.plan.destinations import Host
from bpipe.plan.sizes import IN, OUT, gradients
from bpipe.schedules import Action, Amount, Costs, Destinations, Op, Plan, Sizes, StageSizes, finish

__all__: list[str] = []

LOWEST = "lowest"
Budget = int | Sequence[int | None] | str


def balanced(plan: Plan, costs: Costs, budget: Budget, *, num_parts: int = 1, host: Host = "no") -> Plan:
    """Balance the computations of a plan within a budget of bytes, and prove the result."""
    costs.check(plan)
    sizes = sizes_of(plan, costs, num_parts)
    if not any(stage.saved for stage in sizes.stages):
        raise ConfigurationError("--budget is in bytes: say what a microbatch saves, such as --saved 1.5GiB")
    budgets = None if isinstance(budget, str) else budget
    to = Destinations(nodes=costs.nodes, host=host)
    return finish(balance(plan, sizes=sizes, budgets=budgets, to=to, costs=costs))


def sizes_of(plan: Plan, costs: Costs, num_parts: int) -> Sizes:
    """Return the sizes in bytes that costs give, with microbatches cut into parts of about equal size.

    A stage receives as much as it sends back, if it sends anything back. What a stage with a loss makes for it is not known here.
    """
    static = [0] * plan.num_ranks
    for stage, rank in enumerate(plan.stage_ranks):
        static[rank] += costs.static(stage)
    slices = (_sizes_of_slice(plan, costs, num_parts, slice_) for slice_ in range(plan.slices))
    return Sizes.of_slices(slices, static=tuple(static))


def _sizes_of_slice(plan: Plan, costs: Costs, num_parts: int, slice_: int) -> tuple[StageSizes, ...]:
    """Return the sizes on each stage of a slice of the first microbatch; of the microbatch itself, if it is not cut."""
    movable = Sizes.of((costs.movable(stage, slice_) for stage in range(plan.num_stages)), num_parts=num_parts)
    received = Op.SEND_B if any(edge.kind is Kind.GRADIENT for edge in plan.flow.edges) else Op.RECV_F
    return tuple(
        StageSizes(
            parts=part.parts,
            fixed=costs.saved(stage, slice_) - costs.movable(stage, slice_),
            amounts=(
                Amount(IN, costs.carried(Action(received, stage, slice_)) if not plan.is_first(stage) else 0),
                Amount(OUT, costs.carried(Action(Op.SEND_F, stage, slice_)) if not plan.is_last(stage) else 0),
                *_exchanges(plan, costs, stage),
                *_skips(plan, costs, stage, slice_),
            ),
        )
        for stage, part in enumerate(movable.stages)
    )


def _exchanges(plan: Plan, costs: Costs, stage: int) -> Iterator[Amount]:
    """Yield the sizes of what a stage exchanges of its gradients."""
    for at, part in plan.flow.exchanges:
        if at == stage:
            yield Amount(gradients(part), costs.carried(Action(Op.REDUCE_GRAD, stage, 0)))


def _skips(plan: Plan, costs: Costs, stage: int, slice_: int) -> Iterator[Amount]:
    """Yield the sizes of a stage's skips: each is as large as the output of the stage that makes it, and nobody saves it."""
    first = stage - stage % plan.depth
    for skip in skips_of(plan.flow):
        if stage - first in skip:
            source = first + skip[0]
            num_bytes, gradient = (costs.carried(Action(op, source, slice_)) for op in (Op.SEND_F, Op.RECV_B))
            yield Amount(value_name(skip), num_bytes, gradient=gradient)


def balance_notes(plan: Plan) -> list[str]:
    """Return a line that says what balancing in bytes did, or nothing for a plan that counts slots."""
    return [] if plan.sizes is None else [f"{plan.name} {outcome(plan)}"]
