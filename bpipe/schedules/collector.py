"""Work on millions of tuples without the cycle collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__: list[str] = []


@contextmanager
def collector_paused() -> Iterator[None]:
    """Plans are millions of tuples without cycles; the cycle collector would walk them over and over (half of the time)."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
