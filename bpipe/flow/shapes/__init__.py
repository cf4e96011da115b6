"""The shapes of flows, each in a file of its own: a chain of stages begins a flow, each other shape makes one from another.

Shapes combine in any order that their arguments allow, and a plan's text names them, one line each.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bpipe.flow.flow import Flow

__all__: list[str] = []


def shaped(flow: Flow | None, name: str, *arguments: Any) -> Flow:
    """Return a flow of a shape, made from another one; a chain begins with None. Only the shapes that are used are imported."""
    made: Flow = import_module(f"{__name__}.{name}").shape(flow, *arguments)
    return made
