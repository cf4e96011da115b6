"""Find the fastest plan within a budget: named schedules, kept within it as each best can be, and orders made to measure from them.

An order made to measure is searched for these costs alone: list scheduling, then simulated annealing. The same arguments give the
same plan. It is written as text, which FromPlan runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from bpipe.api.policy import Way
from bpipe.checks import budgets_of
from bpipe.errors import ConfigurationError
from bpipe.passes.setting import Setting
from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Destinations, Plan, verify
from bpipe.search.fastest import EFFORT, searched
from bpipe.search.work import Family, Found
from bpipe.tools.arguments import add_plan, costs_of, plan_of, whole
from bpipe.tools.balancing import LOWEST, sizes_of
from bpipe.tools.quantities import show_seconds
from bpipe.tools.terminal import Result, sign_of_life, table
from bpipe.whole_file import write_whole

if TYPE_CHECKING:
    from rich.table import Table

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe search 1f1b zb_h1 zbv -p 8 -m 32 --per-rank --forward 20ms --saved 2GiB --budget 12GiB --bandwidth 20GB/s
  bpipe search 1f1b -p 4 -m 16 --forward 20ms,20ms,20ms,35ms --out plan.txt
Exit code 1: no plan was found that keeps the budget."""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser, num="+")
    parser.add_argument("--by", choices=get_args(Way), default="evict_or_recompute", help="how to keep the budget (default: both)")
    parser.add_argument(
        "--effort", type=whole, default=EFFORT, metavar="N", help=f"actions that may run while annealing (default: {EFFORT:,})"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random moves (default: 0)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write the fastest plan's text")


def run(args: argparse.Namespace) -> Result:
    _refuse(args)
    families = _families([plan_of(schedule, args) for schedule in args.schedule], args)
    with sign_of_life("Searching") as progress:
        how = {"effort": args.effort, "seed": args.seed, "all_named": True}
        found = searched(families, **how, told=lambda done: progress(round(1000 * done), 1000))
    best, written = found[0].kept, []
    if best is not None:
        verify(best.plan)
        if args.out is not None:
            write_whole(args.out, best.plan.to_text())
            written = [f"wrote {args.out}: FromPlan(stages, Plan.from_text(...)) runs it"]
    data = [_data(one, families) for one in _worth_showing(found)]
    return Result(data=data, shown=lambda: [_shown(data), *written], exit_code=0 if best is not None else 1)


def _refuse(args: argparse.Namespace) -> None:
    if args.slots is not None or args.overlapped:
        raise ConfigurationError(
            "search keeps a budget in bytes, of whole computations one by one: leave --slots and --overlapped out"
        )
    if args.budget == LOWEST:
        raise ConfigurationError("search keeps a budget and makes the step short: give --budget in bytes")


def _families(plans: Sequence[Plan], args: argparse.Namespace) -> list[Family]:
    """Group the plans whose ranks have the same computations, because the same orders can be made of these."""
    groups: dict[object, list[Plan]] = {}
    for plan in plans:
        computed = tuple(frozenset(plan.compute(rank)) for rank in range(plan.num_ranks))
        groups.setdefault((plan.flow, computed), []).append(plan)
    return [Family(starts=tuple(group), setting=_setting(group[0], args)) for group in groups.values()]


def _setting(plan: Plan, args: argparse.Namespace) -> Setting:
    costs = costs_of(args, plan)
    costs.check(plan)
    budgets = budgets_of("--budget", args.budget, plan.num_ranks)
    to = Destinations(nodes=costs.nodes, host=args.host or "no")
    return Setting(
        costs=costs,
        sizes=sizes_of(plan, costs, args.parts or 1),
        budgets=budgets,
        to=to,
        evicts=args.by != "recompute",
        recomputes=args.by != "evict",
    )


def _data(found: Found, families: Sequence[Family]) -> dict[str, Any]:
    kept = found.kept
    return {
        "name": found.name,
        "made_from": [plan.name for plan in families[found.family].starts] if found.is_made else [],
        "step_s": None if kept is None else kept.step_s,
        "order_s": found.order_s,
        "evicts": kept is not None and kept.evicts,
        "recomputes": kept is not None and kept.recomputes,
        "device_peak_bytes": None if kept is None else kept.plan.device_peak_bytes,
    }


def _worth_showing(found: Sequence[Found]) -> list[Found]:
    """Return the named schedules, and of the orders made from the same ones the fastest that keeps the budget."""
    kept = {one.family: one for one in reversed(found) if one.is_made and one.kept is not None}
    return [one for one in found if not one.is_made or one is kept.get(one.family)]


def _shown(data: Sequence[dict[str, Any]]) -> Table:
    best_s = data[0]["step_s"]
    return table(["", "step", "of the fastest", "keeps the budget", "fullest device"], [_row(one, best_s) for one in data])


def _row(one: dict[str, Any], best_s: float | None) -> tuple[str, ...]:
    name = f"an order made for these costs, from {', '.join(one['made_from'])}" if one["made_from"] else one["name"]
    if one["step_s"] is None:
        return name, f"over {show_seconds(one['order_s'])}", "", "none found", ""
    how = [what for what, does in (("evictions", one["evicts"]), ("recomputation", one["recomputes"])) if does]
    kept = f"by {' and '.join(how)}" if how else "as it is"
    times = one["step_s"] / best_s if best_s else 1.0
    return name, show_seconds(one["step_s"]), f"{times:.3f}", kept, show_bytes(max(one["device_peak_bytes"]))
