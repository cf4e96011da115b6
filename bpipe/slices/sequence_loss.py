"""The loss of a sequence, computed once for all of its slices, behind the forward of the last one.

The slices of a sequence run backward in the opposite order, so no backward has begun by then. Each slice leaves a copy of what the
loss needs of it: its output, or with `loss_of_slices` the sum and the count of its own losses. The loss of all of them is the
user's function of the joined outputs, or the sum by the count. Its backward runs at once, and puts the gradient of each copy into
the copy's place, where it waits for the backward of its slice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import chain
from numbers import Real
from typing import Any, TypeGuard

import torch

from bpipe.backward.autograd import Graph, InputGrads, edges_of
from bpipe.backward.without_loss import checked_loss
from bpipe.engine.conventions import Call
from bpipe.engine.setup import Setup
from bpipe.errors import StageError
from bpipe.memory.saved.stash import Stash
from bpipe.memory.saved.storages import MessageBytes, keys_of
from bpipe.model.microbatch import tensors_in
from bpipe.model.pytree import mapped, tensors_of

__all__: list[str] = []

Join = Callable[[Sequence[Any], int], Any]  # returns the output of a sequence, given those of its slices and the first one's number


class LossInput:
    """What a slice leaves for the loss of its sequence, and then its gradients, in the same memory.

    Args:
        value: of the slice.
        trains: whether its tensors get gradients, where they need them.

    Attributes:
        loss_bytes: of the last slice of a sequence, the bytes that the loss took while it was computed, if they were measured.
    """

    def __init__(self, value: Any, *, trains: bool) -> None:
        self.value = mapped(lambda tensor: tensor.detach().clone().requires_grad_(trains and tensor.requires_grad), value)
        self.gradients: list[torch.Tensor | None] = []
        self.loss_bytes = 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Its tensors, in the order of its value's."""
        return tensors_of(self.value)

    def keep_gradients(self) -> None:
        """Keep the gradients that the loss's backward has left, in the memory of the values, which nothing needs any more."""
        for leaf in self.tensors:
            if leaf.requires_grad:
                self.gradients.append(None if leaf.grad is None else leaf.detach().copy_(leaf.grad))
                leaf.grad = None


class SequenceLoss:
    """Computes the losses of a rank's sequences.

    Args:
        join: joins the outputs of slices; None if `loss_fn` returns the sum of a slice's losses and their count.
        setup: of the step.
    """

    def __init__(self, join: Join | None, setup: Setup) -> None:
        self._join, self._setup = join, setup
        self._unnoticed = {*setup.stages} if setup.has_backward and join is not None else set[int]()

    def leave(self, call: Call, value: Any) -> None:
        """Leave what a slice's loss is computed from; its backward will begin there."""
        call.left = [*call.left, *tensors_of(value)]
        if call.state.output is None:  # the second of two forwards finds the gradients
            call.state.output = LossInput(value, trains=self._setup.has_backward)
        if call.stash is not None:
            call.stash.leave(call.state.output.tensors)

    def finish(self, call: Call) -> None:
        """Compute the loss behind the forward of a sequence's last slice, and the gradients of what all of them have left."""
        state, microbatches = call.state, self._setup.traffic.microbatches
        sequence = state.microbatch // state.units
        units = state.units.of(sequence)
        if state.output is None or state.microbatch < units[-1]:
            return
        slices = [microbatches[state.stage, unit] for unit in units]
        inputs: list[LossInput] = [slice_.output for slice_ in slices]
        with torch.set_grad_enabled(self._setup.has_backward), self._setup.loss_scale.of_loss(self._setup.given.loss_gradient):
            loss = self._loss(call, inputs, f"microbatch {sequence}")
            if self._setup.has_backward:
                gradient = torch.full_like(loss, self._setup.given.loss_gradient)
                Graph(edges_of([loss]), InputGrads(), has_common_hooks=True).run_backward([gradient])
        call.loss = loss.detach()
        for slice_, left in zip(slices, inputs):
            left.keep_gradients()
            if not self._setup.has_backward:
                slice_.output = None
                if slice_ is not state:
                    microbatches.drop(slice_)

    def _loss(self, call: Call, inputs: Sequence[LossInput], name: str) -> torch.Tensor:
        """Return the loss of a sequence, and note what it takes."""
        given, stage, whole = self._setup.given, call.state.stage, None
        # Also in the first of two forwards, which cannot tell whether the second one will be followed.
        stash = None if call.saves and call.stash is None else Stash(name, self._setup.non_activations)
        is_new = stage in self._unnoticed
        self._unnoticed.discard(stage)
        with ExitStack() as around:
            if is_new:
                around.enter_context(self._setup.noticing(stage, f"stage {stage}, {name}"))
            if stash is not None and self._setup.has_backward:
                around.enter_context(stash.capture())
            if self._join is None:
                loss = _mean_of([left.value for left in inputs])
            else:
                whole = self._join([left.value for left in inputs], call.state.microbatch + 1 - len(inputs))
                assert given.loss_fn is not None and given.targets is not None, "a slice has left something for the loss"
                loss = checked_whole(given.loss_fn(whole, given.targets[call.state.microbatch], **given.loss_kwargs))
        loss = checked_loss(loss, name, trains=self._setup.has_backward)
        if is_new and self._setup.is_learning:
            self._setup.loss_scale.watch(edges_of([loss]), f"stage {stage}, {name}")
        if stash is not None:
            known = self._setup.non_activations.keys() | keys_of(chain.from_iterable(left.tensors for left in inputs))
            taken = MessageBytes.of([*stash.tensors, *tensors_in(whole), loss]).storages
            inputs[-1].loss_bytes = sum(size for key, (_, size) in taken.items() if key not in known)
        return loss


def _mean_of(slices: Sequence[tuple[torch.Tensor, Any]]) -> torch.Tensor:
    """Return the sum of some losses by their count; 0 if there are none."""
    total = sum(count for _, count in slices)
    loss: torch.Tensor = sum(one.reshape(()) for one, _ in slices) * (total != 0) / (total + (total == 0))
    return loss


def checked_whole(loss: Any) -> Any:
    """Return the loss of a whole sequence; raise a StageError if it is that of slices."""
    if isinstance(loss, tuple):
        raise StageError(
            "loss_fn returned a tuple: to compute the losses of slices one by one, as a sum and a count of each, give the schedule "
            "options=bpipe.Options(loss_of_slices=True); else return one number, the loss of the whole sequence"
        )
    return loss


def checked_sum(loss: Any, where: str) -> tuple[torch.Tensor, Any]:
    """Return the sum of a slice's losses, and their count; raise a StageError if the user's function returned something else."""
    total, count = loss if isinstance(loss, tuple) and len(loss) == 2 else (loss, None)
    count = float(count) if isinstance(count, Real) else count
    if not _is_number(total) or not (isinstance(count, float) or (_is_number(count) and not count.requires_grad)):
        raise StageError(
            f"loss_fn returned a {type(loss).__qualname__} for {where}: with loss_of_slices=True it returns two numbers, the sum "
            "of a slice's losses and their count, which needs no gradient. Leave loss_of_slices out for a loss of whole sequences"
        )
    return total, count


def _is_number(value: Any) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.numel() == 1
