"""Cases that hold each pair of values of their arguments, in place of all products of three or more."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any


def pairs(*values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Some of the product, the same ones each time: each pair of values of two arguments is in one at least."""
    left = [(case, {*combinations(enumerate(case), 2)}) for case in product(*values)]
    found = []
    while left:
        case, held = max(left, key=lambda one: len(one[1]))
        found.append(case)
        left = [(one, more) for one, others in left if (more := others - held)]
    return found
