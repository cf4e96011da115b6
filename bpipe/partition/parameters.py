"""Lists and dicts of parameters: a stage keeps only some entries, those of the layers that it has."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import nn

__all__: list[str] = []


class _Partial(nn.ParameterList):
    """Some entries of a list, under the names that they have in the whole list; the first of them has index 0."""

    _present: Any = None  # names; a slice is a list of its own, and has none

    def _get_abs_string_index(self, idx: Any) -> Any:
        return super()._get_abs_string_index(idx) if self._present is None else self._present[idx]  # type: ignore[no-untyped-call]


def leave_out(parameters: nn.ParameterList | nn.ParameterDict, entry: str) -> None:
    """Remove an entry from a stage's copy."""
    if isinstance(parameters, nn.ParameterDict):
        parameters.pop(entry)
        return
    some: Any = parameters
    if not isinstance(some, _Partial):
        present = [str(index) for index in range(len(some))]
        cls: Any = type(some)
        some.__class__ = _partial(cls)
        some._present = present
    some._present.remove(entry)
    some._size -= 1
    delattr(some, entry)


@cache
def _partial(cls: Any) -> Any:
    """Return a subclass, under the same name, for lists that lack some entries."""
    return type(cls.__name__, (_Partial, cls), {"__module__": cls.__module__, "__qualname__": cls.__qualname__})
