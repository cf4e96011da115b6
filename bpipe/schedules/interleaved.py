"""Interleaved 1F1B (Narayanan et al., arXiv 2104.04473, 2.2): several stages per rank in a loop, so that the pipeline fills sooner.

p = 3 ranks of v = 2 stages, m = 3 microbatches, one column per forward of a stage; a backward takes two:

rank 0 | 0F0 0F1 0F2 3F0 3F1 3F2 ..  ..  ..  ..  3B0 3b0 ..  3B1 3b1 ..  3B2 3b2 0B0 0b0 0B1 0b1 0B2 0b2
rank 1 | ..  1F0 1F1 1F2 4F0 4F1 4F2 ..  4B0 4b0 ..  4B1 4b1 ..  4B2 4b2 1B0 1b0 1B1 1b1 1B2 1b2 ..  ..
rank 2 | ..  ..  2F0 2F1 2F2 5F0 5B0 5b0 5F1 5B1 5b1 5F2 5B2 5b2 2B0 2b0 2B1 2b1 2B2 2b2 ..  ..  ..  ..
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import partial
from math import lcm

from bpipe.flow.shaping import sliced
from bpipe.passes.overlap import pairs_of
from bpipe.plan.action import Action, MicrobatchKey, Op
from bpipe.plan.order import backward_units
from bpipe.schedules.one_f_one_b import alternate
from bpipe.schedules.rule import Placement, Rule

__all__: list[str] = []

EQUAL_ROUNDS = "a multiple of floor(m/p)"


def order(num_ranks: int, num_microbatches: int, stages_per_rank: int, slices: int = 1, ahead: int = 0) -> list[list[Action]]:
    """Return each rank's forwards and backwards: p microbatches through each of its stages in turn, then the next p.

    Where m is no multiple of p, m/floor(m/p) of them go in turn, as in torch.distributed.pipelining. Of slices it is lcm(p, k):
    whole microbatches, and a multiple of p.

    Args:
        ahead: forwards that each rank runs before its first backward besides those that it must.
    """
    return [_lane(num_ranks, num_microbatches, stages_per_rank, x, slices, ahead) for x in range(num_ranks)]


def at_once(p: int, m: int, k: int = 1) -> int:
    """Return how many microbatches, or slices, go through a stage in turn."""
    return lcm(p, k) if k > 1 else m // max(1, m // p)


def turns(p: int, m: int, v: int, k: int = 1) -> list[tuple[int, int]]:
    """Return the order in which a rank's stages, counted from 0, run microbatches forward, or slices."""
    size = at_once(p, m, k)
    return [(chunk, first + i) for first in range(0, m * k, size) for chunk in range(v) for i in range(size)]


def _lane(p: int, m: int, v: int, x: int, k: int, ahead: int) -> list[Action]:
    last_first = backward_units(m, k)
    forwards = [Action(Op.F, chunk * p + x, i) for chunk, i in turns(p, m, v, k)]
    backwards = [Action(Op.B, (v - 1 - chunk) * p + x, last_first[i]) for chunk, i in turns(p, m, v, k)]
    return alternate(forwards, backwards, warmup=2 * (p - 1 - x) + (v - 1) * at_once(p, m, k) + k - 1 + ahead)


def in_equal_rounds(p: int, m: int) -> bool:
    """Return whether m microbatches divide into floor(m/p) rounds: a multiple of p, any number up to 2p-1, and a few others."""
    return m % max(1, m // p) == 0


def _peak(p: int, m: int, v: int, x: int, k: int, ahead: int = 0) -> Fraction:
    return Fraction(min((v - 1) * at_once(p, m, k) + 2 * (p - x) - 1 + k - 1 + ahead, m * v * k), v * k)


def _pairs(p: int, m: int, v: int, k: int) -> frozenset[MicrobatchKey]:
    return pairs_of(order(p, m, v, slices=k, ahead=1), sliced(Placement.LOOPED.flow(p, m, v), k))


def _rule(k: int = 1) -> Rule:
    rule = Rule(
        name="interleaved_1f1b",
        runs_as="Interleaved1F1B",
        title="interleaved 1F1B (Narayanan et al., arXiv 2104.04473)",
        placement=Placement.LOOPED,
        order=partial(order, slices=k),
        peak=partial(_peak, k=k),
        peak_text="min(p + (p-2x-1)/v, m) where p divides m" if k == 1 else "min(lcm(p,k)/k + (2(p-x-1)+k-lcm(p,k))/(k*v), m)",
        bubble=lambda p, m, v, f, i, w: (p - 1 + (v - 1) * max(0, p - m if k == 1 else 0)) * (f + i + w) / v / k,
        bubble_text="(p-1)(F+B)/v where m >= p" if k == 1 else "(p-1)(F+B)/(k*v)",
        allows=lambda p, m: m * k % lcm(p, k) == 0 if k > 1 else in_equal_rounds(p, m),
        allows_text=EQUAL_ROUNDS if k == 1 else "a multiple of p/gcd(p,k)",
        slices=k,
        sliced=_rule,
    )
    return replace(
        rule,
        overlapped=replace(
            rule,
            order=partial(order, slices=k, ahead=1),
            pairs=partial(_pairs, k=k),
            bubble=None,
            bubble_text="not given",
            peak=partial(_peak, k=k, ahead=1),
            peak_text="min(p + (p-2x)/v, m) where p divides m" if k == 1 else "min(lcm(p,k)/k + (2(p-x)-1+k-lcm(p,k))/(k*v), m)",
        ),
    )


RULE = _rule()
