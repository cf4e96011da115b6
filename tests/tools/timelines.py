"""Timelines to draw."""

from __future__ import annotations

from hypothesis import strategies as st

from bpipe.schedules import Costs, Link, Plan, Timeline, build, finish, gpipe, names, simulate
from tests.schedules.strategies import computations, plans

BYTES = Costs(forward_s=0.1, saved_bytes=2**30, output_bytes=2**24, link=Link(bytes_per_s=20e9))
SLOW = Costs(forward_s=0.01, saved_bytes=2**30, output_bytes=2**25, static_bytes=2**30, link=Link(bytes_per_s=30e9, latency_s=1e-4))


def timeline(name: str = "balanced_1f1b", p: int = 4, m: int = 8, costs: Costs = BYTES) -> Timeline:
    return simulate(build(name, p, m), costs)


def interleaved(costs: Costs = BYTES) -> Timeline:
    """Three stages on each of two ranks."""
    return simulate(interleaved_plan(), costs)


def interleaved_plan() -> Plan:
    ranks = (0, 1, 0, 1, 0, 1)
    return finish(computations(gpipe.order(len(ranks), 4), ranks, "by hand"))


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
    """Of the schedules there are and of plans that no schedule makes."""
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    built = st.sampled_from(names()).map(lambda name: build(name, p, m))
    return simulate(draw(built | plans(max_stages=4, max_microbatches=6)), draw(costs()))
