"""The nodes of an autograd graph, and what they have saved."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

__all__: list[str] = []


def nodes_behind(edges: Iterable[GradientEdge]) -> list[Node]:
    """All nodes to which some edges lead, those nearest to them first."""
    stack = [edge.node for edge in edges]
    seen: dict[Node, None] = {}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def saved_by(node: Node) -> list[tuple[Any, Any]]:
    """The tensors that a node has saved, each with what hooks made of it; None where there is none."""
    found: list[tuple[Any, Any]] = []
    for name in _saved_names(BackwardCFunction if isinstance(node, BackwardCFunction) else type(node)):
        value = getattr(node, name)
        if type(value) is tuple:
            found += [(saved, getattr(saved, "data", None)) for saved in value]
        else:
            found += ((value, getattr(value, "data", None)),)
    return found


@cache
def _saved_names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
