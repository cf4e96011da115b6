"""Draw a schedule's grid: one row per rank, one column per forward's time.

F0 is a forward of microbatch 0, B0 b0 its backward, I0 and W0 the halves of one; 4F0 is of stage 4, where a rank has several;
F0/1 is of slice 1 of microbatch 0, where --slices cuts microbatches into several; a column is then a forward of a slice.
Under a rank that evicts, >1 is where microbatch 1, or parts of it, leaves and <1 where it comes back; ^1 and v1 to and from
the rank's own host. With --budget it is balanced first.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import directions_of
from bpipe.passes.balance.outcome import unbalanced_peaks
from bpipe.plan.grid import head, num_fitting, rows
from bpipe.schedules import Plan
from bpipe.tools.arguments import COSTS, add_plan, costs_of, given_of, plan_of, within_budget
from bpipe.tools.balancing import balance_notes
from bpipe.tools.summary import peak_bytes_of, slots_note, unknown_of
from bpipe.tools.terminal import Result, console

if TYPE_CHECKING:
    from rich.text import Text

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe show 1f1b --ranks 4 --microbatches 8
  bpipe show interleaved_1f1b -p 4 -m 8 -v 3
  bpipe show seq_1f1b -p 4 -m 4 --slices 4
  bpipe show balanced_1f1b -p 64 -m 1024 --from 500
  bpipe show 1f1b -p 4 -m 8 --saved 3GiB,2GiB,2GiB,5GiB --budget lowest --parts 4
  bpipe show plan.txt --json"""

STYLES = {
    r"\b\d*F[\d/]+": "bold blue",
    r"\b\d*[Bb][\d/]+": "green",
    r"\b\d*[IiWw][\d/]+": "yellow",
    r"[>^][\d/]+": "bold red",
    r"[<v][\d/]+": "bold magenta",
}


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("--from", dest="first", type=int, default=0, metavar="COLUMN", help="first column to draw (default: 0)")
    parser.add_argument("--columns", type=int, metavar="N", help="columns to draw (default: what fits; all, into a file)")


def run(args: argparse.Namespace) -> Result:
    if args.first < 0 or (args.columns is not None and args.columns < 1):
        raise ConfigurationError(f"--from {args.first} --columns {args.columns}: give a first column from 0 and at least 1 column")
    plan = plan_of(args.schedule, args)
    if args.budget is not None:
        plan = within_budget(plan, costs_of(args, plan), args)
    elif given := given_of(args, COSTS):
        raise ConfigurationError(f"{', '.join(given)}: a grid shows costs only with --budget; `bpipe simulate` shows them")
    return Result(data=_data(plan) if args.json else None, shown=lambda: _shown(plan, args))


def _shown(plan: Plan, args: argparse.Namespace) -> list[str | Text]:
    lines = _window(plan, args.first, args.columns)
    for_people = slots_note([plan]) if sys.stdout.isatty() else []  # a file gets the plan's own text
    said = [*for_people, *balance_notes(plan), *unknown_of(plan, is_balanced_here=args.budget is not None)]
    return [head(plan), *said, *(map(_coloured, lines) if sys.stdout.isatty() else lines)]


def _data(plan: Plan) -> dict[str, object]:
    return {
        "name": plan.name,
        "num_stages": plan.num_stages,
        "num_microbatches": plan.num_microbatches,
        "slices": plan.slices,
        "directions": directions_of(plan.flow),
        "stage_ranks": plan.stage_ranks,
        "slots": plan.slots,
        "peak_slots": plan.peak_slots,
        "budgets": plan.budgets,
        **peak_bytes_of(plan),
        "unbalanced_device_peak_bytes": None if plan.sizes is None else unbalanced_peaks(plan),
        "evicted": [len(plan.evicted(rank)) for rank in range(plan.num_ranks)],
        "actions": [" ".join(map(plan.show, lane)) for lane in plan.actions],
        "served": [" ".join(map(plan.show, lane)) for lane in plan.served],
    }


def _window(plan: Plan, first: int, columns: int | None) -> list[str]:
    """Return the grid's lines, and one that says how to see the rest."""
    if columns is None and sys.stdout.isatty():
        columns = num_fitting(plan, first, console().width)
    lines = rows(plan, slice(first, None if columns is None else first + columns))
    if columns is not None:
        lines.append(f"columns {first} to {first + columns - 1}; --from and --columns show others")
    return lines


def _coloured(line: str) -> Text:
    from rich.text import Text

    label, bar, cells = line.partition(" | ")
    text = Text(cells, no_wrap=True, overflow="ignore")
    for pattern, style in STYLES.items():
        text.highlight_regex(pattern, style)
    return Text(label + bar, no_wrap=True, overflow="ignore").append_text(text)
