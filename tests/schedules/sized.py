"""Random plans in bytes: parts of microbatches, computations in pieces, evictions to other ranks and to the host."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from bpipe.schedules import Destinations, Plan, Sizes, StageSizes, finish
from bpipe.schedules.balance import level
from bpipe.schedules.pieces import in_pieces
from tests.schedules.strategies import orders


@st.composite
def sizes_of(draw: st.DrawFn, plan: Plan, most_parts: int = 3) -> Sizes:
    """Any for a plan, messages between stages included."""
    parts = st.lists(st.integers(1, 9), min_size=1, max_size=most_parts).map(tuple)
    message = draw(st.integers(0, 2))
    stages = tuple(
        StageSizes(parts=draw(parts), fixed=draw(st.integers(0, 2)), received=message, sent=message) for _ in plan.stage_ranks
    )
    return Sizes(stages=stages, static=tuple(draw(st.integers(0, 9)) for _ in range(plan.num_ranks)))


@st.composite
def sized_plans(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 8) -> Plan:
    """Finished plans, balanced as low as possible."""
    plan = draw(orders(max_stages, max_microbatches))
    sizes = draw(sizes_of(plan))
    plan = replace(plan, sizes=sizes)
    plan = in_pieces(plan) if draw(st.booleans()) else plan
    return finish(level(plan, sizes, to=Destinations(host=draw(st.sampled_from(["no", "last", "only"])))))
