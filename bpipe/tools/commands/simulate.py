"""Predict when everything runs, from costs: the step, the bubble, what transfers cost, and the memory of each rank."""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.errors import ConfigurationError
from bpipe.simulator.gaps import fill_gaps
from bpipe.tools.arguments import add_each, add_plan, timeline_of
from bpipe.tools.balancing import balance_notes
from bpipe.tools.output import check_out, write
from bpipe.tools.quantities import bytes_of, seconds_of
from bpipe.tools.summary import data_of, fill_shown, shown_of, slow_notes, unknown
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe simulate balanced_1f1b -p 4 -m 8
  bpipe simulate balanced_1f1b -p 8 -m 32 --forward 20ms --saved 1.5GiB --output 32MiB --bandwidth 20GB/s
  bpipe simulate 1f1b -p 8 -m 32 --saved 1.5GiB --budget 8GiB --host last --bandwidth 20GB/s --host-bandwidth 10GB/s
  bpipe simulate v_half -p 8 -m 32 --per-rank --forward 1s --model llama2-70b --sequence 32768
  bpipe simulate 1f1b -p 4 -m 8 --forward 20ms,20ms,20ms,35ms --out predicted.html
  bpipe simulate balanced_1f1b -p 4 -m 8 --forward 20ms --saved 1.5GiB --fill 5ms --fill-bytes 1GiB"""


def add(parser: argparse.ArgumentParser) -> None:
    add_plan(parser)
    group = parser.add_argument_group("fill job", "work while a rank waits (docs/fill.md): what of it fits")
    fill = (
        ("--fill", seconds_of, "of a piece, such as 5ms", "TIME"),
        ("--fill-bytes", bytes_of, "of it, and what the job keeps (default: 0)", "BYTES"),
        ("--fill-budget", bytes_of, "of a rank's device (default: the plan's, or the rank's peak)", "BYTES"),
    )
    add_each(group, fill)
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="write it too: .png, .svg, .html, or .json for Perfetto")


def run(args: argparse.Namespace) -> Result:
    check_out(args.out)
    timeline = timeline_of(args.schedule, args)
    written = write(timeline, args.out)
    slow = slow_notes([timeline], args.slices)
    data = {**data_of(timeline), "notes": slow}
    said = [*balance_notes(timeline.plan), *slow, *unknown([data])]
    if args.fill is None and (args.fill_bytes, args.fill_budget) != (None, None):
        raise ConfigurationError("--fill-bytes and --fill-budget are of a fill job: give its pieces' time, such as --fill 5ms")
    if args.fill is not None:
        how = (args.fill, args.fill_bytes or 0, args.fill_budget)
        filled = [fill_gaps(timeline, rank, *how) for rank in range(timeline.num_ranks)]
        data["fill"] = [one._asdict() for one in filled]
        said = [*fill_shown(filled, data), *said]
    return Result(data=data, shown=lambda: [*shown_of(timeline, data), *said, *written])
