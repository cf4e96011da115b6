"""Compare schedules on the same costs: step, bubble, exposed transfers and the fullest rank.

The first schedule's step is what the others' are divided by.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.errors import ConfigurationError
from bpipe.tools.arguments import add_costs, add_plan, timeline_of
from bpipe.tools.draw import SUFFIXES
from bpipe.tools.output import check_out, write
from bpipe.tools.result import Result
from bpipe.tools.summary import compared, data_of

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe compare gpipe 1f1b balanced_1f1b -p 8 -m 32 --saved 1.5GiB --forward 20ms --bandwidth 20GB/s
  bpipe compare 1f1b balanced_1f1b -p 4 -m 8 --out both.html
  bpipe compare runs/gpt/trace balanced_1f1b -p 4 -m 8 --measured runs/gpt/trace   measured beside predicted"""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser, num="+")
    add_costs(parser)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="draw the first two on one axis: .png, .svg or .html")


def run(args: argparse.Namespace) -> Result:
    if len(args.schedule) < 2:
        raise ConfigurationError("compare takes two schedules or more, such as 1f1b balanced_1f1b")
    check_out(args.out, SUFFIXES)
    timelines = [timeline_of(schedule, args) for schedule in args.schedule]
    written = write(timelines[0], args.out, other=timelines[1])
    found = [data_of(timeline) for timeline in timelines]
    return Result(data=found, shown=lambda: [compared(found), *written])
