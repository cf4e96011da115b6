"""Run a stage's forward and backward as pieces of one graph, cut so that autograd alone owns the tensors that it saved.

A leaf input would be owned by its AccumulateGrad node, and an output by the code that keeps it for the backward.
So a stage is entered through a function that makes aliases and puts the incoming gradients into `InputGrads`, and its output is
replaced by the gradient edge of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bpipe.torch_private.engine_and_graph import engine

__all__: list[str] = []


@dataclass(eq=False)
class InputGrads:
    """The gradients of those inputs of a stage that need one, once its backward has run; None if an input was not used.

    All paths through these inputs lead to the anchor, a leaf; it is None if there are none.
    """

    gradients: list[torch.Tensor | None] = field(default_factory=list)
    anchor: torch.Tensor | None = None


class _Entry(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input_grads: InputGrads, anchor: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.input_grads = input_grads
        ctx.set_materialize_grads(False)
        return tuple(map(_alias, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.input_grads.gradients[:] = gradients
        return (None,) * (2 + len(gradients))


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory that is not a view, because the stage may change its input in place."""
    storage, offset = tensor.untyped_storage(), tensor.storage_offset()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, offset, tensor.shape, tensor.stride())


def enter(tensors: Sequence[torch.Tensor], requires_grad: Sequence[bool]) -> tuple[list[torch.Tensor], InputGrads]:
    """Make received tensors, which the caller drops, the inputs of a stage.

    Returns:
        The inputs, and the object that will hold the gradients of those that need one.
    """
    differentiable = [tensor for tensor, needed in zip(tensors, requires_grad) if needed]
    if not differentiable:
        return list(tensors), InputGrads()
    anchor = torch.empty(0, requires_grad=True)
    input_grads = InputGrads([None] * len(differentiable), anchor)
    entered = iter(_Entry.apply(input_grads, anchor, *differentiable))  # type: ignore[no-untyped-call]
    return [next(entered) if needed else tensor for tensor, needed in zip(tensors, requires_grad)], input_grads


def edges_of(tensors: Sequence[torch.Tensor]) -> list[GradientEdge]:
    """Return the edges at which gradients enter the graph, for those tensors that need one."""
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


class Return(NamedTuple):
    """Gradients of what has entered a graph.

    Args:
        receiver: who gets them.
        numbers: which of the gradients that it expects they are.
        size: how many it expects.
    """

    receiver: Any
    numbers: Sequence[int]
    size: int


@dataclass(slots=True, eq=False)
class Graph:
    """The part of a microbatch that is kept between its forward and its backward, besides the tensors that autograd saved.

    Args:
        edges: where its backward begins.
        input_grads: collects the gradients of the stage's inputs.
        has_common_hooks: whether its forward has registered hooks that wait for the gradients of several tensors.
        returns: who gets the gradients of the inputs, in their order.
        numbers: by where values went, which of the edges are those of its tensors.
    """

    edges: list[GradientEdge]
    input_grads: InputGrads
    has_common_hooks: bool = False
    returns: Sequence[Return] = ()
    numbers: Mapping[Any, Sequence[int]] = field(default_factory=dict)

    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the whole backward."""
        edges = self.edges
        if self.has_common_hooks:
            # Such hooks know which gradients to wait for from the nodes that a run of the engine will execute.
            # `_will_engine_execute_node` does not count the root of a run with a single root. A stage's output is such a root
            # here, but not in a single process, nor is a loss that a single process divides by m. So a second root is added.
            beside = torch.empty(0, device="cpu", requires_grad=True)
            edges, gradients = [*edges, get_gradient_edge(beside)], [*gradients, torch.empty(0, device="cpu")]
        run_backward(edges, gradients)


def run_backward(
    edges: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor | None],
    *,
    inputs: Sequence[GradientEdge] | None = None,
    retain_graph: bool = False,
) -> None:
    """Run a backward from the edges that have a gradient.

    Args:
        gradients: one for each edge, or None.
        inputs: the edges where it ends; default: all leaves.
        retain_graph: keep the saved tensors of the graph, for another run.
    """
    pairs = [(edge, gradient) for edge, gradient in zip(edges, gradients, strict=True) if gradient is not None]
    if pairs:
        starts, arriving = [edge for edge, _ in pairs], [gradient for _, gradient in pairs]
        torch.autograd.backward(starts, arriving, inputs=inputs, retain_graph=retain_graph)


def go_on(results: Iterable[tuple[GradientEdge, torch.Tensor | None]]) -> None:
    """Continue a backward past a node that was called alone, down to all leaves.

    Args:
        results: the node's gradient for each of its edges; autograd fits it to the edge as in a backward that runs the node.
    """
    found = [(edge, result) for edge, result in results if result is not None]
    if found:
        edges, gradients = zip(*found)
        _run_engine(edges, gradients)


class Alone:
    """Call nodes of a graph as a backward does, but without running their hooks."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], None]] = []

    @cached_property
    def _start(self) -> tuple[GradientEdge, torch.Tensor]:
        """The edge and the gradient that such a backward starts from, made at the first call because many runs call no node."""
        calls = self._calls
        gate = torch.empty(0, device="cpu", requires_grad=True)  # its hook runs on the caller's thread and stream
        gate.register_hook(lambda _: calls.pop()())
        return get_gradient_edge(gate), torch.empty(0, device="cpu")

    def call(self, node: Node, gradients: Sequence[torch.Tensor | None], edges: Iterable[GradientEdge]) -> Sequence[Any]:
        """Compute the gradients that a node gives to some of its edges.

        The result of a node depends on the backward that it runs in. So this runs a backward that ends at all of these edges,
        and calls the node from the only hook of that backward.

        Args:
            edges: those of its edges that need a result.

        Returns:
            For each edge that the node has, its result or None.
        """
        found: list[Any] = []
        self._calls.append(lambda: found.append(node(*gradients)))  # type: ignore[operator]
        start, gradient = self._start
        _run_engine((start,), (gradient,), (start, *edges))
        return found[0] if isinstance(found[0], tuple) else found


def _run_engine(
    edges: tuple[GradientEdge, ...], gradients: tuple[torch.Tensor, ...], captured: tuple[GradientEdge, ...] = ()
) -> None:
    """Run autograd's engine without the checks of `torch.autograd.backward`, which reject gradients not yet fitted to an edge."""
    engine().run_backward(
        edges, gradients, bool(captured), False, captured, allow_unreachable=True, accumulate_grad=not captured
    )
