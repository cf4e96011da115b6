"""How stages are called that take slices: what earlier slices have left is the argument `past`, and they return (output, state)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from bpipe.engine.conventions import Call, Convention, Gradients
from bpipe.engine.microbatch_state import MicrobatchState
from bpipe.engine.setup import Setup, modules_of
from bpipe.errors import StageError
from bpipe.memory.saved.joined import Casts
from bpipe.model.stage import find_mesh
from bpipe.slices.protocol import PAST
from bpipe.slices.sequence_loss import Join, SequenceLoss, checked_sum
from bpipe.slices.states import Sequences, past_of

__all__: list[str] = []


class PastStates(Convention):
    """The convention of slices.

    Args:
        join: joins the outputs of slices for the loss; None if `loss_fn` returns the sum of a slice's losses and their count.
        setup: of the step.
    """

    def __init__(self, join: Join | None, setup: Setup) -> None:
        slices, traffic = setup.plan.slices, setup.traffic
        self._sequences = Sequences(
            traffic.microbatches,
            slices,
            traffic.transport.device,
            has_backward=setup.has_backward,
            num_close=slices * len(setup.stages) if setup.is_learning else 0,
        )
        self._setup, self._joins, self._loss = setup, join is not None, SequenceLoss(join, setup)
        self._casts: Casts = {}  # of the forward that runs

    def entering(self, state: MicrobatchState) -> tuple[list[torch.Tensor], list[bool]]:
        earlier = self._sequences.checked_before(state)
        return [tensor for left in earlier for tensor in left.tensors], [needed for left in earlier for needed in left.is_needed]

    def arguments(self, call: Call, values: Mapping[str, Any], entered: Sequence[torch.Tensor]) -> None:
        if PAST in call.kwargs:
            raise StageError("step(past=...): `past` is what the pipeline gives to stages that take slices; use another name")
        earlier = self._sequences.before(call.state)
        call.kwargs = {**call.kwargs, PAST: past_of(earlier, entered, partial(find_mesh, call.stage))}
        call.shapes += f" after {len(earlier)} slices, {sum(tensor.nbytes for tensor in entered)} bytes"

    @contextmanager
    def around(self, call: Call) -> Iterator[None]:
        past = [tensor for left in self._sequences.before(call.state) for tensor in left.tensors]
        if past and call.stash is not None:
            call.stash.go_on_after(past)
        sets_hooks = call.saves and call.stash is None
        with self._sequences.forward(call.state.name, call.parts.modules, sets_hooks=sets_hooks) as self._casts:
            yield

    def taken(self, call: Call, result: Any) -> Any:
        output, call.left = self._sequences.take(result, call.state, self._casts)
        self._casts = {}
        if call.state.left is not None and call.stash is not None:
            call.stash.leave(call.state.left.tensors)
        return output

    def loss(self, call: Call, compute: Callable[[], Any]) -> Any:
        if self._joins and not call.state.units.are_slices:
            return compute()
        self._loss.leave(call, call.result if self._joins else self._sum(call, compute))
        return None

    def _sum(self, call: Call, compute: Callable[[], Any]) -> Any:
        """Return the sum of a slice's losses, and their count; what they are divided by is not known yet."""
        loss_fn, name = self._setup.given.loss_fn, f"the loss of {call.state.unit}"
        with self._sequences.watching(name, list(modules_of(loss_fn)), [loss_fn]), self._setup.loss_scale.of_loss(None):
            return checked_sum(compute(), call.state.unit)

    def finish(self, call: Call) -> None:
        self._loss.finish(call)

    def gradients(self, state: MicrobatchState) -> Gradients:
        output, state.output = state.output, None
        return [*(() if state.left is None else state.left.summed()), *(() if output is None else output.gradients)]

    def give_back(self, state: MicrobatchState, gradients: Gradients) -> tuple[int, int]:
        return self._sequences.hand_back(gradients, state)
