"""Find where to cut a chain of layers: exactly if each stage counts by itself, else by local search from good cuts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations, pairwise
from math import comb, inf
from random import Random

__all__: list[str] = []

Ends = tuple[int, ...]  # 0, where each later stage begins, and the number of layers
Cost = Callable[[int, int, int], float]  # of a stage that has the layers from one to before another
Score = Callable[[Ends], tuple[float, ...]]  # the less, the better

MOST_TRIED = 5000  # ways to cut that are all tried, one by one
NUM_KICKS, KICKED = 24, 3
MOST_SCORED = 20_000  # scores after which there is no further kick
LONGEST_BLOCK = 8


def cheapest(
    num_layers: int,
    numbers: Sequence[int],
    cost: Cost,
    joined: Callable[[float, float], float],
    *,
    of_none: float = 0.0,
    most: float = inf,
) -> dict[int, tuple[float, Ends]]:
    """Cut into each of some numbers of stages so that what their costs come to together is the least, by dynamic programming.

    best[end] is the least that the stages so far come to if they have the layers before `end`: the minimum of
    joined(best[start], cost(stage, start, end)) over all starts.

    Args:
        cost: `cost(stage, start, end)`; infinite where a stage may not have these layers.
        joined: what stages come to together with one more stage, at least as much as before: `max`, or a sum.
        of_none: what no stages come to.
        most: what a stage may cost.

    Returns:
        By the number of stages, what they come to, and the ends; infinite if there is no such cut.
    """
    best = [of_none, *[inf] * num_layers]
    choices: list[list[int]] = []
    found: dict[int, tuple[float, Ends]] = {}
    for stage in range(max(numbers)):
        lowest, chosen = [inf] * (num_layers + 1), [0] * (num_layers + 1)
        following = min(number for number in numbers if number > stage) - stage - 1  # each of these needs a layer, too
        for end in range(stage + 1, num_layers - following + 1):
            low = inf
            for begin in range(stage, end):
                before = best[begin]
                if before < low and (one := cost(stage, begin, end)) <= most and (total := joined(before, one)) < low:
                    low, chosen[end] = total, begin
            lowest[end] = low
        best = lowest
        choices.append(chosen)
        if stage + 1 in numbers:
            ends = [num_layers]
            for starts in reversed(choices):
                ends.append(starts[ends[-1]])
            found[stage + 1] = best[num_layers], tuple(reversed(ends))
    return found


def narrowest(num_layers: int, num_stages: int, cost: Cost, fits: Callable[[int, int, int], bool] | None = None) -> Ends | None:
    """Cut so that the most expensive stage costs as little as possible; None where no cut has stages that all fit."""

    def where_it_fits(stage: int, start: int, end: int) -> float:
        return cost(stage, start, end) if fits is None or fits(stage, start, end) else inf

    dearest, ends = cheapest(num_layers, [num_stages], where_it_fits, max, of_none=-inf)[num_stages]
    return None if dearest == inf else ends


def most_alike(num_layers: int, num_stages: int, cost: Cost) -> Ends:
    """Cut so that stages cost as much as each other: the sum of the squares of their costs is minimal."""
    return cheapest(num_layers, [num_stages], cost, lambda total, one: total + one**2)[num_stages][1]


def best_of_all(num_layers: int, num_stages: int, score: Score) -> Ends | None:
    """Return the best of all ways to cut, or None if there are too many to try."""
    if comb(num_layers - 1, num_stages - 1) > MOST_TRIED:
        return None
    return min(every_cut(num_layers, num_stages), key=score)


def every_cut(num_layers: int, num_stages: int) -> Iterator[Ends]:
    """Yield every way to cut."""
    return ((0, *inner, num_layers) for inner in combinations(range(1, num_layers), num_stages - 1))


def improved(starts: Iterable[Ends], score: Score, num_kicks: int = NUM_KICKS) -> Ends:
    """Move cuts, one or several neighbouring ones together, as long as that is better; then again from randomly moved cuts.

    The result is the same for the same arguments, on every rank.
    """
    num_scored = 0

    def counted(ends: Ends) -> tuple[float, ...]:
        nonlocal num_scored
        num_scored += 1
        return score(ends)

    best = min((_descended(start, counted) for start in starts), key=score)
    random = Random(0)
    for _ in range(num_kicks):
        if num_scored > MOST_SCORED:
            break
        best = min(best, _descended(_kicked(best, random), counted), key=score)
    return best


def _descended(ends: Ends, score: Score) -> Ends:
    reached = score(ends)
    while True:
        better = min(_moved(ends), key=score, default=ends)
        if score(better) >= reached:
            return ends
        ends, reached = better, score(better)


def _moved(ends: Ends) -> Iterator[Ends]:
    """Yield the cuts with a block of neighbouring ones moved by a layer, or one moved by two."""
    last = len(ends) - 1
    for first in range(1, last):
        for after in range(first + 1, min(last, first + LONGEST_BLOCK) + 1):
            for by in (-1, 1, -2, 2) if after == first + 1 else (-1, 1):
                moved = (*ends[:first], *(end + by for end in ends[first:after]), *ends[after:])
                if moved[first - 1] < moved[first] and moved[after - 1] < moved[after]:
                    yield moved


def _kicked(ends: Ends, random: Random) -> Ends:
    """Return the cuts after some random moves."""
    for _ in range(KICKED):
        moves = list(_moved(ends))
        ends = random.choice(moves) if moves else ends
    return ends


def even(num_layers: int, num_stages: int) -> Ends:
    """Return the cuts that give every stage the same number of layers, or one more."""
    return tuple(num_layers * stage // num_stages for stage in range(num_stages + 1))


def pieces(ends: Ends) -> Sequence[tuple[int, int]]:
    """Return the first layer of each stage, and the first one after it."""
    return list(pairwise(ends))
