"""Slices: each microbatch is cut along its sequence (TeraPipe, arXiv 2102.07988; Seq1F1B, arXiv 2406.03488).

Each slice reads the state that the ones before it left on its stage, such as keys and values, and gives gradients back to it.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Edge, Flow, Kind, Shape
from bpipe.flow.shaping import is_count
from bpipe.flow.units import Units

__all__: list[str] = []


def shape(flow: Flow, slices: int) -> Flow:
    """Cut the microbatches of a flow into slices.

    Args:
        flow: of whole microbatches.
        slices: of each.

    Raises:
        ValueError: there is none, or the microbatches are cut already.
    """
    if not is_count(slices) or flow.units.are_slices:
        of = "slices" if flow.units.are_slices else "a microbatch"
        raise ValueError(f"{slices!r:.200} slices of {of}: expected at least 1, of whole microbatches")
    state = tuple(Edge(node, node, Kind.STATE) for node in flow.nodes)
    return replace(flow, units=Units(slices), edges=flow.edges + state, shapes=(*flow.shapes, Shape("slices", (slices,))))
