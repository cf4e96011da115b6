"""Alternatives: several stages run one part of the model, and each microbatch takes one of them.

Two directions (Chimera, arXiv 2107.06925) are two routes that microbatches take in turns; paths over replicas of different speed
(SWARM, arXiv 2301.11913) are a route for each microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Flow, Shape
from bpipe.flow.shaping import are_numbers

__all__: list[str] = []


def shape(flow: Flow, stage_ranks: tuple[int, ...], routes: tuple[tuple[int, ...], ...], sums: bool) -> Flow:
    """Let the microbatches of a flow take several routes.

    Args:
        flow: in which each part has one stage.
        stage_ranks: the rank of each of the stages that there are then.
        routes: the stages of each route, one for each part; microbatches take the routes in turns.
        sums: whether the stages of a part hold copies of its weights in one process group, and add up their gradients two by two.
            Stages of one part on one rank are one module.

    Raises:
        ValueError: a route misses a part, parts have different numbers of stages, or the flow has alternatives already.
    """
    depth = len(flow.routes)
    if flow.period > 1:
        raise ValueError("the parts have alternatives already: give all routes at once")
    if not are_numbers(stage_ranks) or len(stage_ranks) % depth or type(sums) is not bool:
        raise ValueError(f"{len(stage_ranks)} stages run {depth} parts of a model: expected as many for each part")
    if not isinstance(routes, tuple) or not routes:
        raise ValueError(f"routes {routes!r:.200}: expected one at least")
    for route in routes:
        if not are_numbers(route, len(stage_ranks)) or [stage % depth for stage in route] != list(range(depth)):
            raise ValueError(f"a route takes stages {route!r:.200}: expected one for each part s of {depth}, s + r*{depth}")
    by_part = tuple(zip(*routes))
    if sums and any(len({stage_ranks[stage] for stage in stages}) > 2 for stages in by_part):
        raise ValueError("stages of a part on more than two ranks add up gradients: expected two directions")
    pairs = [(one, other) for one, *others in by_part for other in others if stage_ranks[one] != stage_ranks[other]]
    return replace(
        flow,
        stage_ranks=stage_ranks,
        parts=tuple(stage % depth for stage in range(len(stage_ranks))),
        routes=tuple(stages[:1] if len(set(stages)) == 1 else stages for stages in by_part),
        sums=tuple(pairs) if sums and flow.has_backward else (),
        shapes=(*flow.shapes, Shape("alternatives", (stage_ranks, routes, sums))),
    )
