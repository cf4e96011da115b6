"""Skips: values that parts of the model hand on to later parts than the next one, as U-Nets and encoders with decoders do.

A rank gets each value once, and each part there that uses it hands it on to the next one; gradients take the same way back.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from bpipe.flow.flow import FORWARD, Edge, Flow, Kind, Node, Shape, value_name
from bpipe.flow.shaping import are_numbers

__all__: list[str] = []

Skip = tuple[int, ...]  # the part that makes a value, and the later ones that use it


def shape(flow: Flow, skips: tuple[Skip, ...]) -> Flow:
    """Add skips to a flow.

    Args:
        flow: the flow.
        skips: the part that makes each value and the later ones that use it, in ascending order.

    Raises:
        ValueError: a skip does not lead to later parts, skips are not in ascending order, or the flow has skips already.
    """
    if not isinstance(skips, tuple):
        raise ValueError(f"skips {skips!r:.200}: expected a tuple of them")
    for skip in skips:
        if not isinstance(skip, tuple) or not all(type(part) is int for part in skip):
            raise ValueError(f"a skip {skip!r:.200}: expected a tuple of numbers of stages")
        if not are_numbers(skip, len(flow.routes)) or len(skip) < 2 or list(skip) != sorted(set(skip)):
            last = len(flow.routes) - 1
            raise ValueError(f"a skip {skip!r:.200}: expected a stage, then later ones in ascending order, up to {last}")
    if flow.has_asides:
        raise ValueError("some parts hand values past the next one already: give all of them at once")
    if list(skips) != sorted(set(skips)):
        raise ValueError(f"skips {skips!r:.200} are not in ascending order, or one is there twice")
    backward = {edge.source: edge.target for edge in flow.edges if edge.kind is Kind.SAVED}
    returns = any(edge.kind is Kind.VALUE for edge in flow.edges)
    edges = []
    for skip in skips:
        name = value_name(skip)
        turns_of = defaultdict(list)
        for turn in range(flow.period):
            for step in _steps(flow, skip, turn):
                turns_of[step].append(turn)
        for (giver, taker), turns in turns_of.items():
            when = tuple(turns) if len(turns) < flow.period else ()
            value = Edge(Node(FORWARD, giver), Node(FORWARD, taker), Kind.VALUE if returns else Kind.DETACHED, name, when)
            edges.append(value)
            if returns:
                edges.append(Edge(backward[value.target], backward[value.source], Kind.GRADIENT, name, when))
    return replace(flow, edges=flow.edges + tuple(edges), shapes=(*flow.shapes, Shape("skips", (skips,))))


def _steps(flow: Flow, skip: Skip, turn: int) -> list[tuple[int, int]]:
    """Return which part gives a value to which one, in a turn of the routes."""
    source, *users = skip
    by_rank = defaultdict(list)
    for user in users:
        by_rank[flow.stage_ranks[flow.stage_of(user, turn)]].append(user)
    return [step for group in by_rank.values() for step in zip((source, *group), group)]
