"""Temporary changes to settings of objects that bpipe does not own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from bpipe.cleanup import keeping

__all__: list[str] = []

Setting = tuple[Any, str, Any]  # the object, the attribute's name, its value


@contextmanager
def changed(settings: Iterable[Setting]) -> Iterator[None]:
    """Change settings, and restore them on exit."""
    settings = list(settings)
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in settings]
    with keeping(ExitStack()) as after:
        for owner, name, value in before:
            after.callback(setattr, owner, name, value)
        for owner, name, value in settings:
            setattr(owner, name, value)
        yield
