"""Where to cut a chain of layers into stages, quickly: for the slowest rank, and so that ranks have room for what is static."""

from __future__ import annotations

from bpipe.estimate.cut_search import Cost, Ends, improved, most_alike, narrowest, pieces
from bpipe.estimate.layers import Chain
from bpipe.passes.fit import Budgets

__all__: list[str] = []


def cuts_of(chain: Chain, stage_ranks: tuple[int, ...], budgets: Budgets) -> tuple[Ends, ...]:
    """Return the cuts to choose from, at most two: the one for time, and another for memory, if early ranks hold too much else.

    The slowest rank computes as briefly as is found for a microbatch, then the slowest stage, and then stages are alike, of the
    cuts that leave each rank room for its static bytes and one microbatch, if there are such. The other cut counts p - x
    microbatches on rank x, as 1F1B holds them if nothing is done about it.
    """
    n, s, p = len(chain), len(stage_ranks), max(stage_ranks) + 1
    if n < s:
        return ()
    first = _Cut(chain, stage_ranks, budgets, (1,) * p).found()
    if s > p:
        return (first,)
    roomy = _Cut(chain, stage_ranks, budgets, tuple(p - rank for rank in range(p)))
    if not roomy.excess(first):
        return (first,)
    second = roomy.found()
    return (first,) if second == first or roomy.excess(second) else (first, second)


class _Cut:
    """The search for a cut, if each rank holds some microbatches."""

    def __init__(self, chain: Chain, stage_ranks: tuple[int, ...], budgets: Budgets, held: tuple[int, ...]) -> None:
        self._chain, self._stage_ranks, self._budgets, self._held = chain, stage_ranks, budgets, held

    def found(self) -> Ends:
        n, s = len(self._chain), len(self._stage_ranks)
        starts = [most_alike(n, s, self._seconds), narrowest(n, s, self._seconds, self._fits), narrowest(n, s, self._bytes)]
        return improved([start for start in starts if start is not None], self._score, num_kicks=0)

    def excess(self, ends: Ends) -> float:
        """Return by how many bytes ranks exceed their budgets."""
        needed = self._of_ranks(ends, self._bytes)
        return sum(max(0.0, most - budget) for most, budget in zip(needed, self._budgets) if budget is not None)

    def _score(self, ends: Ends) -> tuple[float, ...]:
        of_stage = [self._chain.seconds(*piece) for piece in pieces(ends)]
        of_rank = self._of_ranks(ends, self._seconds)
        slowest = (float(f"{max(seconds):.9g}") for seconds in (of_rank, of_stage))  # without rounding errors
        return self.excess(ends), *slowest, sum(seconds * seconds for seconds in of_stage)

    def _of_ranks(self, ends: Ends, cost: Cost) -> list[float]:
        of_rank = [0.0] * len(self._budgets)
        for stage, (rank, piece) in enumerate(zip(self._stage_ranks, pieces(ends))):
            of_rank[rank] += cost(stage, *piece)
        return of_rank

    def _seconds(self, stage: int, start: int, end: int) -> float:
        return self._chain.seconds(start, end)

    def _bytes(self, stage: int, start: int, end: int) -> float:
        return self._chain.static_bytes(start, end) + self._held[self._stage_ranks[stage]] * self._chain.saved_bytes(start, end)

    def _fits(self, stage: int, start: int, end: int) -> bool:
        budget = self._budgets[self._stage_ranks[stage]]
        return budget is None or self._bytes(stage, start, end) <= budget
