"""1F1B (PipeDream-Flush; Narayanan et al., arXiv 2104.04473): one forward, one backward, once the pipeline is full.

p = 4 stages, m = 4 microbatches, one column per forward's time; a backward takes two:

rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 .. B1 b1 .. B2 b2 .. B3 b3
rank 1 | .. F0 F1 F2 .. .. .. .. B0 b0 F3 B1 b1 .. B2 b2 .. B3 b3 .. ..
rank 2 | .. .. F0 F1 .. .. B0 b0 F2 B1 b1 F3 B2 b2 .. B3 b3 .. .. .. ..
rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. .. .. .. ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from bpipe.passes.balance.balance import default_slots
from bpipe.plan.action import Action, Op
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return each rank's forwards and backwards: peak min(p-x, m) microbatches on rank x."""
    return [_lane(num_ranks, num_microbatches, x) for x in range(num_ranks)]


def _lane(p: int, m: int, x: int) -> list[Action]:
    forwards, backwards = ([Action(op, x, i) for i in range(m)] for op in (Op.F, Op.B))
    return alternate(forwards, backwards, warmup=p - 1 - x)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warmup: int) -> list[Action]:
    """Return `warmup` forwards, then a forward and a backward in turn, then the backwards that remain."""
    warmup = min(warmup, len(forwards))
    lane = list(forwards[:warmup])
    for pair in zip(forwards[warmup:], backwards):
        lane += pair
    return lane + list(backwards[len(forwards) - warmup :])


RULE = Rule(
    name="1f1b",
    runs_as="OneFOneB",
    title="1F1B (Narayanan et al., arXiv 2104.04473)",
    placement=Placement.ONE,
    order=order,
    peak=lambda p, m, v, x: min(p - x, m),
    peak_text="min(p-x, m)",
    bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    bubble_text="(p-1)(F+B)",
)

BALANCED = replace(
    RULE,
    name="balanced_1f1b",
    runs_as="BalancedOneFOneB",
    title="BPipe (Kim et al., ICML 2023)",
    peak=lambda p, m, v, x: min(default_slots(p), p, m),
    peak_text="ceil((p+2)/2) at most",
    bubble_text="(p-1)(F+B), transfers hidden",
    slots=default_slots,
)
