"""The numbers of a step, plain enough for any logger."""

from __future__ import annotations

from bpipe.memory.ledger import predicted_peak_bytes
from bpipe.runtime.run import Run
from bpipe.schedules import Op
from bpipe.schedules.sizes import occupancy

__all__: list[str] = []


def stats_of(run: Run, guest_bytes: int, seconds: float) -> dict[str, float]:
    """What one rank used and waited for in a step.

    Returns:
        Bytes: `peak_bytes` as entered in the ledger and `predicted_peak_bytes` from the plan and the first measured
        microbatch of each shape, both with `held_bytes` (saved but not movable, each storage once) and `guest_bytes`
        (rooms this schedule reserves for other ranks); `evicted_bytes`, `loaded_bytes`. Microbatches: `peak_slots` and
        `predicted_peak_slots`. Seconds: `step_s`, and those in which this rank's compute lane waited, by kind of transfer.
    """
    plan, ledger, waited = run.plan, run.evictions.ledger, run.traffic.waited_s
    always = guest_bytes + ledger.held_bytes
    own_slots, rooms = max(occupancy(plan.actions[run.rank]), default=0), sum(map(len, plan.rooms(run.rank).values()))
    predicted = predicted_peak_bytes(plan.actions[run.rank], run.evictions.predicted()) if plan.has_backward else 0
    return {
        "step": run.step,
        "step_s": seconds,
        "peak_bytes": ledger.peak_bytes + always,
        "predicted_peak_bytes": predicted + always,
        "peak_slots": ledger.peak_slots + rooms,
        "predicted_peak_slots": own_slots + rooms if plan.has_backward else 0,
        "evicted_bytes": ledger.evicted_bytes,
        "loaded_bytes": ledger.loaded_bytes,
        "held_bytes": ledger.held_bytes,
        "guest_bytes": guest_bytes,
        "wait_forward_s": waited[Op.WAIT_RECV_F],
        "wait_backward_s": waited[Op.WAIT_RECV_B],
        "wait_send_s": waited[Op.WAIT_SEND_F] + waited[Op.WAIT_SEND_B],
        "wait_evict_s": waited[Op.WAIT_EVICT],
        "wait_load_s": waited[Op.WAIT_LOAD],
    }
