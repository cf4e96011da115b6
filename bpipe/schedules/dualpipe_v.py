"""DualPipeV (DeepSeek's DualPipe, arXiv 2412.19437, cut in half): two stages per rank in a V, forwards paired with backwards.

The original runs a forward side by side with a backward of the other stage: `overlapped=True` makes these pairs, the same as
torch.distributed.pipelining's; without it they run one after the other.

p = 2 ranks, m = 4 microbatches, one column per forward of a stage; a backward takes two, its passes `I` and `W` one each:

rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3b1 3F2 0B0 0b0 3B2 3b2 3F3 ..  0B1 0b1 3B3 3b3 0I2 0W2 0I3 0W3
rank 1 | ..  1F0 2F0 1F1 2F1 1F2 2B0 2b0 2F2 1B0 1b0 1F3 2B1 2b1 2F3 1B1 1b1 2B2 2b2 1B2 1b2 2I3 1I3 2W3 1W3
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from bpipe.plan.action import Action, MicrobatchKey, Op
from bpipe.schedules.list_scheduling import Step, numbered
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Return each rank's computations: backwards are whole, but split where the pipeline fills and drains; peak p + 1/2."""
    return [list(numbered(_steps(num_ranks, num_microbatches, x))) for x in range(num_ranks)]


def _steps(p: int, m: int, x: int) -> list[Step]:
    """Return DualPipe's eight phases on rank x; each W runs for the oldest microbatch that waits for one."""
    down, up = x, 2 * p - 1 - x
    later = p - 1 - x  # ranks
    f0, b0, i0, f1, b1, i1 = ((op, stage) for stage in (down, up) for op in (Op.F, Op.B, Op.I))
    w = (Op.W, down)
    filling = [f0] * (2 * later) + [f0, f1] * (x + 1) + [i1, w, f1] * later
    steady = [f0, b1, f1, b0] * (m - 2 * p + x + 1) + [b1, f1, b0] * later
    draining = ([b1, b0] * (x + 1))[: x + 1] + ([i1, i0] * (x + 1))[x + 1 :]
    return [*filling, *steady, *draining, *[w, i0] * later, *[w] * (x + 1)]


def _pairs(p: int, m: int, v: int) -> frozenset[MicrobatchKey]:
    """Return the forwards that DualPipe runs beside a backward: those of its steady phases, but for the last rank's first one.

    That one would make the backward behind it, for which all other ranks wait, end later.
    """
    lanes = order(p, m)
    pairs = [two for lane in lanes for two in pairwise(lane) if (two[0].op, two[1].op) == (Op.F, Op.B)]
    first = next((forward for forward, _ in pairs if forward.stage == p - 1), None)
    return frozenset(forward.key for forward, _ in pairs if forward is not first)


_RULE = Rule(
    name="dualpipe_v",
    runs_as="DualPipeV",
    title="DualPipeV (DeepSeek-AI, arXiv 2412.19437)",
    placement=Placement.V,
    order=order,
    peak=lambda p, m, v, x: p + Fraction(1, 2),
    peak_text="p + 1/2",
    bubble=lambda p, m, v, f, i, w: (p - 1) * f / 2,
    bubble_text="(p-1)F/2 where F = I = W",
    allows=lambda p, m: m >= 2 * p,
    allows_text="2p or more",
)

RULE = replace(_RULE, overlapped=replace(_RULE, pairs=_pairs, bubble=None, bubble_text="not given"))
