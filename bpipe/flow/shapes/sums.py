"""Sums: weights that parts of the model on several ranks have in common, whose gradients are added up within the step."""

from __future__ import annotations

from dataclasses import replace

from bpipe.flow.flow import Flow, Shape
from bpipe.flow.shape_arguments import Holders
from bpipe.flow.shaping import are_numbers

__all__: list[str] = []


def shape(flow: Flow, holders: tuple[Holders, ...]) -> Flow:
    """Let stages of a flow add up the gradients of weights that they have in common.

    Args:
        flow: in which each part has one stage.
        holders: the stages of each weight, in ascending order; each set of stages once, however many weights it has.

    Raises:
        ValueError: stages are not in ascending order, or all on one rank, or the parts have several stages.
    """
    if not isinstance(holders, tuple) or not all(are_numbers(stages, len(flow.parts)) for stages in holders):
        raise ValueError(f"holders {holders!r:.200}: expected tuples of numbers of stages")
    if list(holders) != sorted(set(holders)):
        raise ValueError(f"holders {holders!r:.200} are not in ascending order, or some are there twice")
    if flow.sums or len(flow.parts) > len(flow.routes):
        raise ValueError("the parts have several stages, which add up the gradients of all their weights already")
    summed = replace(flow, sums=holders, shapes=(*flow.shapes, Shape("sums", (holders,))))
    if problem := summed.problem:
        raise ValueError(problem)
    return summed if flow.has_backward else replace(summed, sums=())
