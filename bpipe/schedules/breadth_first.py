"""Breadth-first (Lamy-Poirier, arXiv 2211.05953): each stage of a rank runs all microbatches before the next one does.

So a rank gathers the weights of one stage at a time, each at most twice per step however many microbatches there are.

p = 2 ranks of v = 2 stages, m = 4 microbatches, one column per forward of a stage; a backward takes two:

rank 0 | 0F0 0F1 0F2 0F3 2F0 2F1 2F2 2F3 ..  ..  ..  2B0 2b0 2B1 2b1 2B2 2b2 2B3 2b3 0B0 0b0 0B1 0b1 0B2 0b2 0B3 0b3
rank 1 | ..  1F0 1F1 1F2 1F3 3F0 3F1 3F2 3F3 3B0 3b0 3B1 3b1 3B2 3b2 3B3 3b3 1B0 1b0 1B1 1b1 1B2 1b2 1B3 1b3 ..  ..
"""

from __future__ import annotations

from bpipe.plan.action import Action, Op
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Return each rank's forwards stage by stage, then its backwards in reverse; its last stage keeps its weights in between.

    Each rank does 2v-1 gathers and v reductions.
    """
    return [_lane(num_ranks, num_microbatches, stages_per_rank, x) for x in range(num_ranks)]


def _lane(p: int, m: int, v: int, x: int) -> list[Action]:
    stages = range(x, v * p, p)
    lane: list[Action] = []
    for op, stage in [*((Op.F, s) for s in stages), *((Op.B, s) for s in reversed(stages))]:
        keeps = stage == stages[-1]
        lane += [Action(Op.UNSHARD, stage, 0)] * (op is Op.F or not keeps)
        lane += [Action(op, stage, i) for i in range(m)]
        lane += [Action(Op.RESHARD, stage, 0)] * (op is Op.B or not keeps)
        lane += [Action(Op.REDUCE_GRAD, stage, 0)] * (op is Op.B)
    return lane


RULE = Rule(
    name="breadth_first",
    runs_as="BreadthFirst",
    title="breadth-first (Lamy-Poirier, arXiv 2211.05953)",
    placement=Placement.LOOPED,
    order=order,
    peak=lambda p, m, v, x: m,
    peak_text="m",
    bubble=lambda p, m, v, f, i, w: (p - 1 + (v - 1) * max(0, p - m)) * (f + i + w) / v,
    bubble_text="(p-1)(F+B)/v where m >= p",
)
