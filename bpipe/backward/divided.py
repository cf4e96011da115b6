"""Backwards in two halves, and which of them run as a whole in the input half, with nothing left for the weight half."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from bpipe.backward.autograd import Box, run_backward
from bpipe.backward.callbacks import Callback, goes_to
from bpipe.backward.split import GivenHalf, WeightHalf, run_input_half
from bpipe.backward.user_hooks import UserHooks
from bpipe.memory.ledger import Key

__all__: list[str] = []


@dataclass
class Graph:
    """What is kept of a microbatch between its forward and its backward, besides what autograd saved.

    Args:
        edges: where its backward begins.
        box: for the gradients of the stage's inputs.
        has_common_hooks: whether its forward has registered hooks that wait for the gradients of several tensors.
    """

    edges: list[GradientEdge]
    box: Box
    has_common_hooks: bool = False

    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Run the whole backward.

        Args:
            gradients: one for each edge, or None.
        """
        edges = self.edges
        if self.has_common_hooks:
            # By the nodes that a run of the engine has to do, such hooks know which gradients to wait for.
            # `_will_engine_execute_node` does not count the root of a run with a single root. A stage's output is such a root
            # here, but not in a single process, and a loss is none where that divides it. So a second root is added.
            beside = torch.empty(0, device="cpu", requires_grad=True)
            edges, gradients = [*edges, get_gradient_edge(beside)], [*gradients, torch.empty(0, device="cpu")]
        run_backward(edges, gradients)


class Divided:
    """The backwards of one rank during one step that the plan splits into two halves.

    Args:
        undivided: the stages whose backward runs as a whole, in its input half.
        hooks: the user's, which may add to them.
        separate: called with a stage whose parameters have got gradients.
    """

    def __init__(self, undivided: set[int], hooks: UserHooks, separate: Callable[[int], None]) -> None:
        self.halves: dict[Key, WeightHalf] = {}  # those that wait
        self.latest: dict[int, int] = {}  # by stage, the microbatch whose backward was the last to begin
        self.is_whole = False  # whether the latest input half was all of its backward, for hooks that others need not have
        self._undivided, self._hooks, self._separate = undivided, hooks, separate

    def input_half(
        self, key: Key, graph: Graph, gradients: Sequence[torch.Tensor | None], builder: Callable[[], Callable[..., None]] | None
    ) -> WeightHalf:
        """Run the input half of a microbatch's backward, or all of it.

        Args:
            key: the microbatch.
            graph: what its forward has left.
            gradients: those of the stage's outputs.
            builder: makes the other half, if the stage's module has one of its own.

        Returns:
            The other half.
        """
        stage = key[0]
        has_come = any(gradient is not None for gradient in gradients)
        is_unheard = has_come and stage in self._hooks.unheard
        self.is_whole = builder is None and (is_unheard or graph.has_common_hooks)
        if graph.has_common_hooks and builder is None and has_come:
            self._finish(stage)
        if is_unheard:
            self._hooks.callbacks.were_any = False  # by another stage, or another rank of a loopback
        if builder is not None or stage in self._undivided or graph.has_common_hooks or is_unheard or _hooks_are_around():
            graph.run_backward(gradients)
            half = WeightHalf() if builder is None else GivenHalf(builder())
        else:
            self._hooks.callbacks.is_ours = lambda: graph.box.anchor is not None and goes_to(graph.box.anchor)
            half = run_input_half(graph.edges, gradients, graph.box, partial(self._finish, stage))
            self._hooks.callbacks.is_ours = None
        if is_unheard and self._hooks.heard(stage):
            self._undivided.add(stage)
        self.latest[stage] = key[1]
        return half if not self._hooks.callbacks.queued else self._whole(key, half)

    def _whole(self, key: Key, half: WeightHalf) -> WeightHalf:
        """Run the weight half at once, because callbacks wait for the end of the backward."""
        self.is_whole, queued = True, self._hooks.callbacks.take()
        self._finish(key[0])
        self.run(key, half, queued)
        return WeightHalf()

    def _finish(self, stage: int, leaves: Set[Node] | None = None) -> None:
        """Run the weight halves of earlier microbatches, up to the last one that leads to leaves whose next gradients come now.

        Thus the gradients of each leaf add up in one order.

        Args:
            stage: whose halves.
            leaves: those; None for all.
        """
        waiting = [(key, half) for key, half in self.halves.items() if key[0] == stage]
        while any(leaves is None or half.leads_to(leaves) for _, half in waiting):
            self.run(*waiting.pop(0))
            self._separate(stage)

    def run(self, key: Key, half: WeightHalf, queued: Sequence[Callback] = ()) -> None:
        """Run a weight half, and what was queued for the end of its microbatch's backward."""
        callbacks = self._hooks.callbacks
        outside = callbacks.is_ours, callbacks.is_late
        callbacks.is_ours, callbacks.is_late = half.is_running, lambda: self.latest[key[0]] != key[1]
        half.run()
        callbacks.is_ours, callbacks.is_late = outside
        if queued or callbacks.queued:
            callbacks.call([*queued, *callbacks.take()])


def _hooks_are_around() -> bool:
    """Return whether the user's hooks follow what is saved: two halves of a backward would unpack some tensors twice."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
