"""Links other than the given one: what balancing would gain over an unlimited link, and at which bandwidth the gain begins."""

from __future__ import annotations

from collections.abc import Sequence

from bpipe.estimate.advice import Candidate
from bpipe.estimate.evaluate import Evaluator

__all__: list[str] = []

HALVINGS = 8  # of an octave: 1 part in 250
FIRST_BYTES_PER_S, MOST_BYTES_PER_S = 1e9, 1e16


def fastest(evaluator: Evaluator, candidates: Sequence[Candidate], bytes_per_s: float) -> tuple[Candidate, float]:
    """Return the fastest candidate over a link, and the seconds of its step; of equally fast ones, the first."""
    steps = [evaluator.step_s(one, bytes_per_s) for one in candidates]
    return candidates[steps.index(min(steps))], min(steps)


def breaks_even(evaluator: Evaluator, plain: Sequence[Candidate], balanced: Sequence[Candidate]) -> float | None:
    """Find the least bandwidth at which one of the balanced candidates takes no longer than any plain one, over the same link."""

    def pays(bytes_per_s: float) -> bool:
        return fastest(evaluator, balanced, bytes_per_s)[1] <= fastest(evaluator, plain, bytes_per_s)[1]

    high = balanced[0].hides_at_bytes_per_s or FIRST_BYTES_PER_S
    while not pays(high):
        high *= 2
        if high > MOST_BYTES_PER_S:
            return None
    low = high / 2
    while low > 1 and pays(low):
        low, high = low / 2, low
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high
