"""What several stages of one part of a model are to each other: twins of two directions, or replicas that paths lead through."""

from __future__ import annotations

from bpipe.flow.flow import Flow

__all__: list[str] = []

Paths = tuple[tuple[int, ...], ...]


def directions_of(flow: Flow) -> int:
    """Return how many streams of microbatches a flow has, each through stages of its own that hold the same weights."""
    _, routes, are_twins = flow.arguments("alternatives") or ((), ((),), True)
    return len(routes) if are_twins else 1


def paths_of(flow: Flow) -> Paths:
    """Return the stages that each microbatch of a flow passes, if they are replicas; empty if microbatches have no paths."""
    _, routes, are_twins = flow.arguments("alternatives") or ((), (), True)
    paths: Paths = () if are_twins else routes
    return paths
