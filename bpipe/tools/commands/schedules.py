"""List the schedules: where their stages live, what a rank holds, and how long it waits.

p ranks, m microbatches, v stages per rank, x a rank; F, I and W the seconds that a rank's stages take for a microbatch's forward
and the two halves of its backward, B = I + W.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bpipe.schedules import Rule, rules
from bpipe.tools.terminal import Result

__all__: list[str] = []

EXAMPLES = """examples:
  bpipe schedules
  bpipe schedules --markdown      the table of docs/table-of-schedules.md"""


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as a table in Markdown")


def run(args: argparse.Namespace) -> Result:
    found = [_row(rule) for rule in rules()]
    return Result(data=found, shown=lambda: [markdown(found)] if args.markdown else [_paragraph(row) for row in found])


def _row(rule: Rule) -> dict[str, str]:
    return {
        "name": rule.name,
        "class": rule.runs_as,
        "title": rule.title,
        "stages": rule.placement.value,
        "microbatches": rule.allows_text,
        "peak": rule.peak_text,
        "bubble": rule.bubble_text,
    }


def _paragraph(row: dict[str, str]) -> str:
    sizes = f"{row['stages']}; {row['microbatches']} microbatches"
    return f"{row['name']}: {row['title']}\n  {sizes}\n  peak {row['peak']}\n  bubble {row['bubble']}"


def markdown(found: Sequence[dict[str, str]]) -> str:
    """Return the table of docs/table-of-schedules.md."""
    head = ("class", "name", "known as", "stages", "m", "peak on rank x, in microbatches", "bubble of the step")
    rows = [
        (f"`{row['class']}`", f"`{row['name']}`", *(row[key] for key in ("title", "stages", "microbatches", "peak", "bubble")))
        for row in found
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
