"""Cases that hold each pair of values of their arguments, in place of all products of three or more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product, takewhile
from operator import itemgetter
from typing import Any, TypeVar

Case = TypeVar("Case")


def by_pairs(cases: Iterable[Case], pairs_of: Callable[[Case], set[Any]]) -> Iterator[tuple[Case, set[Any]]]:
    """Yield each case with its pairs that no earlier one holds: always the one that holds the most of these."""
    left = [(case, pairs_of(case)) for case in cases]
    while left:
        case, held = left.pop(max(range(len(left)), key=lambda place: len(left[place][1])))
        yield case, held
        left = [(one, others - held) for one, others in left]


def pairs(*values: Iterable[Any], are_some: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Some of the product's cases, the same ones each time: each pair of values of two arguments is in one at least.

    Args:
        are_some: whether values are a case.
    """
    cases = (case for case in product(*values) if are_some(*case))
    ranked = by_pairs(cases, lambda case: {*combinations(enumerate(case), 2)})
    return [case for case, _ in takewhile(itemgetter(1), ranked)]
