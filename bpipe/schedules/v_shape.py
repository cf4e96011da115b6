"""V-Half and V-Min (Qi et al., arXiv 2405.15362): two stages per rank in a V, a half or a third of 1F1B's memory.

A microbatch passes down the ranks and up again, forwards and then backwards, at fixed moments; the next one follows six
units later, in which each rank has its six computations. The slower it passes down, the more microbatches are in flight.

p = 4 ranks, m = 3 microbatches, one column per forward of a stage, as long as `I` and `W`. V-Half:

rank 0 | 0F0 0F1 0F2 ..  ..  ..  ..  7F0 7I0 7W0 ..  7F1 7I1 7F2 7I2 0I0 7W1 7W2 0W0 0I1 0W1 0I2 0W2
rank 1 | ..  1F0 1F1 ..  ..  ..  6F0 1F2 ..  6I0 6F1 6W0 6F2 6I1 1I0 6I2 6W1 1W0 1I1 6W2 1I2 1W1 1W2
rank 2 | ..  ..  2F0 2F1 ..  5F0 ..  ..  2F2 5F1 5I0 5F2 5W0 2I0 5I1 2W0 5I2 2I1 5W1 2I2 5W2 2W1 2W2
rank 3 | ..  ..  ..  3F0 4F0 3F1 4F1 ..  ..  3F2 4F2 4I0 3I0 4W0 3W0 4I1 3I1 4I2 3I2 4W1 3W1 4W2 3W2

V-Min:

rank 0 | 0F0 0F1 ..  ..  ..  ..  ..  7F0 7I0 0F2 7W0 ..  ..  7F1 7I1 0I0 7W1 0W0 ..  7F2 7I2 0I1 7W2 0W1 ..  ..  ..  0I2 0W2
rank 1 | ..  1F0 ..  ..  ..  ..  6F0 1F1 ..  6I0 6W0 ..  6F1 1F2 1I0 6I1 1W0 6W1 6F2 ..  1I1 6I2 1W1 6W2 ..  ..  1I2 1W2 ..
rank 2 | ..  ..  2F0 ..  ..  5F0 ..  ..  2F1 ..  5I0 5F1 5W0 2I0 2F2 2W0 5I1 5F2 5W1 2I1 2W1 ..  5I2 5W2 ..  2I2 2W2 ..  ..
rank 3 | ..  ..  ..  3F0 4F0 ..  ..  ..  ..  3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 ..  ..  4I2 3I2 4W2 3W2 ..  ..

Every order and message is a line, "this runs before that", and lines form cycles from one microbatch to the next, which go through
several ranks. With F = I = W no cycle is longer than what a rank computes; if they differ, the longest cycle sets the pace. So both
suffer from long contexts, whose attention makes I long and W short. ZB-V does not: its cycles never take longer than a rank's work.
"""

from __future__ import annotations

from itertools import accumulate

from bpipe.plan.action import Action, Op
from bpipe.schedules.list_scheduling import with_weights
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []

PERIOD = 6  # F, I and W of two stages


def _order(p: int, m: int, share: int) -> list[list[Action]]:
    """Return an order that takes about 1/share of 1F1B's memory on every rank."""
    moments = _moments(p, share)
    stages = range(2 * p)
    path = [*((Op.F, s) for s in stages), *((Op.I, s) for s in reversed(stages))]
    orders = []
    for x in range(p):
        own = [(moment, op, s) for moment, (op, s) in zip(moments, path) if s in (x, 2 * p - 1 - x)]
        timed = sorted(((moment + PERIOD * i, moment, Action(op, s, i)) for moment, op, s in own for i in range(m)))
        orders.append([action for *_, action in timed])
    return with_weights(orders, Placement.V.flow(p, m, 2), slots=2 * _slots(p, share))


def _moments(p: int, share: int) -> list[int]:
    """Return the times at which a microbatch runs forward on each stage, and then backward on each in reverse.

    It passes down in steps of 6/share - 1 and up in steps of 1. The steps next to the last rank are longer if a rank's
    computations would otherwise fall together within the period.
    """
    longer = (1 - p) % share
    down = [PERIOD // share - 1] * (p - 1)
    up = [1] * (p - 1)
    if p > 1:
        down[-1] += longer
        up[0] += longer
    return list(accumulate([0, *down, 1, *up, 1, *down, 1, *up]))


def _slots(p: int, share: int) -> int:
    return (p + 2 * (share - 1)) // share


def _half_bubble(p: int, m: int, v: int, f: float, i: float, w: float) -> float:
    less = 0 if p % 2 else 1
    return max(p - 1, 3 * p - 4 - 3 * less, 4 * p - 3 - 2 * less - 2 * m, 4 * p - 1 - 4 * m) * f / 2


def _half_period(p: int, f: float, i: float, w: float) -> float:
    """Return the longest cycle of V-Half; F, I and W are those of a rank, twice those of a stage."""
    work = f + i + w
    if p < 3:
        return work
    if p % 2:
        return max(work, 2 * f + w, 2 * i + (w / 2 if p > 3 else 0))
    return max(work, 3 * (f + i) / 2, (4 * f + i + w) / 2, (f + 4 * i) / 2)


def _min_period(p: int, f: float, i: float, w: float) -> float:
    """Return the longest cycle of V-Min. On 3 ranks it is V-Half."""
    return _half_period(p, f, i, w) if p < 4 else max(f + i + w, 3 * f, 3 * i)


V_HALF = Rule(
    name="v_half",
    runs_as="VHalf",
    title="V-Half (Qi et al., arXiv 2405.15362)",
    placement=Placement.V,
    order=lambda p, m, v: _order(p, m, share=2),
    peak=lambda p, m, v, x: min(_slots(p, 2), m),
    peak_text="min(floor((p+2)/2), m)",
    bubble=_half_bubble,
    bubble_text="at most (3p-4)F/2 where F = I = W and m >= p",
    period=_half_period,
)

V_MIN = Rule(
    name="v_min",
    runs_as="VMin",
    title="V-Min (Qi et al., arXiv 2405.15362)",
    placement=Placement.V,
    order=lambda p, m, v: _order(p, m, share=3),
    peak=lambda p, m, v, x: min(_slots(p, 3), m),
    peak_text="min(floor((p+4)/3), m)",
    bubble=lambda p, m, v, f, i, w: max(p - 1, 4 * p - 5) * f / 2,
    bubble_text="at most (4p-5)F/2 where F = I = W",
    period=_min_period,
)
