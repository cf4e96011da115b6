"""The rules that concern a single rank of a plan."""

from __future__ import annotations

from collections.abc import Iterator

from bpipe.plan.meter import SLOTS, Meter, occupancy
from bpipe.verifier.order_rules import in_pieces, ordered, recomputed, sharded
from bpipe.verifier.presence_rules import belongs, complete
from bpipe.verifier.rank_index import Finding, RankIndex, Rule

__all__: list[str] = []


def affordable(own: RankIndex) -> Iterator[Finding]:
    """Check that a rank never occupies more than its budgets of slots and of bytes, buffers for remote activations included."""
    plan, rank = own.plan, own.rank
    yield from _within(own, SLOTS, sum(map(len, plan.remote_buffers(rank).values())), plan.slots[rank], "slots")
    if plan.sizes is not None and plan.budgets is not None:
        yield from _within(own, plan.meter(), plan.idle_bytes(rank), plan.budgets[rank], "bytes")


def _within(own: RankIndex, meter: Meter, idle: int, budget: int | None, unit: str) -> Iterator[Finding]:
    if budget is None:
        return
    rank, limit = own.rank, budget - idle
    if max(occupancy(own.plan.actions[rank], meter), default=limit) > limit:
        over = next((i, live) for i, live in enumerate(occupancy(own.plan.actions[rank], meter)) if live > limit)
        yield (
            own.place(over[0]),
            f"rank {rank} occupies {over[1]} {unit} of its own and {idle} for remote activations and static bytes, over its "
            f"budget of {budget}",
        )
    elif limit < 0:
        yield None, f"rank {rank} reserves {idle} {unit} for remote activations and static bytes, over its budget of {budget}"


RULES_OF_A_RANK: dict[str, Rule] = {
    "belongs": belongs,
    "complete": complete,
    "ordered": ordered,
    "in pieces": in_pieces,
    "sharded": sharded,
    "recomputed": recomputed,
    "affordable": affordable,
}
