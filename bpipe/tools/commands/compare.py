"""Compare schedules on the same costs: step, bubble, exposed transfers and the rank whose device is the fullest.

The first schedule's step is what the others' are divided by. "Device" is all that a rank's device holds: activations, messages
between stages and what stays (weights, gradients, optimizer states).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from bpipe.errors import ConfigurationError
from bpipe.schedules import Timeline
from bpipe.tools.arguments import add_budget, add_costs, add_plan, is_file, timeline_of
from bpipe.tools.balancing import told
from bpipe.tools.comparison import compared, ranked
from bpipe.tools.draw import SUFFIXES
from bpipe.tools.output import check_out, write
from bpipe.tools.result import Result
from bpipe.tools.summary import data_of, unknown

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe compare gpipe 1f1b balanced_1f1b -p 8 -m 32 --saved 1.5GiB --forward 20ms --bandwidth 20GB/s
  bpipe compare 1f1b balanced_1f1b -p 4 -m 8 --out both.html
  bpipe compare 1f1b zbv v_half v_min -p 8 -m 32 --per-rank --forward 20ms
  bpipe compare 1f1b zbv -p 8 -m 32 --per-rank --saved 2GiB --bandwidth 20GB/s --forward 20ms --budget lowest --parts 2
  bpipe compare runs/gpt/trace balanced_1f1b -p 4 -m 8 --measured runs/gpt/trace   measured beside predicted"""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser, num="+")
    add_costs(parser)
    add_budget(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="draw the first two on one axis: .png, .svg or .html")


def run(args: argparse.Namespace) -> Result:
    if len(args.schedule) < 2:
        raise ConfigurationError("compare takes two schedules or more, such as 1f1b balanced_1f1b")
    check_out(args.out, SUFFIXES)
    timelines = [timeline_of(schedule, args) for schedule in args.schedule]
    written = write(timelines[0], args.out, other=timelines[1])
    files = [schedule if is_file(schedule) else None for schedule in args.schedule]
    found = [{**data_of(timeline), "file": file} for timeline, file in zip(timelines, files)]
    said = [line for timeline in timelines for line in told(timeline.plan)]
    said += [*unknown(found), *unlike(timelines, args)]
    return Result(data=found, shown=lambda: [compared(found), *ranked(found), *said, *written])


def unlike(timelines: Sequence[Timeline], args: argparse.Namespace) -> list[str]:
    """Return a line that says so if ranks hold more stages of one schedule than of another at the same costs per stage."""
    per_rank = {timeline.plan.name: timeline.plan.num_stages / timeline.num_ranks for timeline in timelines}
    few, many = min(per_rank, key=per_rank.__getitem__), max(per_rank, key=per_rank.__getitem__)
    if args.per_rank or args.measured is not None or per_rank[few] == per_rank[many]:
        return []
    return [
        f"A rank of {many} has {per_rank[many]:g} stages and one of {few} {per_rank[few]:g}, each with the same costs: "
        f"--per-rank says that the costs are a rank's, and its stages share them"
    ]
