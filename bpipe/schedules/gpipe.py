"""GPipe (Huang et al., arXiv 1811.06965): all forwards, then all backwards; TeraPipe is the same over slices of a sequence.

p = 4 stages, m = 4 microbatches, one column per forward's time; a backward takes two:

rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. .. .. .. B0 b0 B1 b1 B2 b2 B3 b3
rank 1 | .. F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 B1 b1 B2 b2 B3 b3 .. ..
rank 2 | .. .. F0 F1 F2 F3 .. .. .. B0 b0 B1 b1 B2 b2 B3 b3 .. .. .. ..
rank 3 | .. .. .. F0 F1 F2 F3 B0 b0 B1 b1 B2 b2 B3 b3 .. .. .. .. .. ..

TeraPipe (Li et al., arXiv 2102.07988) with m = 2 microbatches of k = 2 slices, one column per forward of a slice:

rank 0 | F0/0 F0/1 F1/0 F1/1 ..   ..   ..   ..   ..   ..   ..   ..   ..   B0/1 b0/1 B0/0 b0/0 B1/1 b1/1 B1/0 b1/0
rank 1 | ..   F0/0 F0/1 F1/0 F1/1 ..   ..   ..   ..   ..   ..   B0/1 b0/1 B0/0 b0/0 B1/1 b1/1 B1/0 b1/0 ..   ..
rank 2 | ..   ..   F0/0 F0/1 F1/0 F1/1 ..   ..   ..   B0/1 b0/1 B0/0 b0/0 B1/1 b1/1 B1/0 b1/0 ..   ..   ..   ..
rank 3 | ..   ..   ..   F0/0 F0/1 F1/0 F1/1 B0/1 b0/1 B0/0 b0/0 B1/1 b1/1 B1/0 b1/0 ..   ..   ..   ..   ..   ..
"""

from __future__ import annotations

from functools import partial

from bpipe.plan.action import Action, Op
from bpipe.plan.order import backward_units
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1, slices: int = 1) -> list[list[Action]]:
    """Return each rank's forwards, then its backwards: peak m microbatches on each."""
    forwards = [(Op.F, unit) for unit in range(num_microbatches * slices)]
    backwards = [(Op.B, unit) for unit in backward_units(num_microbatches, slices)]
    return [[Action(op, x, unit) for op, unit in forwards + backwards] for x in range(num_ranks)]


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


def _tera_pipe(k: int = 1) -> Rule:
    return Rule(
        name="tera_pipe",
        runs_as="TeraPipe",
        title="TeraPipe (Li et al., arXiv 2102.07988)",
        placement=Placement.ONE,
        order=partial(order, slices=k),
        peak=lambda p, m, v, x: m,
        peak_text="m",
        bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / k,
        bubble_text="(p-1)(F+B)/k",
        slices=k,
        sliced=_tera_pipe,
    )


TERA_PIPE = _tera_pipe()
