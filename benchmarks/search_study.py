"""Whether `bpipe search` keeps its word, on random cost tables, and how near its orders are to the fastest ones.

Tables that were measured stay in benchmarks/results/search_tables.csv and search_exact.csv, and only others are measured; so more
can be added at any time, and the study tells of all of them:

    .venv/bin/python -m benchmarks.search_study 1000 60     # tables, and small ones that are solved exactly
    .venv/bin/python -m benchmarks.search_study 1000 60 8   # the tables in 8 processes
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from math import inf
from operator import itemgetter
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from benchmarks.study import RESULTS, Claim, Row, Study
from bpipe.passes.evict_or_recompute import kept_within
from bpipe.search.bounds import lower_bound_s
from bpipe.search.exact import exact
from bpipe.search.fastest import searched
from bpipe.search.work import Family
from bpipe.verifier.proof import verify
from tests.schedules.replay import occupied_bytes, replay
from tests.search.tables import Table

TABLES, SMALL = RESULTS / "search_tables.csv", RESULTS / "search_exact.csv"
NUMBERS = {TABLES: 100, SMALL: 20}  # of tables, where none were measured yet
EFFORT = 2_000_000  # of a table; and of each family of a small one, with 4 ranks and 8 microbatches
EXACT_S = 10.0  # after which the solver gives up its proof
NEAR = 0.05  # of the fastest order
ROUNDING = 1e-9
FAMILIES = ("1F1B, GPipe", "zero bubble", "V", "looped")  # as in tests/search/tables.py


def measured(index: int) -> list[Row]:
    """Search one table, and compare what was found with each named schedule that the passes keep within the budgets."""
    table = Table.random(Random(f"search {index}"))
    families = table.families()
    named_s = min((_kept_s(family, place) for family in families for place in range(len(family.starts))), default=inf)
    best = searched(families, effort=EFFORT)[0]
    row = {"index": index, "p": table.num_ranks, "m": table.num_microbatches, "budget": table.budget}
    row |= {"message": table.message_s, "eviction": table.eviction_s}
    if best.kept is None:
        return [{**row, "named_fits": named_s < inf, "found": False, "not_worse": named_s == inf}]
    plan = best.kept.plan
    verify(plan)
    return [
        {
            **row,
            "named_fits": named_s < inf,
            "found": True,
            "not_worse": best.step_s <= named_s * (1 + ROUNDING),
            "replays": replay(plan) is None and occupied_bytes(plan) == plan.device_peak_bytes,
            "made": best.is_made,
            "evicts": best.kept.evicts,
            "recomputes": best.kept.recomputes,
            "gain": f"{named_s / best.step_s - 1:.6f}" if named_s < inf else "",
        }
    ]


def _kept_s(family: Family, place: int) -> float:
    """Return the step of a named schedule, kept within the budgets by itself."""
    kept = kept_within(family.setting.order_of(family.starts[place]), family.setting)
    return inf if kept is None else kept.step_s


def solved(index: int) -> list[Row]:
    """Compare the fastest order that is found for each family of a small table with the one of an exact solver.

    Nothing moves or is recomputed, and messages take time, but no memory, which the solver does not know.
    """
    table = replace(Table.random(Random(f"small {index}"), (4,)), num_microbatches=8)
    rows = []
    for name, family in zip(FAMILIES, table.families(sends=False)):
        orders_only = replace(family, setting=replace(family.setting, evicts=False, recomputes=False))
        limits = [1000 * table.budget] * table.num_ranks
        best = searched([orders_only], effort=EFFORT)[0]
        assert best.kept is not None, "one microbatch after the other always fits"
        first = orders_only.shop.numbered(orders_only.setting.order_of(best.kept.plan))
        proven = exact(orders_only.shop, limits, first, seconds=EXACT_S)
        least_s = max(proven.least_s, lower_bound_s(orders_only.shop, limits))
        rows.append(
            {
                "index": index,
                "family": name,
                "budget": table.budget,
                "proven": proven.step_s <= least_s * (1 + 1e-4),
                "over_exact": f"{best.step_s / proven.step_s - 1:.6f}",
                "over_bound": f"{best.step_s / least_s - 1:.6f}",
            }
        )
    return rows


COLUMNS = {
    TABLES.name: (
        *("index", "p", "m", "budget", "message", "eviction", "named_fits", "found"),
        *("not_worse", "replays", "made", "evicts", "recomputes", "gain"),
    ),
    SMALL.name: ("index", "family", "budget", "proven", "over_exact", "over_bound"),
}


def known(path: Path) -> list[dict[str, str]]:
    """Return what was measured until now."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def extend(path: Path, measure: Callable[[int], list[Row]], indices: Iterable[int], processes: int = 1) -> None:
    """Measure the tables that were not measured yet, and keep each at once."""
    done = {int(row["index"]) for row in known(path)}
    missing = [index for index in indices if index not in done]
    with ProcessPoolExecutor(processes) as pool:
        for index, rows in zip(missing, pool.map(measure, missing) if processes > 1 else map(measure, missing)):
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS[path.name], lineterminator="\n", restval="")
                if is_new:
                    writer.writeheader()
                writer.writerows(rows)
            if __name__ == "__main__":
                print(path.name, index, *(f"{key}={value}" for row in rows for key, value in list(row.items())[1:]), flush=True)


class Kind(NamedTuple):
    """A kind of tables: where they are kept, what measures one, and what sums them up."""

    name: str
    path: Path
    measure: Callable[[int], list[Row]]
    told: Callable[[list[dict[str, str]]], list[Row]]


def summary(kind: Kind) -> list[Row]:
    """Measure as many tables as there are already, or as many as a short study has, and sum them up."""
    number = max((int(row["index"]) + 1 for row in known(kind.path)), default=NUMBERS[kind.path])
    extend(kind.path, kind.measure, range(number))
    return kind.told(known(kind.path))


def of_tables(rows: Sequence[dict[str, str]]) -> list[Row]:
    """Sum up tables by the number of ranks, and all together."""
    groups = [(f"p = {p}", [row for row in rows if int(row["p"]) == p]) for p in sorted({int(row["p"]) for row in rows})]
    return [_of_group(name, group) for name, group in [*groups, ("all", list(rows))]]


def _of_group(name: str, rows: Sequence[dict[str, str]]) -> Row:
    gains = [float(row["gain"]) for row in rows if row["gain"]]
    made = [gain for gain, row in ((float(row["gain"]), row) for row in rows if row["gain"]) if row["made"] == "True"]
    found = [row for row in rows if row["found"] == "True"]
    return {
        "what": name,
        "cases": len(rows),
        "worse": sum(row["not_worse"] != "True" for row in rows),
        "unlike": sum(row["replays"] != "True" for row in found),
        "unnamed": sum(row["named_fits"] != "True" for row in found),
        "made": len(made) / max(1, len(gains)),
        "median_gain": median(gains) if gains else None,
        "median_made": median(made) if made else None,
        "largest_gain": max(gains, default=None),
        "gains": gains,
    }


def of_small(rows: Sequence[dict[str, str]]) -> list[Row]:
    """Sum up small tables by family, and all together."""
    groups = [(name, [row for row in rows if row["family"] == name]) for name in FAMILIES]
    return [_near(f"exactly: {name}", group) for name, group in [*groups, ("all", list(rows))] if group]


def _near(name: str, rows: Sequence[dict[str, str]]) -> Row:
    over = [float(row["over_exact"]) for row in rows]
    proven = [float(row["over_exact"]) for row in rows if row["proven"] == "True"]
    return {
        "what": name,
        "cases": len(rows),
        "proven": len(proven),
        "near": sum(one <= NEAR for one in over) / len(over),
        "near_proven": sum(one <= NEAR for one in proven) / max(1, len(proven)),
        "largest_over": max(over),
        "median_bound": median(float(row["over_bound"]) for row in rows),
    }


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What has to hold."""
    by_name = {row["what"]: row for row in rows}
    every, small = by_name["all"], by_name["exactly: all"]
    number, at_least = every["cases"], {"target": 0.95, "is_least": True}
    return [
        Claim.of(every, "worse", f"tables of {number} where the plan is slower than the best named one within the budget", 0),
        Claim.of(every, "unlike", f"plans of {number} whose memory an independent replay does not confirm", 0),
        Claim.of(small, "near", f"share of {small['cases']} small problems within 5% of the exact solver's order", **at_least),
        Claim.of(small, "near_proven", f"share of the {small['proven']} where that is proven to be the fastest", **at_least),
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Gains by the number of ranks."""
    figure = Figure(figsize=(7, 3.4), layout="constrained")
    axes: Any = figure.subplots()
    groups = [row for row in rows if row.get("gains") and row["what"] != "all"]
    gains = [[100 * gain for gain in row["gains"]] for row in groups]
    axes.boxplot(gains, tick_labels=[row["what"] for row in groups], whis=(0, 100))
    axes.set(ylabel="gain over the best named plan, %")
    return figure


STUDY = Study(
    name="search",
    title="Search",
    text=(
        "Random cost tables: 2 to 16 ranks, one to three times as many microbatches, uneven layers with or without a head, halves\n"
        "of backwards from 0.7 and 0.4 to 1.6 and 1.2 forwards, budgets from one microbatch to as many as there are ranks, links\n"
        f"from free to two forwards an eviction. `bpipe search` ran with `--effort {EFFORT}`. Each plan is proven, compared with\n"
        "every named schedule that the passes keep within the budgets by themselves, and replayed by the tests' own machine. The\n"
        "gain is that over the best of these schedules. Small tables, 4 ranks and 8 microbatches, are also solved with OR-tools\n"
        f"within {EXACT_S:.0f} s; there nothing moves, and messages take no memory. `search_tables.csv` and `search_exact.csv`\n"
        "have each case; `.venv/bin/python -m benchmarks.search_study 1000 60` adds more of them, about an hour on one core."
    ),
    works=(Kind("random tables", TABLES, measured, of_tables), Kind("small tables, exactly", SMALL, solved, of_small)),
    measure=summary,
    columns=(
        ("what", "", ""),
        ("cases", "cases", "d"),
        ("worse", "slower than named", "d"),
        ("unlike", "replayed unlike", "d"),
        ("unnamed", "where no named one fits", "d"),
        ("made", "made to measure", ".0%"),
        ("median_gain", "median gain", ".1%"),
        ("median_made", "median of these", ".1%"),
        ("largest_gain", "largest gain", ".1%"),
        ("proven", "proven", "d"),
        ("near", "within 5% of the solver's", ".0%"),
        ("near_proven", "of the proven", ".0%"),
        ("largest_over", "largest gap", ".1%"),
        ("median_bound", "median over the bound", ".1%"),
    ),
    claims=claims,
    draw=draw,
    name_of=itemgetter("name"),
)


if __name__ == "__main__":
    tables, small, *processes = map(int, sys.argv[1:])
    extend(TABLES, measured, range(tables), *processes)
    extend(SMALL, solved, range(small))
    STUDY.run(print)
