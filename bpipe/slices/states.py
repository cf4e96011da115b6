"""What the slices of a sequence hand on to later slices on the same stage: forwards take states, and backwards return gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from bpipe.backward.new_gradients import owned
from bpipe.comm.wire.message import flatten_message, unflatten_message
from bpipe.device.generators import Source
from bpipe.engine.microbatch_state import MicrobatchState, MicrobatchStates, SliceState
from bpipe.errors import StageError
from bpipe.memory.saved.joined import Casts, keeping_pieces
from bpipe.model.microbatch import tensors_in
from bpipe.recomputation.reachable import Reachable
from bpipe.slices.randomness import Randomness, roots_of
from bpipe.slices.reentrant import check_checkpoints

__all__: list[str] = []


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
        """Return what the earlier slices of the sequence have left, the first one first; raise a StageError if one was changed."""
        found = [earlier.left for earlier in self._microbatches.before(state, self._slices)]
        assert None not in found, "slices of a sequence run forward in order, and backward in the opposite order"
        states = [left for left in found if left is not None]
        if any(left.is_changed for left in states):
            what = "gradients would be wrong" if self._has_backward else "it is not what that slice has left"
            raise StageError(
                f"{state.name}: the state of an earlier slice was changed in place, so {what}. Return a new tensor as the state, "
                "or clone what is in `past` first"
            )
        return states

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
            raise StageError(
                f"{name} ran {found.norm} in its forward (BatchNorm or InstanceNorm?), whose statistics are those of a slice and "
                "not of the whole sequence: normalise by features, as LayerNorm does, or train without slices"
            )

    def take(self, result: object, state: MicrobatchState, casts: Casts) -> tuple[Any, list[torch.Tensor]]:
        """Return the output in a stage's result, and its state for later slices, in which what was cast stands for what it was."""
        output, tree, tensors = split_result(result, state.name)
        tensors = [casts.get(id(tensor), (None, tensor))[1] for tensor in tensors]
        if state.microbatch == 1 and self._has_backward:  # the first one with an earlier slice; the others are alike
            check_checkpoints(tensors_in(output), tensors, state.name)
        if state.microbatch % self._slices < self._slices - 1:
            left = SliceState.of(tree, tensors, keeps_copies=state.microbatch < self._slices)
            if state.left is not None:  # a second forward makes the same again, which its graph may have saved
                left.gradients = state.left.gradients
            state.left = left
            return output, tensors
        if not self._has_backward:
            self._microbatches.release(self._microbatches.before(state, self._slices))
        return output, []

    def hand_back(self, gradients: list[torch.Tensor | None], state: MicrobatchState) -> tuple[int, int]:
        """Give the earlier slices their part of the gradients of a backward's inputs, and leave the others in the list.

        Returns:
            The bytes of the gradients that are the first ones for their tensors, and of those that came for this slice's state.
        """
        earlier, collected, given_bytes = self.before(state), 0, 0
        if state.left is not None:
            collected, state.left = _bytes_of(state.left.gradients), None
        begin = len(gradients) - sum(len(left.gradients) for left in earlier)
        given, gradients[begin:] = owned(gradients[begin:]), []
        for left in earlier:
            end, before = len(left.gradients), _bytes_of(left.gradients)
            left.add(given[:end])
            given, given_bytes = given[end:], given_bytes + _bytes_of(left.gradients) - before
        return given_bytes, collected


def _bytes_of(gradients: Sequence[torch.Tensor | None]) -> int:
    return sum(gradient.nbytes for gradient in gradients if gradient is not None)
