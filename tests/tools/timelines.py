"""Timelines to draw."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from bpipe.passes.balance.balance import balance
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Costs, Destinations, Link, Plan, Sizes, Timeline, build, finish, gpipe, rules, simulate
from tests.schedules.sized import sized_plans
from tests.schedules.strategies import computations, plans

BYTES = Costs(forward_s=0.1, saved_bytes=2**30, output_bytes=2**24, link=Link(bytes_per_s=20e9))
SLOW = Costs(forward_s=0.01, saved_bytes=2**30, output_bytes=2**25, static_bytes=2**30, link=Link(bytes_per_s=30e9, latency_s=1e-4))


SLOW_LINK = replace(BYTES, link=Link(bytes_per_s=3e9))


def timeline(name: str = "balanced_1f1b", p: int = 4, m: int = 8, costs: Costs = BYTES) -> Timeline:
    return simulate(build(name, p, m), costs)


def interleaved(costs: Costs = BYTES) -> Timeline:
    """Three stages on each of two ranks."""
    return simulate(interleaved_plan(), costs)


def in_parts(host: str = "no", costs: Costs = SLOW_LINK) -> Timeline:
    """1F1B with 4 stages and 8 microbatches as low as it gets, in four parts."""
    sizes = replace(Sizes.of([2**30] * 4, num_parts=4), static=(2**29, 2**28, 0, 0))
    return simulate(finish(balance(computations_only(build("1f1b", 4, 8)), sizes=sizes, to=Destinations(host=host))), costs)


def interleaved_plan() -> Plan:
    ranks = (0, 1, 0, 1, 0, 1)
    return finish(computations(gpipe.order(len(ranks), 4), ranks, "by_hand"))


@st.composite
def costs(draw: st.DrawFn) -> Costs:
    """Any mixture of what is given and what is not, nothing at all included."""
    sizes, seconds = st.sampled_from([0, 1, 2**20, 3 * 2**30]), st.sampled_from([0.0, 1e-9, 1e-4, 0.5, 1e4])
    link = st.builds(Link, latency_s=st.sampled_from([0.0, 1e-5, 2.0]), bytes_per_s=st.sampled_from([float("inf"), 1e3, 3e9]))
    return Costs(
        forward_s=draw(seconds),
        backward_s=draw(st.none() | seconds),
        saved_bytes=draw(sizes),
        output_bytes=draw(sizes),
        static_bytes=draw(sizes),
        link=draw(link),
        slowdown=draw(st.sampled_from([1.0, 1.5])),
    )


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Of the schedules there are and of plans that no schedule makes, with parts and the host among them."""
    p, m, k = draw(st.integers(1, 8)), draw(st.integers(1, 16)), draw(st.integers(1, 3))
    sliced = [rule if rule.sliced is None else rule.with_slices(k) for rule in rules()]
    possible = [rule for rule in sliced if rule.allows(p, m)]
    built = st.sampled_from(possible).map(lambda rule: build(rule.name, p * rule.default_stages_per_rank, m, slices=rule.slices))
    return simulate(
        draw(built | plans(max_stages=4, max_microbatches=6) | sized_plans(max_stages=4, max_microbatches=6)), draw(costs())
    )
