"""The factor that a step gives its losses, for gradients that do not come through the loss that `loss_fn` returns.

A pipeline starts the backward of each microbatch's loss with 1/m, and so divides whatever comes through that loss. It cannot divide
what a stage or a loss function adds by itself: an auxiliary loss that a Function brings in during the backward, as libraries for
mixtures of experts do, or a backward of its own inside the loss function, as some chunked cross entropies run. Those ask for the
factor here; who does not ask is noticed where such a gradient is seen, also if the factor was put in by hand, which looks the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from bpipe.errors import ConfigurationError, StageError
from bpipe.memory.saved.nodes import nodes_behind
from bpipe.torch_private.engine_and_graph import function_of
from bpipe.torch_private.owners_and_versions import version_of

__all__ = ["loss_scale"]

OWN_PACKAGES = "torch", "bpipe"  # whose Functions bring nothing in, and may do more than compute when they run twice
_RUNNING: list[LossScale] = []  # of the steps that run in this process: a backward may ask from a thread of autograd's


def loss_scale() -> float:
    """Return the factor by which the running step multiplies the loss of each microbatch: 1/m, or 1 with `scale_grads=False`.

    Multiply by it what gives gradients without going through the loss that `loss_fn` returns: an auxiliary loss that a Function
    brings in during the backward, the loss of a backward that a loss function runs itself, or what a hook adds to a gradient. It
    may be called in forwards, loss functions, backwards and hooks. Neither collective nor blocking.

    Returns:
        The factor; 1 outside of a pipeline's step, so that the same module works in a plain loop. A `GradScaler` has a factor of
        its own, as there.

    Raises:
        ConfigurationError: the stage takes slices, whose auxiliary losses have no one factor, nor has the loss of one slice
            (`loss_of_slices`); in a loss function of whole sequences there is one. Or pipelines with different factors run at once
            in this process; for compiled code, which cannot tell its thread, so do the ranks of a loopback over slices.

    Example:
        >>> import bpipe
        >>> bpipe.loss_scale()
        1.0
    """
    found = 1.0
    for place, scale in enumerate([one for one in _RUNNING if one.is_of_loss()] or _RUNNING):
        scale.was_asked = True
        if scale.value is None:
            raise ConfigurationError(
                "bpipe.loss_scale(): the sequences of this pipeline are cut into slices, and a loss of a slice's own has no one "
                "factor in that of its sequence. Return what it is made of with the stage's output, and add it up in a loss_fn of "
                "whole sequences (without loss_of_slices)"
            )
        if place and scale.value != found:
            raise ConfigurationError(
                f"bpipe.loss_scale(): two pipelines run at once in this process, one with the factor {found:g} and one with "
                f"{scale.value:g}. Run them one after the other"
            )
        found = scale.value
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Run code that is no part of the steps that run, such as a fill job's, in this process."""
    running = list(_RUNNING)
    _RUNNING.clear()
    try:
        yield
    finally:
        _RUNNING[:] = running


class LossScale:
    """The factor of one step.

    Args:
        value: None while there is none.
    """

    def __init__(self, value: float | None) -> None:
        self.value, self.was_asked = value, False
        self.thread: int | None = None  # in which the function of one loss runs: others in this process do not count there

    def is_of_loss(self) -> bool:
        """Return whether the function of one of its losses asks."""
        return not torch.compiler.is_compiling() and self.thread == get_ident()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Answer `loss_scale`, while a step runs."""
        _RUNNING.append(self)
        try:
            yield
        finally:
            _RUNNING.remove(self)

    @contextmanager
    def of_loss(self, value: float | None) -> Iterator[None]:
        """Answer with the factor of one loss, while its function runs; None if it is not known yet."""
        before, self.value, self.thread = (self.value, self.thread), value, get_ident()
        try:
            yield
        finally:
            self.value, self.thread = before

    @contextmanager
    def noticing(
        self, parameters: Sequence[torch.Tensor], named: Iterable[tuple[str, torch.Tensor]], place: object
    ) -> Iterator[None]:
        """Raise a StageError if the code inside adds to a parameter's gradient without having asked for the factor."""
        self.was_asked, before = False, list(map(_state, parameters))
        yield
        if self.was_asked or self.value == 1:
            return
        changed = {id(parameter) for parameter, state in zip(parameters, before) if _state(parameter) != state}
        if changed:
            names = (name for name, one in named if id(one) in changed)
            raise StageError(
                f"{place}: the gradient of {next(names, 'a parameter')} has changed during the forward or loss_fn, so one of them "
                "runs a backward of its own. The pipeline multiplies its losses by "
                f"{'1/m' if self.value is None else format(self.value, 'g')}, and cannot do so there: multiply by "
                "bpipe.loss_scale() what that backward begins with, also where you divide it by the number of microbatches "
                "yourself (in place of that), or give the schedule scale_grads=False"
            )

    def watch(self, edges: Iterable[GradientEdge], place: str) -> None:
        """Let the backward of a graph raise a StageError where a Function brings in a gradient of 1 that nobody has scaled."""
        if not self.was_asked and self.value not in (None, 1):
            for node in nodes_behind(edges):
                if isinstance(node, BackwardCFunction) and function_of(node).__module__.partition(".")[0] not in OWN_PACKAGES:
                    node.register_hook(_Check(self, node, place))


class _Check:
    """Looks at the gradients that a Function returns: does it bring one in, that is, return one for nothing?"""

    def __init__(self, scale: LossScale, node: Any, place: str) -> None:
        self._scale, self._place, self._is_done = scale, place, False
        self._node = weakref.ref(node)  # which has this hook, and may be dropped without a backward

    def __call__(self, returned: Sequence[torch.Tensor | None], given: Sequence[torch.Tensor | None]) -> None:
        node, is_done, self._is_done = self._node(), self._is_done, True
        if node is None or is_done or not any(map(_is_one, returned)) or any(map(_is_one, given)):
            return
        brought = node.apply(*(None if one is None else torch.zeros_like(one) for one in given))
        brought = brought if isinstance(brought, tuple) else (brought,)
        if any(is_needed and _is_one(one) for one, is_needed in zip(brought, node.needs_input_grad)):
            raise StageError(
                f"{self._place}: {function_of(node).__name__} brings in a gradient of 1, as for an auxiliary loss. The pipeline "
                f"multiplies its losses by {self._scale.value:g}, but this one does not go through them. Multiply it by "
                "bpipe.loss_scale() before, also where you divide it by the number of microbatches yourself (in place of that), or "
                "give the schedule scale_grads=False and divide all gradients yourself"
            )


def _is_one(gradient: torch.Tensor | None) -> bool:
    return type(gradient) is torch.Tensor and gradient.numel() > 0 and bool((gradient == 1).all())  # fake tensors have no values


def _state(parameter: torch.Tensor) -> tuple[int, int]:
    """Return what a change of a parameter's gradient changes."""
    gradient = parameter.grad
    return (0, 0) if gradient is None else (id(gradient), version_of(gradient))
