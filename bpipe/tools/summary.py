"""A timeline in numbers: tables for people, plain data for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bpipe.schedules import Op, Timeline
from bpipe.schedules.amounts import show_bytes, show_each
from bpipe.schedules.critical import critical_path
from bpipe.schedules.grid import head
from bpipe.tools.quantities import show_seconds
from bpipe.tools.terminal import table

if TYPE_CHECKING:
    from rich.table import Table

__all__: list[str] = []

EVICTIONS = (Op.WAIT_EVICT, Op.WAIT_LOAD)


def data_of(timeline: Timeline) -> dict[str, Any]:
    """All numbers of a timeline: seconds and bytes."""
    makespan, peak_slots = timeline.makespan_s, timeline.plan.peak_slots
    return {
        "name": timeline.plan.name,
        "source": timeline.source,
        "step": timeline.step,
        "slots": timeline.plan.slots,
        "budgets": timeline.plan.budgets,
        "num_stages": timeline.plan.num_stages,
        "num_ranks": timeline.num_ranks,
        "num_microbatches": timeline.plan.num_microbatches,
        "makespan_s": makespan,
        "ranks": [_rank(timeline, rank, makespan, slots) for rank, slots in enumerate(peak_slots)],
        "critical_path_s": critical_seconds(timeline),
    }


def _rank(timeline: Timeline, rank: int, makespan: float, peak_slots: int) -> dict[str, Any]:
    exposed, work = timeline.exposed_s(rank), timeline.work_s(rank)
    return {
        "rank": rank,
        "work_s": work,
        "bubble_s": makespan - work,
        "exposed_evictions_s": sum(exposed.get(op, 0.0) for op in EVICTIONS),
        "exposed_messages_s": sum(seconds for op, seconds in exposed.items() if op not in EVICTIONS),
        "peak_bytes": timeline.peak_bytes(rank),
        "peak_slots": peak_slots,
        "num_evicted": len(timeline.plan.evicted(rank)),
        "host_bytes": None if timeline.plan.sizes is None else timeline.plan.host_bytes(rank),
    }


def critical_seconds(timeline: Timeline) -> dict[str, float]:
    """What the critical path consists of: seconds by operation."""
    seconds: dict[str, float] = {}
    for _, span in critical_path(timeline):
        seconds[span.action.op.value] = seconds.get(span.action.op.value, 0.0) + span.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def shown_of(timeline: Timeline, data: dict[str, Any]) -> list[Any]:
    """A heading, a table with a row a rank, and what the critical path consists of."""
    path = ", ".join(f"{op} {show_seconds(seconds)}" for op, seconds in data["critical_path_s"].items() if seconds > 0)
    rows: list[tuple[str, ...]] = [
        (
            f"rank {rank['rank']}",
            show_seconds(rank["work_s"]),
            f"{show_seconds(rank['bubble_s'])} ({share(rank['bubble_s'], data['makespan_s']):.0%})",
            show_seconds(rank["exposed_evictions_s"]),
            show_seconds(rank["exposed_messages_s"]),
            _peak(rank, data),
            str(rank["num_evicted"]),
        )
        for rank in data["ranks"]
    ]
    columns = ["", "computes", "bubble", "waits for evictions", "for messages", "peak", "evicted"]
    if any(rank["host_bytes"] for rank in data["ranks"]):
        columns.append("on its host")
        rows = [(*row, show_bytes(rank["host_bytes"])) for row, rank in zip(rows, data["ranks"])]
    step = f"step, {timeline.source}: {show_seconds(data['makespan_s'])}"
    return [head(timeline.plan), step, table(columns, rows), f"critical path: {path}"]


def share(part: float, whole: float) -> float:
    """A part of a whole; nothing of nothing is nothing."""
    return part / whole if whole else 0.0


def _peak(rank: dict[str, Any], data: dict[str, Any]) -> str:
    """Bytes if they are known, else slots; with several stages a rank also the microbatches of all of them."""
    if rank["peak_bytes"]:
        return show_bytes(rank["peak_bytes"])
    per_rank = data["num_stages"] / data["num_ranks"]
    slots = f"{rank['peak_slots']} slots"
    return slots if per_rank == 1 else f"{rank['peak_slots'] / per_rank:g} microbatches ({slots})"


def _budget(data: dict[str, Any]) -> str:
    if data["budgets"] is not None:
        return f" within {show_each(data['budgets'])}"
    slots = sorted({"no limit" if k is None else str(k) for k in data["slots"]})
    return "" if slots == ["no limit"] else f" within {' or '.join(slots)} slots"


def compared(found: Sequence[dict[str, Any]]) -> Table:
    """A row a timeline; times beside the first one's."""
    first = found[0]["makespan_s"]
    rows = []
    for data in found:
        fullest = max(data["ranks"], key=lambda rank: (rank["peak_bytes"], rank["peak_slots"]))
        exposed = max(rank["exposed_evictions_s"] for rank in data["ranks"])
        rows.append(
            (
                f"{data['name']}{_budget(data)}, {data['source']}",
                show_seconds(data["makespan_s"]),
                f"{share(data['makespan_s'], first):.3f}",
                f"{share(max(rank['bubble_s'] for rank in data['ranks']), data['makespan_s']):.1%}",
                show_seconds(exposed),
                f"{_peak(fullest, data)} on rank {fullest['rank']}",
            )
        )
    return table(["", "step", "of the first", "largest bubble", "waits for evictions", "fullest rank"], rows)
