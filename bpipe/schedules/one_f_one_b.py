"""1F1B (PipeDream-Flush; Narayanan et al., arXiv 2104.04473): one forward, one backward, once the pipeline is full.

p = 4 stages, m = 4 microbatches, a column a forward's time; a backward takes two:

rank 0 | F0 F1 F2 F3 .. .. .. .. .. .. B0 b0 .. B1 b1 .. B2 b2 .. B3 b3
rank 1 | .. F0 F1 F2 .. .. .. .. B0 b0 F3 B1 b1 .. B2 b2 .. B3 b3 .. ..
rank 2 | .. .. F0 F1 .. .. B0 b0 F2 B1 b1 F3 B2 b2 .. B3 b3 .. .. .. ..
rank 3 | .. .. .. F0 B0 b0 F1 B1 b1 F2 B2 b2 F3 B3 b3 .. .. .. .. .. ..
"""

from __future__ import annotations

from bpipe.schedules.action import Action, Op

__all__: list[str] = []


def order(num_stages: int, num_microbatches: int) -> list[list[Action]]:
    """The forwards and backwards of each rank: peak min(p-x, m) microbatches on rank x."""
    return [_rank(num_stages, num_microbatches, x) for x in range(num_stages)]


def _rank(p: int, m: int, x: int) -> list[Action]:
    warmup = min(p - 1 - x, m)
    actions = [Action(Op.F, x, i) for i in range(warmup)]
    for i in range(warmup, m):
        actions += [Action(Op.F, x, i), Action(Op.B, x, i - warmup)]
    return actions + [Action(Op.B, x, i) for i in range(m - warmup, m)]
