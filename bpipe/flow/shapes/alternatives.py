"""Alternatives: several stages run one part of the model, and each microbatch takes one of them.

Two directions (Chimera, arXiv 2107.06925) are two routes that microbatches take in turns; paths over replicas of different speed
(SWARM, arXiv 2301.11913) are a route for each microbatch.
"""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Flow, Shape

__all__: list[str] = []


def shape(flow: Flow, stage_ranks: tuple[int, ...], routes: tuple[tuple[int, ...], ...], sums: bool) -> Flow:
    """Let the microbatches of a flow take several routes.

    Args:
        flow: in which each part has one stage.
        stage_ranks: the rank of each of the stages that there are then.
        routes: the stages of each route, one for each part; microbatches take the routes in turns.
        sums: whether the stages of a part hold copies of its weights in one process group, and add up their gradients two by two.
            Stages of one part on one rank are one module.
    """
    by_part = tuple(zip(*routes))
    pairs = [(one, other) for one, *others in by_part for other in others if stage_ranks[one] != stage_ranks[other]]
    return replace(
        flow,
        stage_ranks=stage_ranks,
        routes=tuple(stages[:1] if len(set(stages)) == 1 else stages for stages in by_part),
        sums=tuple(pairs) if sums and flow.has_backward else (),
        shapes=(*flow.shapes, Shape("alternatives", (stage_ranks, routes, sums))),
    )
