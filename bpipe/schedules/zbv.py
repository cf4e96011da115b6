"""ZBV (Qi et al., arXiv 2401.10241, 6): two stages per rank in a V, so that no rank waits between its first and last computation.

This needs 2p-1 microbatches.

p = 4 ranks, m = 4 microbatches, one column per forward of a stage, as long as `I` and `W`:

rank 0 | 0F0 0F1 0F2 0F3 ..  ..  ..  7F0 7I0 7F1 7I1 7F2 7I2 7F3 7I3 0I0 7W0 0I1 7W1 0I2 7W2 0I3 7W3 0W0 0W1 0W2 0W3
rank 1 | ..  1F0 1F1 1F2 1F3 ..  6F0 ..  6F1 6I0 6F2 6I1 6F3 6I2 1I0 6I3 1I1 6W0 1I2 6W1 1I3 6W2 1W0 6W3 1W1 1W2 1W3
rank 2 | ..  ..  2F0 2F1 2F2 5F0 2F3 5F1 ..  5F2 5I0 5F3 5I1 2I0 5I2 2I1 5I3 2I2 5W0 2I3 5W1 2W0 5W2 2W1 5W3 2W2 2W3
rank 3 | ..  ..  ..  3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 3I0 4I1 3I1 4I2 3I2 4I3 3I3 4W0 3W0 4W1 3W1 4W2 3W2 4W3 3W3
"""

from __future__ import annotations

from bpipe.plan.action import Action, Op
from bpipe.schedules.list_scheduling import numbered, with_weights
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int = 2) -> list[list[Action]]:
    """Return each rank's F and I in a fixed order, with W where it would wait: peak min(p, m)."""
    lanes = [_lane(num_ranks, num_microbatches, x) for x in range(num_ranks)]
    return with_weights(lanes, Placement.V.flow(num_ranks, num_microbatches, 2), slots=2 * num_ranks)


def _lane(p: int, m: int, x: int) -> list[Action]:
    """Return rank x's F and I: those of its longest warm-up, without the microbatches that do not exist."""
    down, up = x, 2 * p - 1 - x
    f0, f1, i1, i0 = (Op.F, down), (Op.F, up), (Op.I, up), (Op.I, down)
    warmup = [f0] * (up - x) + [f1, f0] * x + [f1, i1] * (p - x)
    steady = [f0, i0, f1, i1] * (m - up) + [i0, f1, i1] * (p - 1 - x)
    ending = [i0, i1] * x + [i0] * (p - x)
    return [action for action in numbered([*warmup, *steady, *ending]) if action.microbatch < m]


RULE = Rule(
    name="zbv",
    runs_as="ZBV",
    title="ZBV (Qi et al., arXiv 2401.10241)",
    placement=Placement.V,
    order=order,
    peak=lambda p, m, v, x: min(p, m),
    peak_text="min(p, m)",
    bubble=lambda p, m, v, f, i, w: max(p - 1, 3 * p - 1 - 2 * m, 4 * p - 1 - 4 * m) * f / 2,
    bubble_text="(p-1)F/2 where F = I = W and m >= p; none of it amid a rank's work where m >= 2p-1",
)
