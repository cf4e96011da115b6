"""Balancing from the command line is balancing with `Balanced`: one plan for the same sizes, times and budgets."""

from __future__ import annotations

import pytest

from bpipe.api.policy import Policy
from bpipe.schedules import Costs, Destinations, Link, build
from bpipe.tools.balancing import balanced, sizes_of

GIB = 2**30


@pytest.mark.parametrize("budget", ["lowest", 17 * GIB])
@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_the_command_line_makes_the_plan_of_balanced(name: str, budget: int | str) -> None:
    plan = build(name, 6, 8)
    costs = Costs(saved_bytes=[4 * GIB, *[3 * GIB] * 4, 5 * GIB], output_bytes=2**20, link=Link(bytes_per_s=2 * GIB))
    sizes = sizes_of(plan, costs, 2)
    policy = Policy(budget=budget, parts=2, to=Destinations(host="last"), costs=costs, sizes=sizes)
    expected = policy.plan_in_bytes(plan, sizes, None if budget == "lowest" else policy.budgets(6))
    assert any(map(expected.evicted, range(6)))
    assert balanced(plan, costs, budget, num_parts=2, host="last") == expected
