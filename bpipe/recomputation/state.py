"""Save the state that a forward finds, so that another forward finds the same: attributes, containers, buffers, generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bpipe.errors import StageError
from bpipe.recomputation.checksums import Sum, is_awaited, sum_of_bits
from bpipe.recomputation.contents import SMALL_BYTES
from bpipe.recomputation.copies import Copies, Values
from bpipe.recomputation.differences import Constants, Differences
from bpipe.recomputation.generators import PYTHON, Drawn, GlobalNumPy
from bpipe.recomputation.reachable import Reachable
from bpipe.recomputation.restorable import Restorable, Written

__all__: list[str] = []

Mode = tuple[bool, ...]
Named = tuple[str, torch.Tensor]


class Learned:
    """Everything known about a stage whose forwards run twice, kept between microbatches and steps."""

    def __init__(self, makeup: int) -> None:
        self.makeup = makeup
        self.written: dict[Mode, Written] = {}  # places of large tensors, as the first forward of a mode wrote them
        self.numpy = GlobalNumPy()


class Shared:
    """The state that the microbatches of a stage share during a step, as long as none of it changes."""

    def __init__(self, roots: Sequence[Any]) -> None:
        self._roots = roots
        self._found: Reachable | None = None
        self._restorable: Restorable | None = None
        self._copies, self._values = Copies(()), list[torch.Tensor]()

    def found(self) -> Reachable:
        """Return the objects that are reachable now."""
        self.forget_outdated()
        self._found = self._found or Reachable(self._roots)
        return self._found

    def forget_outdated(self) -> None:
        """Forget the last search if it is outdated, so that it keeps no replaced objects alive."""
        if self._found is not None and not self._found.is_current():
            self._found = self._restorable = None

    def restorable(self, name: str, found: Reachable, written: Written | None, non_activations: Mapping[int, str]) -> Restorable:
        """Return the tensors of a search, grouped by how they are restored; the arguments are those of `Restorable`."""
        if self._restorable is None or not self._restorable.is_of(found, written):
            self._restorable = Restorable(name, found, written, non_activations, self._copies_of)
        return self._restorable

    def _copies_of(self, tensors: Sequence[torch.Tensor]) -> Copies:
        if not self._copies.is_of(tensors):
            self._copies, self._values = Copies(tensors), []
        return self._copies

    def values(self, copies: Copies) -> Values:
        """Return the present values of storages: a new copy only if they have changed, if comparing needs no wait for a device."""
        values = copies.take()
        if any(is_awaited(group.device) for group in values):
            return values
        if not self._values or copies.differing(self._values, values):
            self._values = values
        return self._values


class State:
    """The state that one forward finds; made before it runs."""

    def __init__(
        self, name: str, learned: Learned, shared: Shared, device: torch.device, non_activations: Mapping[int, str]
    ) -> None:
        found = shared.found()
        self._name, self._learned, self._shared = name, learned, shared
        self._contents, self._places, self._mode = found.contents, found.places, found.mode
        self._drawn = Drawn(device, [PYTHON, learned.numpy, *found.sources])
        tensors = shared.restorable(name, found, learned.written.get(found.mode), non_activations)
        self._odd, self._copied, self._copies = tensors.odd, tensors.copied, tensors.copies
        self._before, self._after = shared.values(self._copies), list[Sum]()
        self._odd_values = [tensor.detach().clone() for tensor in self._odd]
        self._parameters, self._uncopied = Versions("the parameter", found.parameters), Versions("the tensor", tensors.uncopied)
        self._written: set[int] = set()

    def constants(self) -> Constants:
        """Return the tensors that no forward of this stage should write, with their present values."""
        watched = [*self._uncopied.watched(), *self._parameters.watched()]
        return Constants([one for one in watched if not one[1].requires_grad and _is_dense(one[1])])

    def has_run(self) -> None:
        """Note which tensors the forward wrote, once it has run.

        Raises:
            StageError: it wrote a tensor that cannot be restored for another forward.
        """
        self._parameters.check(f"{self._name} cannot be recomputed: its forward writes {{}}")
        self._uncopied.check(f"{self._name} cannot be recomputed: its forward writes {{}}, which earlier ones did not")
        now = self._copies.take()
        awaited = any(is_awaited(group.device) for group in now)
        is_first = self._mode not in self._learned.written  # then large tensors were copied too, and comparing may wait
        written = self._copies.all() if awaited and not is_first else self._copies.differing(self._before, now)
        if is_first:
            self._learn(written)
        self._written = self._copies.all() if awaited else written
        self._after = list(map(sum_of_bits, now)) if self._written else []
        self._drawn.forget_unused()

    def _learn(self, written: set[int]) -> None:
        found = [tensor for tensor in self._copied if tensor.untyped_storage()._cdata in written]
        large = [one for one in found if one.untyped_storage().nbytes() > SMALL_BYTES]
        self._learned.written[self._mode] = {(id(place.container), place.key) for one in large for place in self._places[id(one)]}

    @contextmanager
    def again(self, differences: Differences) -> Iterator[None]:
        """Let another forward find the same state, and restore the present state in the end.

        Raises:
            StageError: some state cannot be restored, or the other forward behaved differently.
        """
        self._uncopied.check(f"{self._name} cannot be recomputed: a forward after its first one has written {{}}")
        if not self._copies.is_whole():
            raise StageError(f"{self._name} cannot be recomputed: the memory of a buffer or attribute was freed or resized since")
        now = self._copies.take()
        awaited = any(is_awaited(group.device) for group in now)
        swapped = self._copies.all() if awaited else self._written | self._copies.differing(self._before, now)
        values = [group.clone() for group in self._before] if swapped and not awaited else self._before
        with self._drawn.again(), self._filled(swapped, values):
            yield
        what = f"{self._name} cannot be recomputed: its second forward"
        differences.compare(
            now,
            self._copies.take(),
            f"{what} wrote a buffer or tensor attribute that is also reachable in a way that bpipe does not see (a closure, a "
            "global, a tuple). Access it only through the module's attribute, or evict instead (by='evict')",
        )
        self._uncopied.check(f"{what} writes {{}}, which the first did not")
        if self._written:
            message = f"{what} left other values in a buffer or attribute than the first. {WAY_OUT}"
            differences.compare(self._after, map(sum_of_bits, values), message)

    @contextmanager
    def _filled(self, swapped: set[int], values: Values) -> Iterator[None]:
        """Restore the state that the forward found and, in the end, the present state."""
        now = self._contents.now()
        try:
            if now is not self._contents:
                self._shared.forget_outdated()
                self._contents.fill()
            for tensor in self._copied:
                if tensor.untyped_storage()._cdata in swapped:
                    value = self._copies.among(values, tensor)
                    value.__dict__.update(tensor.__dict__)
                    self._put(tensor, value)
            for tensor, value in zip(self._odd, self._odd_values):
                self._put(tensor, value)
            yield
        finally:
            now.fill()

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        for place in self._places[id(tensor)]:
            if place.put is not None:
                place.put(place.container, place.key, value)


WAY_OUT = (
    "It reads state that is not restored (docs/recomputation.md): a generator, counter or other state that no attribute of the "
    "stage's modules holds, or an operation that is not deterministic (torch.use_deterministic_algorithms). Make it a buffer or an "
    "attribute of the module, or evict instead (by='evict')"
)


class Versions:
    """The versions of tensors when this is made."""

    def __init__(self, kind: str, tensors: Sequence[Named]) -> None:
        self._kind, self._tensors = kind, tensors
        self._versions = [one._version for _, one in tensors]

    def watched(self) -> Iterator[tuple[str, torch.Tensor, int]]:
        """Return the tensors with their names and versions."""
        return ((f"{self._kind} {name}", one, version) for (name, one), version in zip(self._tensors, self._versions))

    def check(self, problem: str) -> None:
        """Check that nothing has written the tensors."""
        if self._versions != [one._version for _, one in self._tensors]:
            name = next(name for name, one, version in self.watched() if one._version != version)
            raise StageError(
                f"{problem.format(name)}. Let it write the same buffers each time, and no parameters, or evict instead (by='evict')"
            )


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_inference()
