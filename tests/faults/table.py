"""The page that says what bpipe does about each fault: written from a run of the suite, and compared with it ever after."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.faults.case import BOUND_S, FROZEN_S, Case

PATH = Path(__file__).resolve().parents[2] / "docs" / "faults.md"

HEAD = f"""# When something goes wrong

Each row is a fault in a small pipeline of 2 to 4 processes, and bpipe's reaction to it.

- *There* is the rank where it happens. *The others raise too*: they raise RankFailedError, with that rank, the stage, microbatch,
  action and step, and the error in its text. A rank that has done its part of the step raises in its next call.
- *Works* means that losses, outputs and gradients are those of a single process, to the bit.
- After an error every rank refuses the pipeline's next call as broken, at once, or the next call is exact if the table says so.
  Then the test closes the schedule, and a step of a new one over the same process group has the gradients of a single process, to
  the bit. So nearly all rows run in the same processes, one after the other.
- Seconds are from the fault to the error of the last rank; a rank that runs user code raises when that code returns. Less than
  {BOUND_S:g} pass; if a rank waits until timeout_s ({FROZEN_S:g} here) less than {BOUND_S:g} more.

Measured on one machine with 2 shared CPU cores, with gloo over the loopback address. The suite writes this page:

    make test ARGS="-n 0 tests/faults --tier every --write-table"
"""

ROW = re.compile(r"^\| (.+) \| (.+) \| (.*) \|$", re.MULTILINE)


def page(groups: Mapping[str, Iterable[Case]], seconds: Mapping[str, float]) -> str:
    """The page, with a table for each group of cases."""
    return "\n".join([HEAD, *(_table(title, cases, seconds) for title, cases in groups.items())])


def _table(title: str, cases: Iterable[Case], seconds: Mapping[str, float]) -> str:
    rows = [f"| {case.name} | {case.outcome} | {_shown(seconds.get(case.name))} |" for case in cases]
    return "\n".join([f"## {title}\n", "| case | what bpipe does | seconds |", "|---|---|---|", *rows, ""])


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.2f}"


def untimed(text: str) -> str:
    """A page without what differs from run to run."""
    return ROW.sub(r"| \1 | \2 |", text)
