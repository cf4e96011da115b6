"""Run a forward twice: the first run saves nothing, the second one finds the same state as the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bpipe.cleanup import keeping
from bpipe.errors import StageError
from bpipe.memory.saved.saved_tensor import untraced
from bpipe.memory.saved.stash import following
from bpipe.model.state.checksums import Checksum, checksum_of
from bpipe.recomputation.differences import Constants, Differences
from bpipe.recomputation.state import WAY_OUT, Learned, Shared, State
from bpipe.torch_private.owners_and_versions import version_of

__all__: list[str] = []


class Reruns:
    """The microbatches of one rank whose forward runs twice, during one step."""

    def __init__(self) -> None:
        self.differences = Differences()
        self._shared: dict[int, Shared] = {}  # by stage
        self._constants: dict[int, Constants] = {}

    def shared(self, stage: int, roots: Sequence[Any]) -> Shared:
        """Return the state that the microbatches of a stage share."""
        if stage not in self._shared:
            self._shared[stage] = Shared(roots)
        return self._shared[stage]

    def watch(self, stage: int, state: State) -> None:
        """Note tensors that no forward of the stage should write, in the first forward of the step."""
        if stage not in self._constants:
            self._constants[stage] = state.constants()

    def check(self) -> None:
        """Raise a StageError if the two runs of a forward did not do the same, after all have run twice."""
        self._shared.clear()  # a module may reach an object that knows this step: that cycle would keep it alive
        for stage, constants in self._constants.items():
            constants.compare(self.differences, f"stage {stage}")
        self.differences.check()


class Rerun:
    """The two forwards of one microbatch."""

    def __init__(
        self,
        stage: int,
        microbatch: int,
        given: Sequence[torch.Tensor],
        roots: Sequence[Any],
        learned: Learned,
        reruns: Reruns,
        device: torch.device,
        non_activations: Mapping[int, str],
    ) -> None:
        self._name = f"microbatch {microbatch} of stage {stage}"
        self._given = [(tensor, version_of(tensor)) for tensor in given if not tensor.is_inference()]
        self._state = State(self._name, learned, reruns.shared(stage, roots), device, non_activations)
        self._differences = reruns.differences
        self._returned: dict[str, Checksum] = {}
        reruns.watch(stage, self._state)

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run a forward that saves nothing; raise a StageError if it changes its input, or other state that cannot be restored."""
        with following(self._name), saved_tensors_hooks(lambda _: None, untraced(self._missing)):
            yield
        self._state.has_run(self._differences)
        self._check_input()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run a forward with the random numbers, buffers and attributes that the first one found, then restore the current ones."""
        self._check_input()
        with keeping(self._state.again(self._differences)):
            yield

    def returned(self, output: Any, loss: Any) -> None:
        """Store the result of the first forward, or compare it with the second one's, as far as no device is waited for."""
        for what, value in (("output", output), ("loss", loss)):
            checksum = checksum_of(value)
            first = self._returned.setdefault(what, checksum)
            message = f"{self._name} cannot be recomputed: its two forwards returned a different {what}. {WAY_OUT}"
            if first.outline != checksum.outline:
                raise StageError(f"{message}. The first: {' '.join(first.outline)}; the second: {' '.join(checksum.outline)}")
            self._differences.compare(first.sums, checksum.sums, message)

    def _check_input(self) -> None:
        if any(version_of(tensor) != version for tensor, version in self._given):
            raise StageError(
                f"{self._name} cannot be recomputed: its input was changed in place. Let the stage work on a clone of its input"
            )

    def _missing(self, packed: Any) -> torch.Tensor:
        raise StageError(
            f"{self._name} cannot be recomputed: it runs a backward, or torch.autograd.grad, inside its forward or its loss, and "
            "the first of the two forwards saves nothing for it. Evict instead (by='evict'), or give a budget in which its rank "
            "keeps its microbatches; a part without such a backward can be recomputed, as a stage of its own"
        )
