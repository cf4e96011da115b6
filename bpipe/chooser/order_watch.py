"""Observe a step that runs in another order than the schedule's, and raise if results depend on the order.

When one microbatch runs after the other, each stage still has its microbatches in the schedule's order, forwards and backwards
separately. A forward draws or reads the same values as long as no backward, and no other stage's forward, draws or writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from bpipe.engine.run import Observer, Run
from bpipe.engine.setup import StepInputs, modules_of
from bpipe.errors import StageError
from bpipe.logs import LOG
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.model.pytree import flattened
from bpipe.model.stage import PipelineStage
from bpipe.model.state.side_effects import States, changed, look_at
from bpipe.schedules import Action, Op

__all__: list[str] = []

BACKWARDS = (Op.B, Op.I, Op.W)


class OrderWatch(Observer):
    """Look at random number states and at the modules' tensors before and after each computation of one rank.

    Args:
        stages: the stages on this rank, by index.
        step_inputs: the inputs of the step.
        device: the device on which it computes.
        shares_random: whether forwards of several stages draw from the same random numbers.

    Raises:
        StageError: from `after`, because a computation drew or wrote something that depends on the order.
    """

    def __init__(
        self, stages: Mapping[int, PipelineStage], step_inputs: StepInputs, device: torch.device, *, shares_random: bool
    ) -> None:
        self._stages, self._step_inputs, self._device, self._shares_random = stages, step_inputs, device, shares_random
        self._before: States = {}, {}, {}
        self._has_warned = False
        self._leaves: dict[int, int] = {}  # for each leaf, the stage whose graph leads to it

    def before(self, run: Run, action: Action) -> None:
        if self._is_watched(action):
            self._before = self._look(action)

    def after(self, run: Run, action: Action) -> None:
        if action.op is Op.F and len(self._stages) > 1 and not action.microbatch:
            graph = run.microbatches[action.stage, action.microbatch].graph
            assert graph is not None, "a forward leaves its graph"
            self._check_leaves(action, graph.edges)
        if not self._is_watched(action):
            return
        random, tensors, others = map(changed, self._before, self._look(action))
        if random is not None:
            raise _refusal(action, f"draws random numbers ({random})")
        if action.op in BACKWARDS and tensors is not None:
            raise _refusal(action, f"changes {tensors}")
        if action.op in BACKWARDS and others is not None and not self._has_warned:
            self._has_warned = True
            self._warn_of(action, others)

    def _warn_of(self, action: Action, name: str) -> None:
        """Warn of an attribute that a backward changes: mostly a log, a gradient bucket or deferred work, unread by forwards."""
        LOG.warning(
            "stage %d: a backward changes %s. If a forward reads it, the results of this step, which measures one microbatch at a "
            "time, differ from those of the schedule's own order: give auto Options(measure='in_order') then",
            action.stage,
            name,
        )

    def _check_leaves(self, action: Action, edges: Iterable[GradientEdge]) -> None:
        """Raise if gradients of two stages add up in one tensor: a keyword argument, say, or a weight that the loss closes over."""
        for leaf in (getattr(node, "variable", None) for node in nodes_behind(edges)):
            other = self._leaves.setdefault(id(leaf), action.stage)
            if leaf is not None and other != action.stage:
                raise _refusal(action, f"uses a tensor of shape {list(leaf.shape)} that needs a gradient, as stage {other} does")

    def _is_watched(self, action: Action) -> bool:
        return action.op in BACKWARDS or (action.op is Op.F and self._shares_random)

    def _look(self, action: Action) -> States:
        """Look at everything that an action's stage may change."""
        return look_at(self._device, self._modules(action.stage), self._given(action.microbatch))

    def _modules(self, index: int) -> Iterator[tuple[str, nn.Module]]:
        stage = self._stages[index]
        yield from stage.submod.named_modules()
        if stage.is_last:
            yield from (
                (f"loss_fn.{name}", part) for loss in modules_of(self._step_inputs.loss_fn) for name, part in loss.named_modules()
            )

    def _given(self, microbatch: int) -> Iterable[Any]:
        """Return the inputs that all microbatches share, because they are repeated and not cut."""
        targets = () if self._step_inputs.targets is None else self._step_inputs.targets[microbatch]
        given = [
            self._step_inputs.args[microbatch],
            self._step_inputs.kwargs[microbatch],
            targets,
            dict(self._step_inputs.loss_kwargs),
        ]
        return [leaf for leaf in flattened(given) if not isinstance(leaf, torch.Tensor)]


def _refusal(action: Action, what: str) -> StageError:
    half = {Op.F: "forward", Op.I: "backward for the input", Op.W: "backward for the weights"}.get(action.op, "backward")
    return StageError(
        f"stage {action.stage}, microbatch {action.microbatch}: the {half} {what}, but this step, which measures memory, runs one "
        "microbatch at a time, so its results would differ from those of the schedule's own order. "
        "Give auto Options(measure='in_order')"
    )
