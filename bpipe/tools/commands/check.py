"""Prove a plan from a file: complete, in order, messages matched, within its budget, and free of deadlock."""

from __future__ import annotations

import argparse
from pathlib import Path

from bpipe.errors import PlanError
from bpipe.plan.grid import head
from bpipe.schedules import verify
from bpipe.tools.arguments import read_plan
from bpipe.tools.balancing import balance_notes
from bpipe.tools.summary import peak_bytes_of, unknown_of
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe check plan.txt
  bpipe check schedule.csv && echo sound

FILE is a plan's text (plan.to_text()), a CSV that torch.distributed.pipelining reads, or a trace.
Exit code 0: sound; 1: it breaks a rule; 2: it is not a plan."""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE")


def run(args: argparse.Namespace) -> Result:
    plan = read_plan(args.file)
    try:
        verify(plan)
    except PlanError as error:
        found = str(error)
        return Result(data={"file": str(args.file), "is_sound": False, "error": found}, shown=lambda: [found], exit_code=1)
    count = sum(map(len, (*plan.actions, *plan.served)))
    data = {"file": str(args.file), "is_sound": True, "name": plan.name, "num_actions": count, "peak_slots": plan.peak_slots}
    data |= {**peak_bytes_of(plan), "budgets": plan.budgets}
    said = [*balance_notes(plan), *unknown_of(plan, is_balanced_here=False)]
    return Result(data=data, shown=lambda: [head(plan), *said, f"sound: {count} actions, each proven to be in its place"])
