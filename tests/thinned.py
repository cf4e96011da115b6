"""Matrices of cases, a part of which stands for the whole in `make test`; `make test-all` runs what it leaves out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(cases: Iterable[Any], usual: Callable[..., bool]) -> list[Any]:
    """The cases for `parametrize`, those marked `exhaustive` that are not usual.

    Args:
        cases: each a value, or a tuple of those of several arguments.
        usual: called with a case's values; whether it runs in `make test`.
    """
    rows = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*row, marks=() if usual(*row) else pytest.mark.exhaustive) for row in rows]
