"""The paper's steady state (BPipe, Kim et al., ICML 2023): one eviction with each forward, one load with each backward."""

from __future__ import annotations

from bpipe.passes.balance.greedy import Eviction
from bpipe.passes.balance.insert_evictions import insert_evictions
from bpipe.passes.balance.rank_steps import Part, RankSteps
from bpipe.plan.action import BACKWARD, Op
from bpipe.plan.meter import occupancy

__all__: list[str] = []


def evict_eagerly(rank: RankSteps, limit: int, peer: int) -> tuple[list[Eviction], int] | str:
    """Evict the youngest microbatch with each forward while a rank is full, and load the oldest with each backward.

    Returns:
        The evictions, and the rank's peak with them; or why they cannot keep it within its limit.
    """
    evictions: list[Eviction] = []
    forwards: list[Part] = []
    remote: list[tuple[Part, int]] = []
    for t, action in ((t, action) for t, actions in enumerate(rank.steps) for action in actions):
        if action.op is Op.F:
            if len(forwards) >= limit - 1 and forwards:
                remote.append((forwards[-1], t))
            forwards.append(action.part_key)
        elif action.op in BACKWARD and remote:
            which, start = remote.pop(0)
            evictions.append(Eviction(which, 1, peer, start, _next(rank, start), t, _next(rank, t)))
    if remote:
        stage, microbatch, _ = remote[0][0]
        return f"evicts {stage}F{microbatch} and has no backward left during which to load it"
    peak = max(occupancy(insert_evictions(rank, evictions)), default=0)
    late = next((e for e in evictions if e.back > rank.stays[e.which].needed), None)
    unsent = next((e for e in evictions if e.left < rank.stays[e.which].leaves), None)
    if peak > limit or late is not None or unsent is not None:
        why = "" if late is None else f" and loads {late.which[0]}F{late.which[1]} too late"
        why += "" if unsent is None else f" and empties {unsent.which[0]}F{unsent.which[1]} before its output has arrived"
        return f"evicting eagerly occupies {peak}{why}"
    return evictions, peak


def _next(rank: RankSteps, step: int) -> int:
    """Return the next step that computes."""
    return next((t for t in range(step + 1, len(rank.steps)) if rank.steps[t]), len(rank.steps))
