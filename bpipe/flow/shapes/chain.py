"""A chain: stages one behind the other, each of which runs a part of the model on every microbatch, forward and then backward."""

from __future__ import annotations

from itertools import pairwise

from bpipe.flow.flow import BACKWARD, FORWARD, Edge, Flow, Kind, Node, Shape
from bpipe.flow.shaping import are_numbers, is_count
from bpipe.flow.units import WHOLE

__all__: list[str] = []

BEGINS = True  # it follows no other shape


def shape(flow: None, stage_ranks: tuple[int, ...], num_microbatches: int, has_backward: bool = True) -> Flow:
    """Begin a flow with a chain.

    Args:
        flow: none.
        stage_ranks: the rank of each stage.
        num_microbatches: of a step.
        has_backward: whether there are backwards, as in training.

    Raises:
        ValueError: there are no stages, or no microbatches.
    """
    if not are_numbers(stage_ranks) or not stage_ranks or type(has_backward) is not bool:
        raise ValueError(f"a chain over stages on ranks {stage_ranks!r:.200}: expected the rank of each of at least one stage")
    if not is_count(num_microbatches):
        raise ValueError(f"{num_microbatches!r:.200} microbatches: expected at least 1")
    parts = range(len(stage_ranks))
    kind = Kind.VALUE if has_backward else Kind.DETACHED
    forwards, backwards = ([Node(op, part) for part in parts] for op in (FORWARD, BACKWARD))
    edges = [Edge(part, behind, kind) for part, behind in pairwise(forwards)]
    if has_backward:
        edges += [Edge(behind, part, Kind.GRADIENT) for part, behind in pairwise(backwards)]
        edges += [Edge(forward, backward, Kind.SAVED) for forward, backward in zip(forwards, backwards)]
    return Flow(
        stage_ranks=stage_ranks,
        parts=tuple(parts),
        num_microbatches=num_microbatches,
        units=WHOLE,
        routes=tuple((part,) for part in parts),
        nodes=(*forwards, *backwards) if has_backward else tuple(forwards),
        edges=tuple(edges),
        sums=(),
        shapes=(Shape("chain", (stage_ranks, num_microbatches, has_backward)),),
    )
