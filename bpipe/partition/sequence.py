"""Find where to cut a sequence into slices, so that a step takes the least time (Li et al. 2021, TeraPipe, arXiv 2102.07988, 3.3).

With causal attention a token costs more the later it stands, so that slices of equal length differ in cost, and every rank waits
for the longest. Slices of equal cost become shorter towards the end. A slice also costs something for itself (kernels are less
efficient on few tokens), which limits their number.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from math import inf
from operator import add
from typing import Literal, get_args

from bpipe.checks import check_choice, check_count
from bpipe.errors import ConfigurationError
from bpipe.estimate.cut_search import Ends, cheapest

__all__ = ["slice_lengths"]

Order = Literal["seq_1f1b", "tera_pipe"]
SliceCost = Callable[[int, int], float]  # seconds of a slice on a stage, from its length and the context before it, in tokens
Spans = Callable[[int, int], float]  # the same, from the steps of the sequence where it begins and ends

MOST_SLICES = 32


def slice_lengths(
    num_tokens: int,
    cost: SliceCost,
    *,
    num_stages: int,
    num_microbatches: int = 1,
    num_slices: int | None = None,
    order: Order = "seq_1f1b",
    multiple_of: int = 1,
    tolerance: float = 1e-3,
) -> tuple[int, ...]:
    """Cut a sequence into slices that make a step as short as possible.

    In 1F1B's order (`seq_1f1b`) each forward of a slice alternates with the backward of another, so the longest slice sets the
    pace: the step is at most (m*k + p-1) * max. In TeraPipe's order it is m * sum + (p-1) * max.

    Args:
        num_tokens: the length of a sequence.
        cost: `cost(length, context)`: the seconds that one stage takes for a slice of `length` tokens after `context` tokens,
            forward and backward together, including what each slice costs for itself. If stages differ, take the slowest, or the
            maximum of all. `bpipe.profile_slices` measures it: `profile.seconds`.
        num_stages: p.
        num_microbatches: m.
        num_slices: k; default: as many as make the step shortest, at most 32.
        order: the schedule that runs them.
        multiple_of: lengths are multiples of this number of tokens, except the last one; the time to search grows with the square
            of `num_tokens / multiple_of`.
        tolerance: for TeraPipe's order, by how much the longest slice may exceed that of the best solution; 0 for none.

    Returns:
        The tokens of each slice, from the beginning of the sequence on.

    Raises:
        ConfigurationError: a count is not a whole number of at least 1, or there are not enough tokens for the slices.

    Example:
        >>> def attention_is_half(length: int, context: int) -> float:
        ...     return 0.5 * length / 1000 + 0.5 * (2 * context * length + length**2) / 1000**2
        >>> slice_lengths(1000, attention_is_half, num_stages=4, num_slices=4)
        (366, 252, 205, 177)
    """
    counts = {"num_tokens": num_tokens, "num_stages": num_stages, "num_microbatches": num_microbatches, "multiple_of": multiple_of}
    for name, count in (counts if num_slices is None else {**counts, "num_slices": num_slices}).items():
        check_count(name, count)
    check_choice("order", order, get_args(Order))
    steps = -(-num_tokens // multiple_of)
    if num_slices is not None and num_slices > steps:
        raise ConfigurationError(
            f"num_slices={num_slices}: {num_tokens} tokens in multiples of {multiple_of} make at most {steps} slices"
        )
    places = [min(step * multiple_of, num_tokens) for step in range(steps + 1)]

    @cache
    def spans(begin: int, end: int) -> float:
        return cost(places[end] - places[begin], places[begin])

    numbers = range(1, min(steps, MOST_SLICES) + 1) if num_slices is None else (num_slices,)
    if order == "seq_1f1b":
        evenest = cheapest(steps, numbers, lambda _, begin, end: spans(begin, end), max)
        ends = min(evenest.items(), key=lambda one: (num_microbatches * one[0] + num_stages - 1) * one[1][0])[1][1]
    else:
        ends = _shortest(steps, spans, numbers, num_microbatches, num_stages - 1, tolerance)
    return tuple(places[end] - places[begin] for begin, end in pairwise(ends))


def _shortest(steps: int, spans: Spans, numbers: Sequence[int], of_sum: int, of_longest: int, tolerance: float) -> Ends:
    """Return the ends with the least `of_sum * sum + of_longest * longest`.

    For each candidate for the longest slice's cost, a dynamic programme finds the least sum of slices that cost no more.
    """
    table = [[spans(begin, end) if begin < end else inf for end in range(steps + 1)] for begin in range(steps)]

    def least_sum(most: float) -> tuple[float, Ends]:
        """Return the least sum of slices none of which costs more than `most`, and their ends; infinite if there is none."""
        found = cheapest(steps, numbers, lambda _, begin, end: table[begin][end], add, most=most)
        return min(found.values(), key=lambda one: one[0])

    costs = sorted({one for row in table for one in row if one < inf})
    first = bisect_left(costs, True, key=lambda most: least_sum(most)[0] < inf)
    least, chosen = least_sum(inf)
    best = inf
    for most in _apart(costs[first:], tolerance):
        if of_sum * least + of_longest * most / (1 + tolerance) >= best:
            break
        total, ends = least_sum(most)
        step_s = of_sum * total + of_longest * max(spans(*span) for span in pairwise(ends))
        if step_s < best:
            best, chosen = step_s, ends
    return chosen


def _apart(costs: Sequence[float], tolerance: float) -> Iterator[float]:
    """Yield costs in ascending order such that each cost has one that is as high, or higher by the tolerance at most."""
    index = 0
    while index < len(costs):
        index = bisect_right(costs, costs[index] * (1 + tolerance))
        yield costs[index - 1]
