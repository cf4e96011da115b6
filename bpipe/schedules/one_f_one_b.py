"""1F1B (PipeDream-Flush; Narayanan et al., arXiv 2104.04473): one forward, one backward, once the pipeline is full.

p = 4 stages, m = 4 microbatches, one column per forward's time; a backward takes two:

rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 .. B1 b1 .. B2 b2 .. B3 b3
rank 1 | .. F0 F1 F2 .. .. .. .. B0 b0 F3 B1 b1 .. B2 b2 .. B3 b3 .. ..
rank 2 | .. .. F0 F1 .. .. B0 b0 F2 B1 b1 F3 B2 b2 .. B3 b3 .. .. .. ..
rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. .. .. .. ..

Seq1F1B (Sun et al., arXiv 2406.03488) is the same over slices of a sequence. m = 2 microbatches of k = 2 slices, one column per
forward of a slice:

rank 0 | F0/0 F0/1 F1/0 F1/1 ..   ..   ..   ..   ..   ..   ..   B0/1 b0/1 ..   B0/0 b0/0 ..   B1/1 b1/1 B1/0 b1/0
rank 1 | ..   F0/0 F0/1 F1/0 F1/1 ..   ..   ..   ..   B0/1 b0/1 ..   B0/0 b0/0 ..   B1/1 b1/1 B1/0 b1/0 ..   ..
rank 2 | ..   ..   F0/0 F0/1 F1/0 ..   ..   B0/1 b0/1 F1/1 B0/0 b0/0 ..   B1/1 b1/1 B1/0 b1/0 ..   ..   ..   ..
rank 3 | ..   ..   ..   F0/0 F0/1 B0/1 b0/1 F1/0 B0/0 b0/0 F1/1 B1/1 b1/1 B1/0 b1/0 ..   ..   ..   ..   ..   ..

Local learning (PPLL, arXiv 2411.12780) needs no forwards first, because no gradient comes from the next stage. m = 4:

rank 0 | F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. ..
rank 1 | .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. ..
rank 2 | .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 ..
rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

from bpipe.passes.balance.balance import default_slots
from bpipe.plan.action import Action, Op
from bpipe.plan.order import backward_units
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1, slices: int = 1) -> list[list[Action]]:
    """Return each rank's forwards and backwards: peak min(p-x, m) microbatches on rank x, or min(k+p-1-x, k*m) slices.

    Of slices, k-1 more run forward first, because the backwards of a microbatch begin with its last slice.
    """
    return [_lane(num_ranks, num_microbatches, x, slices) for x in range(num_ranks)]


def _lane(p: int, m: int, x: int, k: int) -> list[Action]:
    forwards = [Action(Op.F, x, unit) for unit in range(m * k)]
    backwards = [Action(Op.B, x, unit) for unit in backward_units(m, k)]
    return alternate(forwards, backwards, warmup=p - 1 - x + k - 1)


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


def _seq_1f1b(k: int = 1) -> Rule:
    return Rule(
        name="seq_1f1b",
        runs_as="Seq1F1B",
        title="Seq1F1B (Sun et al., arXiv 2406.03488)",
        placement=Placement.ONE,
        order=partial(order, slices=k),
        peak=lambda p, m, v, x: Fraction(min(k + p - 1 - x, m * k), k),
        peak_text="min((k+p-1-x)/k, m)",
        bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i + w) / k,
        bubble_text="(p-1)(F+B)/k",
        slices=k,
        sliced=_seq_1f1b,
    )


SEQ_1F1B = _seq_1f1b()

LOCAL_LEARNING = Rule(
    name="local_learning",
    runs_as="LocalLearning",
    title="local learning (PPLL, arXiv 2411.12780)",
    placement=Placement.ONE,
    order=lambda p, m, v: [[Action(op, x, unit) for unit in range(m) for op in (Op.F, Op.B)] for x in range(p)],
    peak=lambda p, m, v, x: 1,
    peak_text="1",
    bubble=lambda p, m, v, f, i, w: (p - 1) * f,
    bubble_text="(p-1)F",
    local=True,
)
