"""Where a transformer's sequence is cut into slices that cost the same."""

from __future__ import annotations

from itertools import pairwise
from math import sqrt

__all__: list[str] = []


def even_shares(attention: float, slices: int) -> list[float]:
    """Return the share of the sequence in each slice, if causal attention takes a share of a forward and all slices cost the same.

    The first part x of a sequence costs (1-a)x + ax^2 of all of it, which is s/k where slice s begins. `slice_lengths` in
    `bpipe.partition` finds the same for any cost.

    Example:
        >>> [round(share, 3) for share in even_shares(0.5, 4)]
        [0.366, 0.252, 0.205, 0.177]
    """
    a, b = attention, 1 - attention
    begins = [s / slices if a == 0 else (sqrt(b * b + 4 * a * s / slices) - b) / (2 * a) for s in range(slices)]
    return [end - begin for begin, end in pairwise([*begins, 1.0])]
