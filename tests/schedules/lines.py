"""How much work a call is, on a machine of any speed: the lines of Python that it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def lines_of(call: Callable[[], object]) -> int:
    """Make a call and count the lines that it runs; not the work inside of functions that are written in C."""
    number, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal number
        number += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return number
