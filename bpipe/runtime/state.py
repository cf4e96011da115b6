"""What a forward finds in its modules, so that another one can find the same: attributes, containers, buffers, generators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.errors import StageError
from bpipe.memory.storages import keys_of
from bpipe.runtime.checksums import Sum, is_awaited, sum_of_bits
from bpipe.runtime.contents import SMALL_BYTES
from bpipe.runtime.copies import Copies, Values, is_plain
from bpipe.runtime.differences import Constants, Differences
from bpipe.runtime.generators import Drawn, GlobalNumPy, python
from bpipe.runtime.reachable import Place, Reachable

__all__: list[str] = []

BATCH = "the step's batch"
Mode = tuple[bool, ...]
Watched = tuple[str, torch.Tensor, int]  # a tensor's name, and its version when it was looked at


class Learned:
    """What is known of a stage whose forwards run twice, from microbatch to microbatch and from step to step.

    Args:
        roots: what runs: modules and, on the last stage, the loss function.
    """

    def __init__(self, roots: Sequence[Any]) -> None:
        self.roots = roots
        self.written: dict[Mode, set[tuple[int, Any]]] = {}  # places of large tensors, as the first forward of a mode wrote them
        self.numpy = GlobalNumPy()


class Shared:
    """What the microbatches of a stage share during a step: copies of what has the same value for several of them."""

    def __init__(self) -> None:
        self._copies, self._values = Copies(()), list[torch.Tensor]()

    def copies(self, tensors: Sequence[torch.Tensor]) -> Copies:
        if not self._copies.is_of(tensors):
            self._copies, self._values = Copies(tensors), []
        return self._copies

    def values(self, copies: Copies) -> Values:
        """What is in storages now: another copy only if that has changed, where comparing waits for no device."""
        values = copies.take()
        if any(is_awaited(group.device) for group in values):
            return values
        if not self._values or copies.differing(self._values, values):
            self._values = values
        return self._values


class State:
    """What one forward finds. To be made before it runs.

    Args:
        name: the microbatch, for messages.
        learned: what is known of its stage.
        shared: with the other microbatches of the step.
        device: where it computes.
        foreign: storages that are no activations, and what they are: the batch is left alone.

    Raises:
        StageError: a buffer is not initialised yet.
    """

    def __init__(self, name: str, learned: Learned, shared: Shared, device: torch.device, foreign: Mapping[int, str]) -> None:
        found = Reachable(learned.roots)
        self._name, self._learned, self._contents, self._places = name, learned, found.contents, found.places
        self._mode = tuple(found.mode)
        self._drawn = Drawn(device, [python(), learned.numpy, *found.sources])
        tensors = [(_name_of(found.places[key]), one) for key, one in found.tensors.items() if one.device.type != "meta"]
        for where, tensor in tensors:
            if is_lazy(tensor):
                raise StageError(f"{name} cannot be recomputed: {where} is not initialised. Let the stage run once before")
        tensors = [(where, tensor) for where, tensor in tensors if not _is_of_batch(tensor, foreign)]
        self._odd = [tensor for _, tensor in tensors if not _is_fixed(tensor) and not is_plain(tensor)]
        plain = [(where, tensor) for where, tensor in tensors if not _is_fixed(tensor) and is_plain(tensor)]
        self._copies = shared.copies([tensor for _, tensor in plain if self._is_copied(tensor)])
        self._copied = [tensor for _, tensor in plain if tensor in self._copies]
        self._before, self._after = shared.values(self._copies), list[Sum]()
        self._odd_values = [tensor.detach().clone() for tensor in self._odd]
        self._parameters: list[Watched] = [(f"the parameter {where}", one, _version(one)) for where, one in found.parameters]
        uncopied = [(f"the tensor {where}", one, _version(one)) for where, one in tensors if not self._is_restored(one)]
        self._uncopied: list[Watched] = uncopied
        self._written: set[int] = set()

    def constants(self) -> Constants:
        """What no forward of this stage should write, as it is now."""
        return Constants(one for one in (*self._uncopied, *self._parameters) if not one[1].requires_grad and _is_dense(one[1]))

    def _is_copied(self, tensor: torch.Tensor) -> bool:
        num_bytes = tensor.untyped_storage().nbytes()
        if num_bytes <= SMALL_BYTES or self._mode not in self._learned.written:
            return num_bytes > 0
        written = self._learned.written[self._mode]
        return any((id(place.container), place.key) in written for place in self._places[id(tensor)])

    def _is_restored(self, tensor: torch.Tensor) -> bool:
        return not _is_fixed(tensor) and (not is_plain(tensor) or tensor in self._copies)

    def has_run(self) -> None:
        """The forward has run: note what it wrote.

        Raises:
            StageError: it wrote something that another forward cannot find as it was.
        """
        _check_unwritten(self._parameters, f"{self._name} cannot be recomputed: its forward writes {{}}")
        _check_unwritten(self._uncopied, f"{self._name} cannot be recomputed: its forward writes {{}}, which earlier ones did not")
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
        """Let another forward find the same, and leave what is there now as it is.

        Raises:
            StageError: something cannot be as it was, or the other forward did something else.
        """
        _check_unwritten(self._uncopied, f"{self._name} cannot be recomputed: a forward after its first one has written {{}}")
        if not self._copies.is_whole():
            raise StageError(f"{self._name} cannot be recomputed: the memory of a buffer or attribute was given up since")
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
            f"{what} wrote a buffer or tensor attribute that is also reached in a way that bpipe does not see (a closure, a "
            "global, a tuple). Reach it through the module's attribute, or evict instead (by='evict')",
        )
        _check_unwritten(self._uncopied, f"{what} writes {{}}, which the first did not")
        if self._written:
            message = f"{what} left other values in a buffer or attribute than the first. {WAY_OUT}"
            differences.compare(self._after, map(sum_of_bits, values), message)

    @contextmanager
    def _filled(self, swapped: set[int], values: Values) -> Iterator[None]:
        """Put what the forward found in its place; in the end, what is there now."""
        contents = [(content, content.now()) for content in self._contents]
        try:
            for content, now in contents:
                if now is not content.before:
                    content.kind.fill(content.container, content.before)
            for tensor in self._copied:
                if tensor.untyped_storage()._cdata in swapped:
                    value = self._copies.among(values, tensor)
                    value.__dict__.update(tensor.__dict__)
                    self._put(tensor, value)
            for tensor, value in zip(self._odd, self._odd_values):
                self._put(tensor, value)
            yield
        finally:
            for content, now in contents:
                if not content.kind.is_same(content.container, now):
                    content.kind.fill(content.container, now)

    def _put(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        for place in self._places[id(tensor)]:
            if place.put is not None:
                place.put(place.container, place.key, value)


WAY_OUT = (
    "It reads something that is not restored (docs/recomputation.md): a generator, counter or state that no attribute of the "
    "stage's modules holds, or an operation that is not deterministic (torch.use_deterministic_algorithms). Make it a buffer or an "
    "attribute of the module, or evict instead (by='evict')"
)


def _check_unwritten(watched: Iterable[Watched], problem: str) -> None:
    for name, tensor, version in watched:
        if _version(tensor) != version:
            raise StageError(
                f"{problem.format(name)}. Let it write the same buffers each time, and no parameter, or evict instead (by='evict')"
            )


def _is_of_batch(tensor: torch.Tensor, foreign: Mapping[int, str]) -> bool:
    """Whether a tensor that somebody keeps is what the step was given."""
    return any(foreign.get(key) == BATCH for key in keys_of([tensor]))


def _is_fixed(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for itself: a trainable one gets its gradient there."""
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_inference()


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _name_of(places: Iterable[Place]) -> str:
    return next((str(place.key) for place in places), "")
