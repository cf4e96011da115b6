"""The page to paste into an issue: a one-line summary, and a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.tables import table
from bpipe.plan.amounts import show_bytes
from bpipe.tools.quantities import show_seconds

COLUMNS = ("check", "verdict", "numbers", "what it means")
BELOW = (
    "Written by `make gpu`. Equal is what `torch.equal` says; the allocator is torch's (`torch.cuda.max_memory_allocated`, "
    "without what was allocated before); times are medians of steps in turns."
)


def page(data: Mapping[str, Any]) -> str:
    """Write the page, in Markdown, from what the JSON holds."""
    rows = [_cells(verdict) for check in data["checks"] for verdict in check["verdicts"]]
    took = ", ".join(f"{check['name']} {check['took_s']:.0f} s" for check in data["checks"])
    return "\n".join([data["summary"], "", *table(COLUMNS, rows), "", f"It took: {took}.", "", BELOW, ""])


def summary(counts: Mapping[str, int], about: str, took_s: float) -> str:
    """Write the first line.

    Example:
        >>> summary({"passed": 3, "failed": 0, "not applicable": 1}, "bpipe 1.0, 1 x GPU", 61.2)
        'bpipe 1.0, 1 x GPU: 3 passed, 0 failed, 1 not applicable, in 61 s'
    """
    return f"{about}: {', '.join(f'{number} {outcome}' for outcome, number in counts.items())}, in {took_s:.0f} s"


def _cells(verdict: Mapping[str, Any]) -> list[str]:
    outcome = verdict["outcome"]
    numbers = "<br>".join(f"{_cell(_bare(name))}: {_cell(_shown(name, value))}" for name, value in verdict["numbers"].items())
    means = verdict["meaning"] if outcome == "passed" else verdict["reason"]
    return [_cell(verdict["check"]), f"**{outcome}**" if outcome == "failed" else outcome, numbers, _cell(means)]


def _bare(name: str) -> str:
    """Return a number's name without its unit, which the number shows.

    Example:
        >>> _bare("said_bytes, GPipe"), _bare("step_s, plain")
        ('said, GPipe', 'step, plain')
    """
    what, comma, of = name.partition(",")
    words = what.split(" ")
    words[0] = words[0].removesuffix("_bytes").removesuffix("_s").replace("_", " ")
    words[-1] = words[-1].removesuffix("_bytes").removesuffix("_s")
    return " ".join(words) + comma + of.replace("_bytes", "")


def _shown(name: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "unknown" if value is None else str(value)
    if "_bytes" in name or "bytes per second" in name:
        return f"{'-' if value < 0 else ''}{show_bytes(abs(value))}{'/s' if 'second' in name else ''}"
    if name.partition(",")[0].endswith("_s"):
        return show_seconds(value)
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def _cell(text: str) -> str:
    """Return a text that cannot end a cell or a row of the table."""
    return " ".join(str(text).replace("|", "\\|").replace("<", "&lt;").split())
