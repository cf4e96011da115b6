"""How long it takes to plan 16 ranks and 128 microbatches within a tight budget: to choose a named schedule, and to search.

Times are counted in simulations of 1F1B of that size, in the same process, so that they say something on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from benchmarks.study import Case, Claim, Row, Study
from bpipe.schedules import Costs, Link, build, simulate
from bpipe.search.fastest import searched
from bpipe.search.named import named
from bpipe.search.setting import Setting
from bpipe.search.work import Family, Found
from bpipe.tools.balancing import sizes_of

P, M = 16, 128
FAMILIES = ((1, ("1f1b", "gpipe")), (1, ("zb_h1", "zb_h2")), (2, ("zbv", "v_half", "v_min")), (2, ("interleaved_1f1b",)))
MICROBATCH = 1000  # bytes that a rank's share of the model keeps
LINKS = {"fast links": 0.3, "slow links": 2.0}  # forwards that it takes to evict a microbatch
BUDGET = 0.6  # of what 1F1B's first rank needs
CHOICE_S, SEARCH_S = 1.0, 10.0  # the most that may be taken
WHY = "over slow links more schedules are near the fastest, and have to be judged within the budget"
UNITS = 5  # simulations whose median is the unit


def families(eviction_s: float, *, p: int = P, m: int = M) -> list[Family]:
    """Return four families of schedules: of whole backwards, of halves, in a V and looped."""
    found = []
    for per_rank, names in FAMILIES:
        costs = Costs(
            forward_s=1 / per_rank,
            backward_s=2 / per_rank,
            saved_bytes=MICROBATCH // per_rank,
            output_bytes=MICROBATCH // 20,
            link=Link(bytes_per_s=MICROBATCH / eviction_s),
        )
        plans = tuple(build(name, per_rank * p, m) for name in names)
        budgets = (int(BUDGET * p * MICROBATCH),) * p
        found.append(Family(starts=plans, setting=Setting(costs=costs, sizes=sizes_of(plans[0], costs, 1), budgets=budgets)))
    return found


def seconds_of(work: Callable[[], Any]) -> float:
    """Return the seconds of this process's CPU time that something takes."""
    began = time.process_time()
    work()
    return time.process_time() - began


def unit_s() -> float:
    """Return the seconds that it takes to simulate 1F1B."""
    costs = Costs(saved_bytes=MICROBATCH, output_bytes=MICROBATCH // 20, link=Link(bytes_per_s=MICROBATCH))
    plan = build("1f1b", P, M)
    return median(seconds_of(lambda: simulate(plan, costs)) for _ in range(UNITS))


def measure(name: str, plan: Callable[[Sequence[Family]], list[Found]], most_s: float, eviction_s: float) -> list[Row]:
    """Plan once."""
    given, unit = families(eviction_s), unit_s()
    found: list[Found] = []
    seconds = seconds_of(lambda: found.extend(plan(given)))
    fastest_named = min((one.step_s for one in found if not one.is_made), default=None)
    return [
        {
            "what": name,
            "simulations": seconds / unit,
            "most_s": most_s,
            "share": seconds / most_s,
            "fastest": found[0].name,
            "gain": None if fastest_named is None else fastest_named / found[0].step_s - 1,
        }
    ]


def cases() -> list[Case]:
    """Both ways to plan, over both links."""
    ways: list[tuple[str, Callable[[Sequence[Family]], list[Found]], float]] = [
        ("choose a named schedule", named, CHOICE_S),
        ("search", searched, SEARCH_S),
    ]
    return [
        (text := f"{name}, {links}", partial(measure, text, plan, most_s, eviction_s))
        for name, plan, most_s in ways
        for links, eviction_s in LINKS.items()
    ]


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What planning may take."""
    return [
        Claim(
            what=f"{row['what']}: CPU time over {row['most_s']:.0f} s",
            target=1.0,
            value=row["share"],
            low=row["share"],
            high=row["share"],
            why=WHY,
        )
        for row in rows
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Simulations that could run meanwhile."""
    figure = Figure(figsize=(7, 2.4), layout="constrained")
    axes = figure.subplots()
    axes.barh([row["what"] for row in rows], [row["simulations"] for row in rows])
    axes.set(xlabel="simulations of 1F1B in that time")
    return figure


STUDY = Study(
    name="planning_time",
    title="Time to plan",
    text=(
        f"Eight schedules of four families on {P} ranks with {M} microbatches, kept within {BUDGET:.0%} of what 1F1B's first rank\n"
        "needs by evictions or recomputation: the choice among them (`bpipe.search.named`), and the search with its usual effort.\n"
        "One process, CPU time, counted in simulations of 1F1B of that size; an eviction takes 0.3 forwards over fast links, and\n"
        "2 over slow ones. The gain is that of the plan found over the best named one."
    ),
    cases=cases,
    columns=(
        ("what", "", ""),
        ("simulations", "in simulations", ".0f"),
        ("most_s", "may take, s", ".0f"),
        ("share", "of that", ".2f"),
        ("fastest", "fastest", ""),
        ("gain", "gain", ".1%"),
    ),
    claims=claims,
    draw=draw,
)
