"""Describe in words how balancing in bytes changed a plan."""

from __future__ import annotations

from dataclasses import replace

from bpipe.passes.communicate import communicate, computations_only
from bpipe.plan.action import HOST, Op
from bpipe.plan.amounts import show_bytes, show_each
from bpipe.plan.plan import Plan

__all__: list[str] = []


def outcome(plan: Plan) -> str:
    """Describe the moves in a finished plan with sizes, and the peaks before and after, or why nothing moves."""
    assert plan.sizes is not None, "a plan in bytes"
    before = unbalanced_peaks(plan)
    moved = sum(len(plan.evicted(rank)) for rank in range(plan.num_ranks))
    if not moved:
        why = "is level already" if len(set(before)) == 1 else "is as low as it gets" if plan.budgets is None else "fits"
        if plan.budgets is not None and set(plan.budgets) == {None}:
            why = "has no limit to keep, because none was given"
        return f"{why}: nothing moves; by the plan, the most on each device is {show_each(before)}"
    evictions = [action for lane in plan.actions for action in lane if action.op is Op.EVICT]
    to_hosts = sum(map(plan.sizes.moved, (action for action in evictions if action.peer == HOST)))
    return (
        f"moves {moved} of {plan.num_stages * plan.num_units} {'slices' if plan.units.are_slices else 'microbatches'} of a stage, "
        f"{show_bytes(sum(map(plan.sizes.moved, evictions)))} each way"
        + f", {show_bytes(to_hosts)} of it to hosts" * bool(to_hosts)
        + f"; by the plan, the most on each device was {show_each(before)}, and is {show_each(plan.device_peak_bytes)}"
    )


def unbalanced_peaks(plan: Plan) -> tuple[int, ...]:
    """Return the peaks of a plan's computations without evictions, by its sizes."""
    return communicate(replace(computations_only(plan), sizes=plan.sizes)).device_peak_bytes
