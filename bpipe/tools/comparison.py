"""Compare timelines side by side, and rank them by memory: by all that the fullest device holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bpipe.plan.amounts import show_bytes
from bpipe.tools.quantities import show_seconds
from bpipe.tools.summary import HOLDS, holds_of, lacks_static, name_of, share
from bpipe.tools.terminal import table

if TYPE_CHECKING:
    from rich.table import Table

__all__: list[str] = []


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
