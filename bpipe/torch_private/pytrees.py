"""Types that users have registered as pytrees, and torch's functions for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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


def tree_flatten(value: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a pytree, and its structure."""
    return ask(_pytree, "tree_flatten")(value)


def tree_unflatten(leaves: Iterable[Any], structure: Any) -> Any:
    """Return the pytree of a structure with these leaves."""
    return ask(_pytree, "tree_unflatten")(leaves, structure)


def tree_leaves(value: Any) -> list[Any]:
    """Return the leaves of a pytree."""
    return ask(_pytree, "tree_leaves")(value)


def tree_map_only(kind: type, change: Callable[[Any], Any], value: Any) -> Any:
    """Return a pytree like another one, with the leaves of a type changed."""
    return ask(_pytree, "tree_map_only")(kind, change, value)
