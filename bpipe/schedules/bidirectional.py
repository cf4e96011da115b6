"""Two pipelines in opposite directions: Chimera (Li and Hoefler, arXiv 2107.06925) and BitPipe (Wu et al., arXiv 2410.19367).

Every stage of the model exists twice. Even microbatches pass stages 0 to S-1, which go down the ranks (in BitPipe in a V: down and
up again); odd ones pass their twins, stages S to 2S-1, which go the other way. On an even number p of ranks, p microbatches form
a unit, in which each direction computes where the other one would wait; the next unit fills the end of the one before.

It costs a second copy of the weights, and an exchange of gradients between twins. With whole backwards BitPipe is slower than ZB-V,
which has one copy of them; with backwards in halves it is faster.

One column per forward of a stage; a backward takes two, its passes `I` and `W` one each. BitPipe with p = 2 ranks and m = 2:

rank 0 | 0F0 5F1 6F1 3F0 3B0 3b0 6B1 6b1 5B1 5b1 0B0 0b0
rank 1 | 4F1 1F0 2F0 7F1 7B1 7b1 2B0 2b0 1B0 1b0 4B1 4b1

Chimera with p = m = 4:

rank 0 | 0F0 0F2 ..  7F1 7B1 7b1 7F3 7B3 7b3 ..  0B0 0b0 ..  ..  0B2 0b2
rank 1 | ..  1F0 6F1 1F2 6F3 ..  6B1 6b1 1B0 1b0 6B3 6b3 1B2 1b2 ..  ..
rank 2 | ..  5F1 2F0 5F3 2F2 ..  2B0 2b0 5B1 5b1 2B2 2b2 5B3 5b3 ..  ..
rank 3 | 4F1 4F3 ..  3F0 3B0 3b0 3F2 3B2 3b2 ..  4B1 4b1 ..  ..  4B3 4b3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from math import inf
from typing import Any

from bpipe.plan.action import Action, Op
from bpipe.schedules.list_scheduling import Timed, TimedRank, whole_order
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []

Order = Callable[[int, int], list[list[Action]]]


class _Published:
    """A rank that runs each unit in a fixed order; the first forwards of the next unit may run before its last backwards."""

    def __init__(self, units: Sequence[Sequence[Action]], warmup: int) -> None:
        self._units, self._length, self._warmup = deque(map(deque, units)), len(units[0]), warmup

    def candidates(self) -> Iterator[Action]:
        while self._units and not self._units[0]:
            self._units.popleft()
        if self._units:
            yield self._units[0][0]
        if len(self._units) > 1 and len(self._units[0]) <= self._warmup and len(self._units[1]) > self._length - self._warmup:
            yield self._units[1][0]

    def take(self, action: Action) -> None:
        next(unit for unit in self._units if unit and unit[0] == action).popleft()


def _timed(placement: Placement, p: int, m: int, backward: Op) -> list[tuple[list[Timed], list[Timed]]]:
    """Return the forwards and the backwards of each rank, those of each stage in order.

    The j-th microbatch of a direction in a unit would run forward on its s-th stage at 2j + s, and backward at S + 4j + 2(S-1-s),
    S later than in the unit before. Because p is even, the two directions never want the same rank at one moment.
    """
    ranks = placement.stage_ranks(p, _stages_per_rank(placement))
    depth = len(ranks) // 2
    lanes: list[tuple[list[Timed], list[Timed]]] = [([], []) for _ in range(p)]
    for stage, rank in enumerate(ranks):
        direction, s = divmod(stage, depth)
        for microbatch in range(direction, m, 2):
            u, j = microbatch // p, microbatch % p // 2
            lanes[rank][0].append((u * depth + 2 * j + s, Action(Op.F, stage, microbatch)))
            lanes[rank][1].append((u * depth + depth + 4 * j + 2 * (depth - 1 - s), Action(backward, stage, microbatch)))
    return lanes


def _stages_per_rank(placement: Placement) -> int:
    return 4 if placement is Placement.TWO_VS else 2


def _published(p: int, m: int) -> list[list[Action]]:
    """Return BitPipe's units in the order that was published; each begins where the one before has only backwards left."""
    ranks = []
    for x, lanes in enumerate(_timed(Placement.TWO_VS, p, m, Op.B)):
        warmup = 3 * p // 2 + min(x, p - 1 - x)
        units = [[[a for _, a in sorted(lane) if a.microbatch // p == u] for lane in lanes] for u in range(m // p)]
        ranks.append(_Published([_one_by_one(warmup, *unit) for unit in units], warmup))
    return whole_order(ranks, Placement.TWO_VS.flow(p, m, 4), [inf] * p)


def _one_by_one(warmup: int, forwards: list[Action], backwards: list[Action]) -> list[Action]:
    """Return some forwards, then forwards and backwards in turns, then the other backwards."""
    pairs = [action for pair in zip(forwards[warmup:], backwards) for action in pair]
    return [*forwards[:warmup], *pairs, *backwards[len(forwards) - warmup :]]


def _reordered(placement: Placement, p: int, m: int, slots: int, backward: Op = Op.B) -> list[list[Action]]:
    """Return what ranks compute that may mix units, in slots of a stage's microbatch."""
    ranks = [TimedRank(forwards + backwards) for forwards, backwards in _timed(placement, p, m, backward)]
    return whole_order(ranks, placement.flow(p, m, _stages_per_rank(placement)), [slots] * p)


def _bitpipe(p: int, m: int) -> list[list[Action]]:
    """Return BitPipe's units, mixed: p/2 - 1 more slots let each begin early. A single unit has nothing to mix with."""
    return _published(p, m) if m == p else _reordered(Placement.TWO_VS, p, m, slots=2 * p + p // 2 - 1)


def _rule(name: str, runs_as: str, placement: Placement, order: Order, **formulas: Any) -> Rule:
    return Rule(
        name=name,
        runs_as=runs_as,
        placement=placement,
        order=lambda p, m, v: order(p, m),
        allows=lambda p, m: p % 2 == 0 and m % p == 0,
        allows_text="a multiple of p",
        **formulas,
    )


CHIMERA = _rule(
    "chimera",
    "Chimera",
    Placement.BOTH_WAYS,
    lambda p, m: _reordered(Placement.BOTH_WAYS, p, m, slots=p + p // 2 - 1),
    title="Chimera (Li and Hoefler, arXiv 2107.06925)",
    peak=lambda p, m, v, x: p if m == p else p + p // 2 - 1,
    peak_text="p + min(1, m/p - 1)(p/2 - 1)",
    bubble=lambda p, m, v, f, i, w: 2 * (p - 2) * f,
    bubble_text="at most 2(p-2)F where F = I = W",
)

BITPIPE = _rule(
    "bitpipe",
    "BitPipe",
    Placement.TWO_VS,
    _published,
    title="BitPipe (Wu et al., arXiv 2410.19367)",
    peak=lambda p, m, v, x: p - Fraction(p // 2 - 1 - min(x, p - 1 - x), 2) if m == p else p,
    peak_text="p - max(0, 2 - m/p)(p/2 - 1 - min(x, p-1-x))/2",
    bubble=lambda p, m, v, f, i, w: (p - 2 + (m // p - 1) * max(0, p - 3) / 2) * f,
    bubble_text="(p-2)F + (m/p - 1)max(0, p-3)F/2 where F = I = W",
)

BITPIPE_REORDERED = _rule(
    "bitpipe_reordered",
    "BitPipeReordered",
    Placement.TWO_VS,
    _bitpipe,
    title="BitPipe with its units mixed",
    peak=lambda p, m, v, x: p if m == p else p + Fraction(p // 2 - 1, 2),
    peak_text="p + min(1, m/p - 1)(p/2 - 1)/2",
    bubble=lambda p, m, v, f, i, w: (p - 2) * f * (1 if m == p else 0.75),
    bubble_text="(p-2)(3 + max(0, 2 - m/p))F/4 where F = I = W",
)

BITPIPE_ZB = _rule(
    "bitpipe_zb",
    "BitPipeZB",
    Placement.TWO_VS,
    lambda p, m: _reordered(Placement.TWO_VS, p, m, slots=2 * p, backward=Op.I),
    title="BitPipe with backwards in halves",
    peak=lambda p, m, v, x: p,
    peak_text="p",
    bubble=lambda p, m, v, f, i, w: (p - 2) * f / 4,
    bubble_text="(p-2)F/4 where F = I = W",
)
