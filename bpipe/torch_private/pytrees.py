"""Types that users have registered as pytrees, and torch's functions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from bpipe.torch_private.names import ask

__all__: list[str] = []

try:
    import torch.utils._pytree as _pytree
except ImportError:  # pragma: no cover - a release to come may have moved it
    _pytree = None  # type: ignore[assignment]


def is_registered(value: Any) -> bool:
    """Return whether a value is of a type with parts that torch knows: a tuple, list, dict, or one that was registered."""
    return not ask(_pytree, "tree_is_leaf", lambda _: True)(value)


def parts_of(value: Any) -> tuple[Sequence[Any], Any, Callable[[Sequence[Any]], Any]]:
    """Return the parts of such a value, what describes the rest, and a function that makes another one from other parts."""
    parts, rest = ask(_pytree, "tree_flatten")(value, is_leaf=lambda part: part is not value)
    make = ask(_pytree, "tree_unflatten")
    return parts, rest, lambda parts: make(parts, rest)
