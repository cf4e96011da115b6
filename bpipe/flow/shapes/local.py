"""Local learning: every stage has a loss of its own, and no gradient leaves it (PPLL, arXiv 2411.12780)."""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Flow, Kind, Shape

__all__: list[str] = []


def shape(flow: Flow) -> Flow:
    """Keep the gradients of a flow in their parts.

    Raises:
        ValueError: they stay there already.
    """
    if flow.arguments("local") is not None:
        raise ValueError("gradients stay in their parts already")
    kept = [edge for edge in flow.edges if edge.kind is not Kind.GRADIENT]
    edges = tuple(edge._replace(kind=Kind.DETACHED) if edge.kind is Kind.VALUE else edge for edge in kept)
    return replace(flow, edges=edges, shapes=(*flow.shapes, Shape("local", ())))
