"""Draw a timeline, predicted from costs or measured by a trace: computations, transfers and memory of each rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.tools.arguments import add_plan, single, timeline_of
from bpipe.tools.balancing import balance_notes
from bpipe.tools.draw import SUFFIXES
from bpipe.tools.output import check_out, write
from bpipe.tools.quantities import seconds_of
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe plot balanced_1f1b -p 8 -m 16 --out plan.svg
  bpipe plot runs/gpt/trace --out measured.html
  bpipe plot runs/gpt/trace --step 7 --from 100ms --to 300ms --out part.png"""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help=".png, .svg, .pdf or .html")
    parser.add_argument("--from", dest="begin", type=single(seconds_of), metavar="TIME", help="draw from here")
    parser.add_argument("--to", dest="end", type=single(seconds_of), metavar="TIME", help="draw up to here")


def run(args: argparse.Namespace) -> Result:
    check_out(args.out, SUFFIXES)
    timeline = timeline_of(args.schedule, args)
    is_part = args.begin is not None or args.end is not None
    window = (args.begin or 0.0, timeline.makespan_s if args.end is None else args.end) if is_part else None
    written = write(timeline, args.out, window=window)
    return Result(data={"file": str(args.out)}, shown=lambda: [*balance_notes(timeline.plan), *written])
