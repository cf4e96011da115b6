"""The nodes of an autograd graph, and the tensors that they have saved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from bpipe.torch_private.engine_and_graph import saved_names

__all__: list[str] = []


def nodes_behind(edges: Iterable[GradientEdge]) -> list[Node]:
    """Return all nodes to which some edges lead, each once, in depth-first order."""
    stack = [edge.node for edge in edges]
    seen: dict[Node, None] = {}
    while stack:
        node = stack.pop()
        if node not in seen:
            seen[node] = None
            stack += [following for following, _ in node.next_functions if following is not None]
    return list(seen)


def saved_by(node: Node) -> list[tuple[Any, Any]]:
    """Return the raw saved tensors of a node, each with its data: the packed value of a hook, or the tensor; None if none."""
    found: list[tuple[Any, Any]] = []
    for name in saved_names(BackwardCFunction if isinstance(node, BackwardCFunction) else type(node)):
        value = getattr(node, name)
        if type(value) is tuple:
            found += [(saved, getattr(saved, "data", None)) for saved in value]
        else:
            found += ((value, getattr(value, "data", None)),)
    return found
