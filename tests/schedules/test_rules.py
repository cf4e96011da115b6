"""The order of forwards and backwards of each rule, against FACTS.md's table of schedules."""

from __future__ import annotations

import pytest

from bpipe.schedules import Plan, build
from bpipe.schedules.build import forward_plan
from bpipe.schedules.order import UNITS, clock

SIZES = [(p, m) for p in range(1, 8) for m in range(1, 2 * p + 3)]


def texts(plan: Plan, rank: int) -> list[str]:
    return [f"{action.op}{action.microbatch}" for action in plan.compute(rank)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_gpipe(p: int, m: int) -> None:
    plan = build("gpipe", p, m)
    assert plan.peak_slots == (m,) * p
    for x in range(p):
        assert texts(plan, x) == [f"F{i}" for i in range(m)] + [f"B{i}" for i in range(m)]


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_1f1b(p: int, m: int) -> None:
    plan = build("1f1b", p, m)
    assert plan.peak_slots == tuple(min(p - x, m) for x in range(p))
    for x in range(p):
        warmup = min(p - 1 - x, m)
        steady = [f"{op}{i}" for f, b in zip(range(warmup, m), range(m)) for op, i in (("F", f), ("B", b))]
        assert texts(plan, x) == [f"F{i}" for i in range(warmup)] + steady + [f"B{i}" for i in range(m - warmup, m)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "balanced_1f1b"])
@pytest.mark.parametrize(("p", "m"), SIZES)
def test_bubble_of_one_pipeline_filling_and_draining(name: str, p: int, m: int) -> None:
    """(p-1)(F+B) idle between the first start and the last end, for all three (makespan bubble, with B = 2F)."""
    plan = build(name, p, m)
    lanes = [plan.compute(rank) for rank in range(p)]
    ends = [times[-1] + UNITS[lane[-1].op] for lane, times in zip(lanes, clock(lanes, p))]
    assert max(ends) - m * (1 + 2) == (p - 1) * (1 + 2)


@pytest.mark.parametrize(("p", "m"), [(1, 1), (3, 2), (4, 8)])
def test_forward_plan_has_the_forwards_alone(p: int, m: int) -> None:
    plan = forward_plan(build("balanced_1f1b", p, m))
    assert not plan.has_backward
    assert not any(plan.served)
    for x in range(p):
        assert texts(plan, x) == [f"F{i}" for i in range(m)]
