"""Compare schedules on the same costs: step, bubble, exposed transfers and the rank whose device is the fullest.

The first schedule's step is what the others' are divided by. "Device" is all that a rank's device holds: activations, messages
between stages and what stays (weights, gradients, optimizer states).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bpipe.errors import ConfigurationError
from bpipe.plan.amounts import show_bytes
from bpipe.schedules import Timeline
from bpipe.tools.arguments import add_plan, is_file, timeline_of
from bpipe.tools.balancing import balance_notes
from bpipe.tools.draw import SUFFIXES
from bpipe.tools.output import check_out, write
from bpipe.tools.quantities import show_seconds
from bpipe.tools.summary import HOLDS, data_of, holds_of, lacks_static, name_of, share, slow_notes, unknown
from bpipe.tools.terminal import Result, table

if TYPE_CHECKING:
    from rich.table import Table

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe compare gpipe 1f1b balanced_1f1b -p 8 -m 32 --saved 1.5GiB --forward 20ms --bandwidth 20GB/s
  bpipe compare 1f1b balanced_1f1b -p 4 -m 8 --out both.html
  bpipe compare 1f1b zbv v_half v_min -p 8 -m 32 --per-rank --forward 20ms
  bpipe compare 1f1b seq_1f1b -p 8 -m 16 --slices 4 --saved 8GiB --forward 200ms --budget lowest
  bpipe compare 1f1b v_half zbv seq_1f1b -p 8 -m 32 --slices 4 --per-rank --forward 200ms --attention-share 40%
  bpipe compare 1f1b zbv -p 8 -m 32 --per-rank --saved 2GiB --bandwidth 20GB/s --forward 20ms --budget lowest --parts 2
  bpipe compare runs/gpt/trace balanced_1f1b -p 4 -m 8 --measured runs/gpt/trace   measured beside predicted"""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser, num="+")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="draw the first two on one axis: .png, .svg or .html")


def run(args: argparse.Namespace) -> Result:
    if len(args.schedule) < 2:
        raise ConfigurationError("compare takes two schedules or more, such as 1f1b balanced_1f1b")
    check_out(args.out, SUFFIXES)
    timelines = [timeline_of(schedule, args) for schedule in args.schedule]
    written = write(timelines[0], args.out, other=timelines[1])
    files = [schedule if is_file(schedule) else None for schedule in args.schedule]
    slow = [slow_notes([timeline], args.slices) for timeline in timelines]
    found = [{**data_of(timeline), "file": file, "notes": notes} for timeline, file, notes in zip(timelines, files, slow)]
    said = [line for timeline in timelines for line in balance_notes(timeline.plan)]
    said += [*(line for notes in slow for line in notes), *unknown(found), *unlike(timelines, args)]
    return Result(data=found, shown=lambda: [compared(found), *ranked(found), *said, *written])


def unlike(timelines: Sequence[Timeline], args: argparse.Namespace) -> list[str]:
    """Return a line that says so if ranks hold more stages of one schedule than of another at the same costs per stage."""
    per_rank = {timeline.plan.name: timeline.plan.depth / timeline.num_ranks for timeline in timelines}
    few, many = min(per_rank, key=per_rank.__getitem__), max(per_rank, key=per_rank.__getitem__)
    if args.per_rank or args.measured is not None or per_rank[few] == per_rank[many]:
        return []
    return [
        f"A rank of {many} has {per_rank[many]:g} stages and one of {few} {per_rank[few]:g}, each with the same costs: "
        f"--per-rank says that the costs are a rank's, and its stages share them"
    ]


def compared(found: Sequence[dict[str, Any]]) -> Table:
    """Return a table with a row per timeline: its times, also relative to the first one's, and what its fullest rank holds."""
    first = found[0]["makespan_s"]
    rows = []
    for data in found:
        fullest = fullest_of(data)
        exposed = max(rank["exposed_evictions_s"] for rank in data["ranks"])
        rows.append(
            (
                name_of(data),
                show_seconds(data["makespan_s"]),
                f"{share(data['makespan_s'], first):.3f}",
                f"{share(max(rank['bubble_s'] for rank in data['ranks']), data['makespan_s']):.1%}",
                show_seconds(exposed),
                f"rank {fullest['rank']}",
                *holds_of(fullest, data),
            )
        )
    holds = (f"its {name}" for name in HOLDS)
    return table(["", "step", "of the first", "largest bubble", "waits for evictions", "fullest rank", *holds], rows)


def fullest_of(data: dict[str, Any]) -> dict[str, Any]:
    """Return the rank whose device holds the most in total."""
    fullest: dict[str, Any] = max(data["ranks"], key=lambda rank: (rank["device_peak_bytes"], rank["peak_slots"]))
    return fullest


def ranked(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line that ranks timelines by what their fullest device holds, or nothing unless all count the same things."""
    bases = {(data["knows_bytes"], lacks_static(data), data["counts_messages"]) for data in found}
    if len(bases) > 1 or not found[0]["knows_bytes"]:
        return []
    peaks = {index: fullest_of(data)["device_peak_bytes"] for index, data in enumerate(found)}
    order = sorted(peaks, key=peaks.__getitem__)
    return ["fullest device, the least first: " + "; ".join(f"{name_of(found[i])} {show_bytes(peaks[i])}" for i in order)]
