"""Random plans in bytes: any sizes, parts, budgets, evictions to other ranks, nodes and the host."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import inf
from typing import NamedTuple

from hypothesis import strategies as st

from bpipe.errors import BudgetError
from bpipe.passes.balance.balance import balance
from bpipe.schedules import Costs, Destinations, Link, Plan, Sizes, StageSizes, finish
from tests.amounts import amounts
from tests.schedules.strategies import orders

FEW = st.integers(0, 9)


class Problem(NamedTuple):
    """A plan of computations, to be balanced in bytes."""

    plan: Plan
    sizes: Sizes
    to: Destinations
    costs: Costs | None


@st.composite
def stage_sizes(draw: st.DrawFn, received: int, sent: int, most_parts: int) -> StageSizes:
    """Those of a stage whose messages are given."""
    parts = tuple(draw(st.lists(FEW, min_size=1, max_size=most_parts)))
    fixed = draw(FEW)
    state = draw(st.integers(0, fixed))
    kept = [min(draw(FEW), message, sum(parts) + fixed) for message in (received, sent)]
    return StageSizes(
        parts=parts,
        fixed=fixed,
        between=draw(st.none() | FEW),
        amounts=amounts(state=state, received=received, sent=sent, kept_received=kept[0], kept_sent=kept[1]),
    )


@st.composite
def sizes_of(draw: st.DrawFn, plan: Plan, most_parts: int = 3) -> Sizes:
    """What the microbatches of a plan take: the same on all stages and nothing else, or anything."""
    if draw(st.booleans()):
        size, parts = draw(st.integers(1, 9)), draw(st.integers(1, most_parts))
        return Sizes.of([size * parts] * plan.num_stages, num_ranks=plan.num_ranks, num_parts=parts)
    inner = draw(st.lists(FEW, min_size=plan.num_stages - 1, max_size=plan.num_stages - 1))
    messages = [0, *inner, draw(FEW)]
    return Sizes(
        stages=tuple(draw(stage_sizes(received, sent, most_parts)) for received, sent in pairwise(messages)),
        static=tuple(draw(FEW) for _ in range(plan.num_ranks)),
    )


@st.composite
def destinations(draw: st.DrawFn, num_ranks: int) -> Destinations:
    ranks = st.tuples(*[st.integers(0, num_ranks - 1)] * num_ranks)
    return Destinations(
        pairs=draw(st.none() | ranks),
        others=draw(st.sampled_from([True, True, False])),
        nodes=draw(st.none() | st.tuples(*[st.integers(0, 1)] * num_ranks)),
        host=draw(st.sampled_from(["no", "no", "last", "only"])),
    )


@st.composite
def links(draw: st.DrawFn, to: Destinations) -> Costs:
    """A cost model in which links differ."""
    between, across, to_host = (Link(bytes_per_s=draw(st.sampled_from([1.0, 4.0, 16.0, inf]))) for _ in range(3))
    return Costs(link=between, cross_link=across, host_link=to_host, nodes=to.nodes)


@st.composite
def problems(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 8) -> Problem:
    """Any plan of computations."""
    plan = draw(orders(max_stages, max_microbatches))
    sizes = draw(sizes_of(plan))
    to = draw(destinations(plan.num_ranks))
    return Problem(plan, sizes, to, draw(st.none() | links(to)))


@st.composite
def sized_plans(draw: st.DrawFn, max_stages: int = 5, max_microbatches: int = 8) -> Plan:
    """Finished plans balanced in bytes: as low as possible, or within budgets between that and what they take."""
    plan, sizes, to, costs = draw(problems(max_stages, max_microbatches))
    lowest = balance(plan, sizes=sizes, to=to, costs=costs)
    if lowest.budgets is None or draw(st.booleans()):
        return finish(lowest)
    peaks, low = finish(replace(plan, sizes=sizes)).device_peak_bytes, max(filter(None, lowest.budgets))
    budgets = [draw(st.none() | st.integers(min(low, peak), max(low, peak)).map(lambda b: max(1, b))) for peak in peaks]
    try:
        return finish(balance(plan, sizes=sizes, budgets=budgets, to=to, costs=costs))
    except BudgetError:
        return finish(lowest)
