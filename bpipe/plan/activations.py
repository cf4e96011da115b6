"""The activations among a plan's bytes: what microbatches save, and guests in their rooms, without messages and static bytes."""

from __future__ import annotations

from dataclasses import replace

from bpipe.plan.meter import Meter, bytes_meter, occupancy
from bpipe.plan.plan import Plan

__all__: list[str] = []


def activations_meter(plan: Plan) -> Meter:
    """Return a meter of the bytes that microbatches save, by a plan's sizes."""
    assert plan.sizes is not None, "a plan in bytes"
    saved = tuple(stage.without_messages() for stage in plan.sizes.stages)
    return bytes_meter(replace(plan.sizes, stages=saved), plan.stage_ranks)


def activation_peaks(plan: Plan) -> tuple[int, ...]:
    """Return the peak bytes of activations on each rank of a plan with sizes, its rooms for guests included."""
    meter = activations_meter(plan)
    own = (max(occupancy(actions, meter), default=0) for actions in plan.actions)
    return tuple(peak + plan.room_bytes(rank) for rank, peak in enumerate(own))


def both_peaks(plan: Plan) -> dict[str, tuple[int, ...] | None]:
    """Return each rank's peak bytes by name, of its whole device and of activations; None where a plan counts slots."""
    if plan.sizes is None:
        return {"device_peak_bytes": None, "peak_bytes": None}
    return {"device_peak_bytes": plan.device_peak_bytes, "peak_bytes": activation_peaks(plan)}
