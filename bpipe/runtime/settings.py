"""Settings of somebody else's objects, changed for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__: list[str] = []

Setting = tuple[Any, str, Any]  # whose, its name, its value


@contextmanager
def changed(settings: Iterable[Setting]) -> Iterator[None]:
    """Change settings; in the end they are what they were."""
    settings = list(settings)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    try:
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
