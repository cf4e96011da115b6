"""Split backwards into backward_input and backward_weight, and run some as a whole in backward_input."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence, Set
from functools import partial

import torch
from torch.autograd.graph import Node

from bpipe.backward.autograd import Graph
from bpipe.backward.callbacks import Callback, goes_to
from bpipe.backward.split import DeferredWeightGrad, GivenWeightGrad, run_backward_input
from bpipe.backward.user_hooks import UserHooks
from bpipe.torch_private.engine_and_graph import hooks_around

__all__: list[str] = []


class Divided:
    """The backwards of one rank during one step that the plan splits into backward_input and backward_weight.

    Args:
        undivided: the stages whose whole backward runs in `backward_input`; the user's hooks may add to them.
        separate: called with a stage whose parameters have new gradients.
    """

    def __init__(self, undivided: set[int], hooks: UserHooks, separate: Callable[[int], None]) -> None:
        self._waiting: dict[int, deque[tuple[int, DeferredWeightGrad]]] = defaultdict(deque)  # by stage, in order
        self.latest: dict[int, int] = {}  # by stage, the microbatch whose backward was the last to begin
        self.is_whole = False  # whether the latest backward_input ran the whole backward, because of hooks others may not have
        self._undivided, self._hooks, self._separate = undivided, hooks, separate

    def backward_input(
        self,
        stage: int,
        microbatch: int,
        graph: Graph,
        gradients: Sequence[torch.Tensor | None],
        builder: Callable[[], Callable[..., None]] | None,
    ) -> DeferredWeightGrad:
        """Compute the input gradients of a microbatch's backward, or run all of it, and return the deferred weight gradient.

        A stage's module may defer it by a `builder` of its own.
        """
        has_come = any(gradient is not None for gradient in gradients)
        is_unheard = has_come and stage in self._hooks.unheard
        self.is_whole = builder is None and (is_unheard or graph.has_common_hooks)
        if graph.has_common_hooks and builder is None and has_come:
            self._finish(stage)
        if is_unheard:
            self._hooks.callbacks.were_any = False  # another stage, or another rank of a loopback, may have set it
        if builder is not None or stage in self._undivided or graph.has_common_hooks or is_unheard or hooks_around() is not None:
            graph.run_backward(gradients)
            half = DeferredWeightGrad() if builder is None else GivenWeightGrad(builder())
        else:
            self._hooks.callbacks.is_ours = lambda: graph.input_grads.anchor is not None and goes_to(graph.input_grads.anchor)
            half = run_backward_input(graph.edges, gradients, graph.input_grads, partial(self._finish, stage))
            self._hooks.callbacks.is_ours = None
        if is_unheard and self._hooks.heard(stage):
            self._undivided.add(stage)
        self.latest[stage] = microbatch
        if self._hooks.callbacks.queued:
            half = self._whole(stage, microbatch, half)
        self._waiting[stage].append((microbatch, half))
        return half

    def backward_weight(self, stage: int, microbatch: int, half: DeferredWeightGrad) -> None:
        """Compute the weight gradients of a microbatch, unless that has been done already."""
        waiting = self._waiting[stage]
        self._waiting[stage] = deque(one for one in waiting if one[1] is not half)
        self._run(stage, microbatch, half)

    def _whole(self, stage: int, microbatch: int, half: DeferredWeightGrad) -> DeferredWeightGrad:
        """Compute the weight gradients at once, because callbacks wait for the end of the backward."""
        self.is_whole, queued = True, self._hooks.callbacks.take()
        self._finish(stage)
        self._run(stage, microbatch, half, queued)
        return DeferredWeightGrad()

    def _finish(self, stage: int, leaves: Set[Node] | None = None) -> None:
        """Compute weight gradients of earlier microbatches, up to the last one that leads to leaves whose next gradients come now.

        Thus the gradients of each leaf add up in one order. None stands for all leaves.
        """
        waiting = self._waiting[stage]
        while any(leaves is None or half.leads_to(leaves) for _, half in waiting):
            self._run(stage, *waiting.popleft())
            self._separate(stage)

    def _run(self, stage: int, microbatch: int, half: DeferredWeightGrad, queued: Sequence[Callback] = ()) -> None:
        """Compute weight gradients, and run the callbacks queued for the end of the microbatch's backward."""
        callbacks = self._hooks.callbacks
        outside = callbacks.is_ours, callbacks.is_late
        callbacks.is_ours, callbacks.is_late = half.is_running, lambda: self.latest[stage] != microbatch
        half.run()
        callbacks.is_ours, callbacks.is_late = outside
        if queued or callbacks.queued:
            callbacks.call([*queued, *callbacks.take()])
