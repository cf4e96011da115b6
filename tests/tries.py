"""Bounds on time, measured where other programs run, too: they only make a measurement worse, so it may be repeated."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
TRIES = 4


def holds_in_one_try(measure: Callable[[], T], is_within: Callable[[T], bool]) -> None:
    """Measure until the bound holds, a few times at most; what is wrong with the code is wrong in each."""
    seen = []
    for _ in range(TRIES):
        seen.append(measure())
        if is_within(seen[-1]):
            return
    pytest.fail(f"in none of {TRIES} tries: {seen}")
