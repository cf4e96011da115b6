"""ZB-H1 and ZB-H2 (Qi et al., arXiv 2401.10241): backwards are split into I and W, and W runs where a rank would wait.

p = 4 stages, m = 7 microbatches, one column per forward's time, as long as `I` and `W`. ZB-H1:

rank 0 | F0 F1 F2 F3 .. .. .. I0 W0 F4 I1 W1 F5 I2 W2 F6 I3 W3 I4 W4 I5 W5 I6 W6
rank 1 | .. F0 F1 F2 .. .. I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 F6 I4 W3 I5 W4 I6 W5 W6
rank 2 | .. .. F0 F1 .. I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 F6 I5 W3 I6 W4 W5 W6
rank 3 | .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 F6 I6 W3 W4 W5 W6

ZB-H2 warms up with up to twice as many forwards; no rank waits between its first and its last computation if m >= 2p-1:

rank 0 | F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .. .. ..
rank 1 | .. F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .. ..
rank 2 | .. .. F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 ..
rank 3 | .. .. .. F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6

Interleaved, with v = 2 stages per rank, p = 2 and m = 4, in the same order as torch's ScheduleInterleavedZeroBubble:

rank 0 | 0F0 0F1 2F0 2F1 ..  2I0 2W0 0F2 2I1 2W1 0F3 0I0 0W0 2F2 0I1 0W1 2F3 2I2 2W2 2I3 2W3 0I2 0W2 0I3 0W3
rank 1 | ..  1F0 1F1 3F0 3I0 3F1 3I1 3W0 1F2 1I0 3W1 1F3 1I1 1W0 3F2 3I2 1W1 3F3 3I3 3W2 1I2 3W3 1I3 1W2 1W3
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from bpipe.plan.action import Action, Op
from bpipe.schedules.interleaved import EQUAL_ROUNDS, at_once, in_equal_rounds, turns
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []

Unit = tuple[int, int]  # a stage and a microbatch


def order_h1(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return 1F1B with W actions that lag x microbatches behind on rank x: every rank holds min(p, m)."""
    return [_lane(num_microbatches, x, warmup=num_ranks - 1 - x, lag=x) for x in range(num_ranks)]


def order_h2(num_ranks: int, num_microbatches: int, stages_per_rank: int = 1) -> list[list[Action]]:
    """Return ZB-H1 with up to twice its warm-up and lag, as far as there are microbatches: every rank holds min(2p-1, m)."""
    p, more = num_ranks, max(0, num_microbatches - num_ranks)
    warmups, lags = ([n + min(n, more) for n in ns] for ns in (range(p - 1, -1, -1), range(p)))
    return [_lane(num_microbatches, x, warmups[x], lags[x]) for x in range(p)]


def _lane(m: int, x: int, warmup: int, lag: int) -> list[Action]:
    units = [(x, i) for i in range(m)]
    return _alternate(units, units, warmup, lag)


def _alternate(forwards: Sequence[Unit], backwards: Sequence[Unit], warmup: int, lag: int) -> list[Action]:
    """Return a lane of forwards, of I that begin `warmup` forwards later, and of W that begin `lag` I later."""
    lane: list[Action] = []
    for i in range(-warmup, len(forwards) + lag):
        columns = ((Op.F, forwards, i + warmup), (Op.I, backwards, i), (Op.W, backwards, i - lag))
        lane += [Action(op, *units[at]) for op, units, at in columns if 0 <= at < len(units)]
    return lane


def order_interleaved(num_ranks: int, num_microbatches: int, stages_per_rank: int) -> list[list[Action]]:
    """Return interleaved 1F1B with half its longest warm-up, and with W actions that lag x computations behind on rank x."""
    p, m, v = num_ranks, num_microbatches, stages_per_rank
    lanes = []
    for x in range(p):
        forwards = [(chunk * p + x, i) for chunk, i in turns(p, m, v)]
        backwards = [((v - 1 - chunk) * p + x, i) for chunk, i in turns(p, m, v)]
        warmup = min(p - 1 - x + (v - 1) * at_once(p, m), m * v)
        lanes.append(_alternate(forwards, backwards, warmup, lag=x))
    return lanes


H1 = Rule(
    name="zb_h1",
    runs_as="ZBH1",
    title="ZB-H1 (Qi et al., arXiv 2401.10241)",
    placement=Placement.ONE,
    order=order_h1,
    peak=lambda p, m, v, x: min(p, m),
    peak_text="min(p, m)",
    bubble=lambda p, m, v, f, i, w: (p - 1) * (f + i) - (min(p, m) - 1) * w,
    bubble_text="(p-1)(F+I-W) where m >= p, W <= F and W <= I",
)

H2 = Rule(
    name="zb_h2",
    runs_as="ZBH2",
    title="ZB-H2 (Qi et al., arXiv 2401.10241)",
    placement=Placement.ONE,
    order=order_h2,
    peak=lambda p, m, v, x: min(2 * p - 1, m),
    peak_text="min(2p-1, m)",
    bubble=lambda p, m, v, f, i, w: max(p - 1, 2 * p - 1 - m) * f,
    bubble_text="(p-1)F where F = I = W and m >= p; none of it amid a rank's work where m >= 2p-1",
)

# In the long run a rank waits if a forward takes longer than either half of a backward, for which `period` has no formula.
INTERLEAVED = Rule(
    name="interleaved_zb",
    runs_as="InterleavedZeroBubble",
    title="interleaved zero bubble (Qi et al., arXiv 2401.10241, with stages as in arXiv 2104.04473)",
    placement=Placement.LOOPED,
    order=order_interleaved,
    peak=lambda p, m, v, x: Fraction(min((v - 1) * at_once(p, m) + p, m * v), v),
    peak_text="min(p, m) where p divides m",
    bubble=lambda p, m, v, f, i, w: ((p - 1) * (f + i - w) + max(0, (p - m) * v, (2 * p - 3 * m) * v + 2 * m - p) * f) / v,
    bubble_text="(p-1)(F+I-W)/v where F = I = W and m >= p",
    allows=in_equal_rounds,
    allows_text=EQUAL_ROUNDS,
)
