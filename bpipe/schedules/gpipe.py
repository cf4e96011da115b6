"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards.

p = 4 stages, m = 4 microbatches, one column per forward's time; a backward takes two:

rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 b0 B1 b1 B2 b2 B3 b3
rank 1 | .. F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 B1 b1 B2 b2 B3 b3 .. ..
rank 2 | .. .. F0 F1 F2 F3 .. .. .. B0 b0 B1 b1 B2 b2 B3 b3 .. .. .. ..
rank 3 | .. .. .. F0 F1 F2 F3 B0 b0 B1 b1 B2 b2 B3 b3 .. .. .. .. .. ..
"""

from __future__ import annotations

from bpipe.plan.action import Action, Op
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return each rank's forwards, then its backwards: peak m microbatches on each."""
    microbatches = range(num_microbatches)
    return [[Action(op, x, i) for op in (Op.F, Op.B) for i in microbatches] for x in range(num_ranks)]


RULE = Rule(
    name="gpipe",
    runs_as="GPipe",
    title="GPipe (Huang et al., arXiv 1811.06965)",
    placement=Placement.ONE,
    order=order,
    peak=lambda p, m, v, x: m,
    peak_text="m",
    bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w),
    bubble_text="(p-1)(F+B)",
)
