"""What the slices of a sequence hand on to later slices on the same stage: forwards take states, and backwards return gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from bpipe.comm.wire.message import flatten_message, unflatten_message
from bpipe.device.generators import Source
from bpipe.engine.microbatch_state import MicrobatchState, MicrobatchStates
from bpipe.errors import StageError
from bpipe.memory.saved.joined import Casts, keeping_pieces
from bpipe.memory.saved.storages import MessageBytes
from bpipe.model.microbatch import tensors_in
from bpipe.model.state.reachable import Reachable
from bpipe.slices.graph_check import NORM, check_graph
from bpipe.slices.randomness import Randomness, roots_of
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []

HALF = (torch.float16, torch.bfloat16)


def split_result(result: object, where: str) -> tuple[Any, str, list[torch.Tensor]]:
    """Return a stage's output, and its state split by `flatten_message`; raise a StageError if it has returned something else."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise StageError(
            f"{where}: a stage that takes slices returns (output, state), where state is what it wants back in `past` for the "
            f"later slices of the sequence, or None; this one returned a {type(result).__qualname__}"
        )
    output, value = result
    tree, tensors = flatten_message(value, f"the state of {where}")
    return output, tree, tensors


def past_of(states: Sequence[SliceState], tensors: Sequence[torch.Tensor], find_mesh: Callable[..., Any]) -> tuple[Any, ...]:
    """Put earlier slices' states together again, with other tensors in place of their own."""
    values, begin = [], 0
    for state in states:
        end = begin + len(state.tensors)
        values.append(unflatten_message(state.tree, tensors[begin:end], find_mesh))
        begin = end
    return tuple(values)


@dataclass
class SliceState:
    """What a slice has left on a stage for the later slices of its sequence.

    Args:
        tree: the state without its tensors.
        tensors: its tensors, without their graph.
        is_needed: for each tensor, whether it needs a gradient.
        versions: of the tensors, which no later slice may change; 0 for inference tensors, which have none.
        copies: of inference tensors, to compare them with.
        gradients: the sums of what later slices have given so far, one for each tensor that needs a gradient; None if nothing.
    """

    tree: str
    tensors: list[torch.Tensor]
    is_needed: list[bool]
    versions: list[int]
    copies: list[torch.Tensor]
    gradients: list[torch.Tensor | None]

    @classmethod
    def of(cls, tree: str, tensors: Sequence[torch.Tensor], *, keeps_copies: bool) -> SliceState:
        """Keep the state of a slice, as `flatten_message` has split it.

        Args:
            keeps_copies: whether to copy inference tensors: of one sequence in a step, as what is done in place is done to all.
        """
        is_needed = [tensor.requires_grad for tensor in tensors]
        kept = [tensor.detach() for tensor in tensors]
        copies = [tensor.clone() for tensor in kept if tensor.is_inference()] if keeps_copies else []
        return cls(tree, kept, is_needed, _versions(kept), copies, [None] * sum(is_needed))

    @property
    def is_changed(self) -> bool:
        """Whether a tensor was changed in place."""
        inference = [tensor for tensor in self.tensors if tensor.is_inference()]
        return _versions(self.tensors) != self.versions or not all(map(_is_same, inference, self.copies))

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add what a later slice gives to those tensors that need a gradient, in single precision at least.

        In half precision, a sum of many slices' gradients would lose more than the whole sequence's, whose kernels add in single
        precision. Later slices come in the same order in each step, so that the sums are the same to the bit.
        """
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                wide = gradient.float() if gradient.dtype in HALF else gradient
                known = self.gradients[place]
                is_part = gradient.nbytes < MessageBytes.of([gradient]).num_bytes  # as of one of joined keys, which would keep all
                self.gradients[place] = (wide.clone() if is_part else wide) if known is None else known + wide

    def summed(self) -> list[torch.Tensor | None]:
        """Return the gradients as the backward takes them."""
        needed = [tensor for tensor, is_needed in zip(self.tensors, self.is_needed) if is_needed]
        return [one if one is None else one.to(tensor.dtype) for one, tensor in zip(self.gradients, needed, strict=True)]


def _versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else version_of(tensor) for tensor in tensors]


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal; NaN is equal to itself."""
    return torch.equal(one, other) or bool(((one == other) | ((one != one) & (other != other))).all())


class Sequences:
    """The slices of the sequences of one rank: each forward gets what the earlier slices have left, and leaves its own state.

    Args:
        slices: into how many slices each sequence is cut.
        num_close: how many forwards are looked at closely for random numbers.
    """

    def __init__(
        self, microbatches: MicrobatchStates, slices: int, device: torch.device, *, has_backward: bool, num_close: int = 0
    ) -> None:
        self._microbatches, self._slices, self._device, self._has_backward = microbatches, slices, device, has_backward
        self._num_close = num_close
        self._generators: dict[tuple[int, ...], Sequence[Source]] = {}  # by the modules that run

    def before(self, state: MicrobatchState) -> list[SliceState]:
        """Return what the earlier slices of the sequence have left, the first one first."""
        found = [earlier.left for earlier in self._states_before(state)]
        assert None not in found, "slices of a sequence run forward in order, and backward in the opposite order"
        return found

    def _states_before(self, state: MicrobatchState) -> list[MicrobatchState]:
        first = state.microbatch - state.microbatch % self._slices
        return [self._microbatches[state.stage, slice_] for slice_ in range(first, state.microbatch)]

    def checked_before(self, state: MicrobatchState) -> list[SliceState]:
        """Return what the earlier slices have left; raise a StageError if that was changed in place."""
        found = self.before(state)
        if any(left.is_changed for left in found):
            what = "gradients would be wrong" if self._has_backward else "it is not what that slice has left"
            raise StageError(
                f"{state.name}: the state of an earlier slice was changed in place, so {what}. Return a new tensor as the state, "
                "or clone what is in `past` first"
            )
        return found

    @contextmanager
    def forward(self, name: str, modules: Sequence[torch.nn.Module], *, sets_hooks: bool) -> Iterator[Casts]:
        """Run a slice's forward: what it joins is saved in pieces, and it draws no random numbers that a backward depends on.

        Yields what the slice casts.
        """
        pieces = keeping_pieces(sets_hooks=sets_hooks) if self._has_backward else nullcontext[Casts]({})
        with self.watching(name, modules), pieces as casts:
            yield casts

    @contextmanager
    def watching(self, name: str, modules: Sequence[torch.nn.Module], functions: Sequence[Any] = ()) -> Iterator[None]:
        """Run the user's code for a slice that a backward depends on; raise a StageError if it draws random numbers.

        Each slice would draw other ones than the whole sequence. The first sequence of a step with new shapes is looked at closely.
        Later, a generator that no module or function refers to is not seen.

        Args:
            name: of the slice.
            modules: that may have generators.
            functions: likewise.
        """
        if not self._has_backward or self._slices == 1:  # which is the whole sequence
            yield
            return
        key = tuple(map(id, modules))
        if key not in self._generators:
            self._generators[key] = Reachable(roots_of((*modules, *functions))).sources
        found = Randomness(self._device, self._generators[key])
        self._num_close, is_close = max(0, self._num_close - 1), self._num_close > 0
        with found.closely(modules) if is_close else nullcontext(), found.states():
            yield
        if found.is_found:
            raise StageError(
                f"{name} drew random numbers in its forward (dropout?), and slices draw other ones than the whole sequence: set "
                "dropout to 0, or train without slices"
            )
        if found.norm:
            raise StageError(NORM.format(name, found.norm))

    def take(self, result: object, state: MicrobatchState, casts: Casts) -> tuple[Any, list[torch.Tensor]]:
        """Return the output in a stage's result, and its state for later slices, in which what was cast stands for what it was."""
        output, tree, tensors = split_result(result, state.name)
        tensors = [casts.get(id(tensor), (None, tensor))[1] for tensor in tensors]
        if state.microbatch == 1 < self._slices and self._has_backward:  # the first with an earlier slice; the others are alike
            check_graph(tensors_in(output), tensors, state.name)
        if state.microbatch % self._slices < self._slices - 1:
            left = SliceState.of(tree, tensors, keeps_copies=state.microbatch < self._slices)
            if state.left is not None:  # a second forward makes the same again, which its graph may have saved
                left.gradients = state.left.gradients
            state.left = left
            return output, tensors
        if not self._has_backward:
            for earlier in self._states_before(state):
                earlier.left = None
                self._microbatches.drop(earlier)
        return output, []

    def hand_back(self, gradients: Sequence[torch.Tensor | None], state: MicrobatchState) -> tuple[int, int]:
        """Give the earlier slices the gradients of what a forward has got of them, in its order.

        Returns:
            The bytes of the gradients that are the first ones for their tensors, and of those that came for this slice's state.
        """
        earlier = self.checked_before(state)
        given, given_bytes, own, state.left = iter(gradients), 0, state.left, None
        for left in earlier:
            before = _bytes_of(left.gradients)
            left.add(list(islice(given, len(left.gradients))))
            given_bytes += _bytes_of(left.gradients) - before
        return given_bytes, 0 if own is None else _bytes_of(own.gradients)


def _bytes_of(gradients: Sequence[torch.Tensor | None]) -> int:
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)
