"""A timeline in numbers: tables for people, plain data for scripts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bpipe.estimate.long_contexts import uneven_halves
from bpipe.flow.shape_arguments import directions_of
from bpipe.plan.amounts import show_bytes, show_each
from bpipe.plan.grid import head
from bpipe.schedules import Op, Plan, Timeline
from bpipe.simulator.critical import critical_path
from bpipe.simulator.gaps import Filling
from bpipe.tools.quantities import show_seconds
from bpipe.tools.scene import counts_messages, knows_bytes
from bpipe.tools.terminal import table

__all__: list[str] = []

EVICTIONS = (Op.WAIT_EVICT, Op.WAIT_LOAD)
HOLDS = ("device", "activations")
NOTHING_STAYS = "device leaves out static memory (weights, gradients, optimizer states)"


def data_of(timeline: Timeline) -> dict[str, Any]:
    """Return all numbers of a timeline, in seconds and bytes."""
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
        "slices": timeline.plan.slices,
        "directions": directions_of(timeline.plan.flow),
        "knows_bytes": knows_bytes(timeline),
        "counts_messages": counts_messages(timeline),
        "makespan_s": makespan,
        "ranks": [_rank(timeline, rank, makespan, slots) for rank, slots in enumerate(peak_slots)],
        "critical_path_s": critical_seconds(timeline),
    }


def slow_notes(timelines: Sequence[Timeline], slices: int | None) -> list[str]:
    """Return a line for each schedule whose order does not fit these lengths of F, I and W.

    Args:
        timelines: simulated or measured.
        slices: that were asked for; None: the usual number.
    """
    found = (uneven_halves(timeline, **({} if slices is None else {"slices": slices})) for timeline in timelines)
    return [str(one) for one in found if one is not None]


def peak_bytes_of(plan: Plan) -> dict[str, tuple[int, ...] | None]:
    """Return each rank's peak bytes by name, of its whole device and of activations; None if the plan counts slots."""
    has_sizes = plan.sizes is not None
    return {
        "device_peak_bytes": plan.device_peak_bytes if has_sizes else None,
        "peak_bytes": plan.activation_peak_bytes if has_sizes else None,
    }


def _rank(timeline: Timeline, rank: int, makespan: float, peak_slots: int) -> dict[str, Any]:
    exposed, work = timeline.exposed_s(rank), timeline.work_s(rank)
    return {
        "rank": rank,
        "work_s": work,
        "bubble_s": makespan - work,
        "exposed_evictions_s": sum(exposed.get(op, 0.0) for op in EVICTIONS),
        "exposed_messages_s": sum(seconds for op, seconds in exposed.items() if op not in EVICTIONS),
        "device_peak_bytes": timeline.device_peak_bytes(rank),
        "peak_bytes": timeline.peak_bytes(rank),
        "static_bytes": timeline.actions[rank].static_bytes,
        "remote_buffer_bytes": timeline.actions[rank].remote_buffer_bytes,
        "peak_slots": peak_slots,
        "num_evicted": len(timeline.plan.evicted(rank)),
        "host_bytes": None if timeline.plan.sizes is None else timeline.plan.host_bytes(rank),
    }


def critical_seconds(timeline: Timeline) -> dict[str, float]:
    """Return what the critical path consists of: seconds by operation, the longest first."""
    seconds: dict[str, float] = {}
    for _, span in critical_path(timeline):
        seconds[span.action.op.value] = seconds.get(span.action.op.value, 0.0) + span.seconds
    return dict(sorted(seconds.items(), key=lambda item: -item[1]))


def shown_of(timeline: Timeline, data: dict[str, Any]) -> list[Any]:
    """Return a heading, a table with a row per rank, and what the critical path consists of."""
    path = ", ".join(f"{op} {show_seconds(seconds)}" for op, seconds in data["critical_path_s"].items() if seconds > 0)
    rows: list[tuple[str, ...]] = [
        (
            f"rank {rank['rank']}",
            show_seconds(rank["work_s"]),
            f"{show_seconds(rank['bubble_s'])} ({share(rank['bubble_s'], data['makespan_s']):.0%})",
            show_seconds(rank["exposed_evictions_s"]),
            show_seconds(rank["exposed_messages_s"]),
            *holds_of(rank, data),
            str(rank["num_evicted"]),
        )
        for rank in data["ranks"]
    ]
    columns = [
        "",
        "computes",
        "bubble",
        "waits for evictions",
        "for messages",
        *HOLDS,
        "evicted slices" if data["slices"] > 1 else "evicted",
    ]
    if any(rank["host_bytes"] for rank in data["ranks"]):
        columns.append("on its host")
        rows = [(*row, show_bytes(rank["host_bytes"])) for row, rank in zip(rows, data["ranks"])]
    step = f"step, {timeline.source}: {show_seconds(data['makespan_s'])}"
    return [head(timeline.plan), *slots_note([timeline.plan]), step, table(columns, rows), f"critical path: {path}"]


def fill_shown(filled: Sequence[Filling], data: dict[str, Any]) -> list[Any]:
    """Return a table of what a fill job's pieces make of each rank's gaps, and what that is of all ranks' work."""
    rows = [
        (
            f"rank {rank}",
            show_seconds(one.idle_s),
            f"{show_bytes(one.least_bytes)} to {show_bytes(one.most_bytes)}" if data["knows_bytes"] else "-",
            str(one.num_pieces),
            f"{show_seconds(one.used_s)} ({share(one.used_s, one.idle_s):.0%})",
        )
        for rank, one in enumerate(filled)
    ]
    more = share(sum(one.used_s for one in filled), sum(rank["work_s"] for rank in data["ranks"]))
    columns = ["", "waits", "free meanwhile", "pieces", "filled"]
    return [table(columns, rows), f"a fill job adds {more:.1%} to what the ranks compute"]


def share(part: float, whole: float) -> float:
    """Return a part as a share of the whole, and 0 if the whole is 0."""
    return part / whole if whole else 0.0


def holds_of(rank: dict[str, Any], data: dict[str, Any]) -> tuple[str, str]:
    """Return the most that a rank's device holds in total, and of activations: bytes if they are known, else slots of activations.

    With several stages per rank or slices per microbatch, the slots are also given in microbatches of all of them.
    """
    if data["knows_bytes"]:
        return show_bytes(rank["device_peak_bytes"]), show_bytes(rank["peak_bytes"])
    of_a_microbatch = data["slices"] * data["num_stages"] / data["directions"] / data["num_ranks"]
    slots = f"{rank['peak_slots']} {'slices' if data['slices'] > 1 else 'slots'}"
    return "-", slots if of_a_microbatch == 1 else f"{rank['peak_slots'] / of_a_microbatch:.4g} microbatches ({slots})"


def unknown(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return lines that say what is missing from the devices' totals: what stays, or the messages that other timelines count."""
    known = [data for data in found if data["knows_bytes"]]
    bare = dict.fromkeys(name_of(data) for data in known if lacks_static(data))
    silent = dict.fromkeys(name_of(data) for data in known if not data["counts_messages"])
    lines = [f"{'; '.join(bare)}: {NOTHING_STAYS}: give --static"]
    others = f"{'; '.join(silent)}: device has no messages between stages, that of the others has them: its plan counts slots"
    return lines * bool(bare) + [others] * any(data["counts_messages"] for data in known if silent)


def slots_note(plans: Sequence[Plan]) -> list[str]:
    """Return a line that says what a slot is, if plans count them."""
    counted = [plan for plan in plans if plan.sizes is None]
    unit = "slice of a microbatch" if any(plan.slices > 1 for plan in counted) else "microbatch"
    return [f"a slot is room for what one stage saves of one {unit}"] * bool(counted)


def unknown_of(plan: Plan, *, is_balanced_here: bool) -> list[str]:
    """Return the line that says that a plan's sizes count no static memory."""
    if plan.sizes is None or any(plan.sizes.static):
        return []
    return [f"{plan.name}: {NOTHING_STAYS}: {'give --static' if is_balanced_here else 'its plan has none'}"]


def lacks_static(data: dict[str, Any]) -> bool:
    """Return whether a rank's static memory is unknown."""
    return data["source"] != "measured" and not any(rank["static_bytes"] for rank in data["ranks"])


def name_of(data: dict[str, Any]) -> str:
    """Return the name of a timeline's row in a comparison."""
    file = f"{data['file']}: " if data.get("file") else ""
    slices = f" in {data['slices']} slices" if data["slices"] > 1 else ""
    return f"{file}{data['name']}{slices}{_budget(data)}, {data['source']}"


def _budget(data: dict[str, Any]) -> str:
    if data["budgets"] is not None:
        return f" within {show_each(data['budgets'])}"
    slots = sorted({"no limit" if k is None else str(k) for k in data["slots"]})
    unit = "slices" if data["slices"] > 1 else "slots"
    return "" if slots == ["no limit"] else f" within {' or '.join(slots)} {unit}"
