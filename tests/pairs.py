"""Cases that hold each pair of values of their arguments, in place of all products of three or more."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import combinations, product
from typing import Any


def pairs(*values: Iterable[Any], are_some: Callable[..., bool] = lambda *_: True) -> list[tuple[Any, ...]]:
    """Some of the product's cases, the same ones each time: each pair of values of two arguments is in one at least.

    Args:
        are_some: whether values are a case.
    """
    left = [(case, {*combinations(enumerate(case), 2)}) for case in product(*values) if are_some(*case)]
    found = []
    while left:
        case, held = max(left, key=lambda one: len(one[1]))
        found.append(case)
        left = [(one, more) for one, others in left if (more := others - held)]
    return found
