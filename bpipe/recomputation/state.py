"""Save the state that a forward finds, so that another forward finds the same: attributes, buffers, generators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from bpipe.device.generators import PYTHON, Drawn, GlobalNumPy
from bpipe.errors import StageError
from bpipe.model.state.checksums import Sum, is_awaited, sum_of_bits, sum_of_memory
from bpipe.model.state.contents import SMALL_BYTES
from bpipe.model.state.reachable import Reachable
from bpipe.recomputation.copies import Copies, Values
from bpipe.recomputation.differences import Constants, Differences
from bpipe.recomputation.restorable import Restorable, Written
from bpipe.torch_private.owners_and_versions import address_of, version_of

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
        self._cannot, self._learned, self._shared = f"{name} cannot be recomputed", learned, shared
        self._contents, self._containers, self._places, self._mode = found.contents, found.containers, found.places, found.mode
        self._drawn = Drawn(device, [PYTHON, learned.numpy, *found.sources])
        tensors = shared.restorable(name, found, learned.written.get(found.mode), non_activations)
        self._odd, self._copied, self._copies = tensors.odd, tensors.copied, tensors.copies
        self._before, self._after = shared.values(self._copies), list[Sum]()
        self._odd_values = [tensor.detach().clone() for tensor in self._odd]
        self._parameters, self._uncopied = Versions("the parameter", found.parameters), Versions("the tensor", tensors.uncopied)
        self._contained, self._unversioned = Versions("the tensor", tensors.contained, IN_ATTRIBUTES), tensors.unversioned
        self._small = [one for one in (*tensors.contained, *tensors.unversioned) if _is_dense(one[1]) and _is_small(one[1])]
        self._sums = self._sums_of_small()
        self._written: set[int] = set()

    def constants(self) -> Constants:
        """Return the tensors that no forward of this stage should write, with their present values."""
        watched = [*self._uncopied.watched(), *self._parameters.watched()]
        of_containers = [*self._contained.watched(), *((f"the tensor {name}", one, None) for name, one in self._unversioned)]
        watched += [one for one in of_containers if not _is_small(one[1])]
        return Constants([one for one in watched if not one[1].requires_grad and _is_dense(one[1])])

    def _sums_of_small(self) -> list[Sum]:
        return [sum_of_memory(tensor.detach()) for _, tensor in self._small]

    def has_run(self, differences: Differences) -> None:
        """Note which tensors the forward wrote, once it has run.

        Raises:
            StageError: it wrote a tensor that cannot be restored for another forward.
        """
        self._parameters.check(f"{self._cannot}: its forward writes {{}}")
        self._uncopied.check(f"{self._cannot}: its forward writes {{}}, which earlier ones did not")
        self._check_contained("its forward", differences)
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
        found = [tensor for tensor in self._copied if address_of(tensor.untyped_storage()) in written]
        large = [one for one in found if one.untyped_storage().nbytes() > SMALL_BYTES]
        self._learned.written[self._mode] = {(id(place.container), place.key) for one in large for place in self._places[id(one)]}

    @contextmanager
    def again(self, differences: Differences) -> Iterator[None]:
        """Let another forward find the same state, and restore the present state in the end.

        Raises:
            StageError: some state cannot be restored, or the other forward behaved differently.
        """
        self._uncopied.check(f"{self._cannot}: {{}} was written since its first forward")
        self._containers, self._contained = [one.now() for one in self._containers], self._contained.now()  # hooks may change them
        self._sums = self._sums_of_small()
        if not self._copies.is_whole():
            raise StageError(
                f"{self._cannot}: the memory of a buffer or attribute was freed or resized since. Let the "
                "module keep that tensor and write into it, or evict instead (by='evict')"
            )
        now = self._copies.take()
        awaited = any(is_awaited(group.device) for group in now)
        swapped = self._copies.all() if awaited else self._written | self._copies.differing(self._before, now)
        values = [group.clone() for group in self._before] if swapped and not awaited else self._before
        with self._drawn.again(), self._filled(swapped, values):
            yield
        what = f"{self._cannot}: its second forward"
        differences.compare(
            now,
            self._copies.take(),
            f"{what} wrote a buffer or tensor attribute that is also reachable in a way that bpipe does not see (a closure, a "
            "global). Access it only through the module's attribute, or evict instead (by='evict')",
        )
        self._uncopied.check(f"{what} writes {{}}, which the first did not")
        self._check_contained("its second forward", differences)
        if self._written:
            message = f"{what} left other values in a buffer or attribute than the first. {WAY_OUT}"
            differences.compare(self._after, map(sum_of_bits, values), message)

    @contextmanager
    def _filled(self, swapped: set[int], values: Values) -> Iterator[None]:
        """Restore the state that the forward found and, in the end, the present state."""
        now = self._contents.now()
        tensors = [tensor for tensor in self._copied if address_of(tensor.untyped_storage()) in swapped]
        try:
            if now is not self._contents:
                self._shared.forget_outdated()
                self._contents.fill()
            for tensor in tensors:
                value = self._copies.among(values, tensor)
                value.__dict__.update(tensor.__dict__)
                self._put(tensor, value)
            for tensor, value in zip(self._odd, self._odd_values):
                self._put(tensor, value)
            yield
        finally:
            for tensor in (*tensors, *self._odd):
                self._put(tensor, tensor)
            now.fill()

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        for place in self._places[id(tensor)]:
            if place.put is not None:
                place.put(place.container, place.key, value)

    def _check_contained(self, forward: str, differences: Differences) -> None:
        self._contained.check(f"{self._cannot}: {forward} writes {{}}")
        for (name, _), before, now in zip(self._small, self._sums, self._sums_of_small()):
            problem = f"{self._cannot}: {forward} writes the tensor {name}"
            differences.compare([before], [now], f"{problem}. {IN_ATTRIBUTES}, or evict instead (by='evict')")
        changed = next((one.name for one in self._containers if not one.is_same()), None)
        if changed is not None:
            raise StageError(
                f"{self._cannot}: {forward} changes {changed}. What is in a container or a slot is not restored: keep it in a "
                "buffer, give the attribute a new container (self.seen = [*self.seen, new]), fill it before training, or evict "
                "instead (by='evict')"
            )


WAY_OUT = (
    "It reads state that is not restored (docs/recomputation.md): a generator, counter or other state that no attribute of the "
    "stage's modules holds, or an operation that is not deterministic (torch.use_deterministic_algorithms). Make it a buffer or an "
    "attribute of the module, or evict instead (by='evict')"
)


ONLY_BUFFERS = "Let it write the same buffers each time, and no parameters"
IN_ATTRIBUTES = "What is in a container or a slot is not restored: keep it in an attribute or a buffer, and in nothing else"


class Versions:
    """The versions of tensors when this is made."""

    def __init__(self, kind: str, tensors: Sequence[Named], way_out: str = ONLY_BUFFERS) -> None:
        self._kind, self._tensors, self._way_out = kind, tensors, way_out
        self._versions = [version_of(one) for _, one in tensors]

    def now(self) -> Versions:
        """Return the present versions of the same tensors."""
        return Versions(self._kind, self._tensors, self._way_out)

    def watched(self) -> Iterator[tuple[str, torch.Tensor, int | None]]:
        """Return the tensors with their names and versions."""
        return ((f"{self._kind} {name}", one, version) for (name, one), version in zip(self._tensors, self._versions))

    def check(self, problem: str) -> None:
        """Check that nothing has written the tensors."""
        if self._versions != [version_of(one) for _, one in self._tensors]:
            name = next(name for name, one, version in self.watched() if version_of(one) != version)
            raise StageError(f"{problem.format(name)}. {self._way_out}, or evict instead (by='evict')")


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() <= SMALL_BYTES


def _is_dense(tensor: torch.Tensor) -> bool:
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_plain and not (tensor.is_quantized or tensor.is_nested)
