"""Merge the files that a trace's ranks wrote, and show what was measured."""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.tools.arguments import chosen_step, read_trace
from bpipe.tools.output import check_out, write
from bpipe.tools.summary import data_of, shown_of
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe trace runs/gpt/trace
  bpipe trace runs/gpt/trace --out merged.json    one file, to open at ui.perfetto.dev
  bpipe trace merged.json --step 7 --out step7.html"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder that bpipe.trace wrote, or a merged file")
    parser.add_argument("--step", type=int, metavar="N", help="the step to show (default: the one of median length)")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="all steps as .json; the shown one as .png, .svg, .html")


def run(args: argparse.Namespace) -> Result:
    check_out(args.out)
    timelines = read_trace(args.path)
    timeline = chosen_step(timelines, args.step)
    to_merge = args.out is not None and args.out.suffix == ".json"
    written = write(timelines if to_merge else timeline, args.out)
    steps = f"{len(timelines)} step{'s' * (len(timelines) > 1)}, of which step {timeline.step}:"
    data = [data_of(each) for each in timelines] if args.json else None
    return Result(data=data, shown=lambda: [steps, *shown_of(timeline, data_of(timeline)), *written])
