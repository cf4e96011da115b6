"""A chain: stages one behind the other, each of which runs a part of the model on every microbatch, forward and then backward."""

from __future__ import annotations

from itertools import pairwise

from bpipe.flow.flow import BACKWARD, FORWARD, Edge, Flow, Kind, Node, Shape

__all__: list[str] = []


def shape(flow: None, stage_ranks: tuple[int, ...], num_microbatches: int, has_backward: bool = True) -> Flow:
    """Begin a flow with a chain.

    Args:
        flow: none.
        stage_ranks: the rank of each stage.
        num_microbatches: of a step.
        has_backward: whether there are backwards, as in training.
    """
    parts = range(len(stage_ranks))
    kind = Kind.VALUE if has_backward else Kind.DETACHED
    edges = [Edge(Node(FORWARD, part), Node(FORWARD, behind), kind) for part, behind in pairwise(parts)]
    if has_backward:
        edges += [Edge(Node(BACKWARD, behind), Node(BACKWARD, part), Kind.GRADIENT) for part, behind in pairwise(parts)]
        edges += [Edge(Node(FORWARD, part), Node(BACKWARD, part), Kind.SAVED) for part in parts]
    return Flow(
        stage_ranks=stage_ranks,
        num_microbatches=num_microbatches,
        slices=1,
        routes=tuple((part,) for part in parts),
        nodes=tuple(Node(op, part) for op in (FORWARD + BACKWARD if has_backward else FORWARD) for part in parts),
        edges=tuple(edges),
        sums=(),
        shapes=(Shape("chain", (stage_ranks, num_microbatches, has_backward)),),
    )
