"""Planning takes little time: 16 ranks, 128 microbatches, four families, a tight budget."""

from __future__ import annotations

import time

import pytest

from bpipe.passes.setting import Setting
from bpipe.schedules import Costs, Link, build
from bpipe.search.fastest import searched
from bpipe.search.named import named
from bpipe.search.work import Family
from bpipe.tools.balancing import sizes_of
from tests.quiet import here
from tests.tries import holds_in_one_try

P, M = 16, 128
FAMILIES = ((1, ("1f1b", "gpipe")), (1, ("zb_h1", "zb_h2")), (2, ("zbv", "v_half", "v_min")), (2, ("interleaved_1f1b",)))
MICROBATCH = 1000  # bytes that a rank's share of the model keeps; to evict them takes 0.3 forwards
BUDGET = 0.6  # of what 1F1B's first rank needs


def families() -> list[Family]:
    """Four families of schedules: of whole backwards, of halves, in a V and looped."""
    found = []
    for per_rank, names in FAMILIES:
        costs = Costs(
            forward_s=1 / per_rank,
            backward_s=2 / per_rank,
            saved_bytes=MICROBATCH // per_rank,
            output_bytes=MICROBATCH // 20,
            link=Link(bytes_per_s=MICROBATCH / 0.3),
        )
        plans = tuple(build(name, per_rank * P, M) for name in names)
        budgets = (int(BUDGET * P * MICROBATCH),) * P
        found.append(Family(starts=plans, setting=Setting(costs=costs, sizes=sizes_of(plans[0], costs, 1), budgets=budgets)))
    return found


@pytest.mark.parametrize("plan, most_s", [pytest.param(named, 1.0, id="choice"), pytest.param(searched, 10.0, id="search")])
def test_planning_takes_seconds(plan: object, most_s: float) -> None:
    given = families()
    assert callable(plan)

    def cpu_s() -> float:
        began = time.process_time()
        plan(given)
        return time.process_time() - began

    holds_in_one_try(cpu_s, lambda seconds: seconds <= here(most_s))
