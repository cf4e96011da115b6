"""A forward that runs twice: the first time nothing is saved, the second time all is as it was the first time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy

from bpipe.cleanup import keeping
from bpipe.errors import StageError
from bpipe.memory.stash import following

__all__: list[str] = []


class _Buffer(NamedTuple):
    """A buffer of a module, where it is to be found."""

    owner: nn.Module
    name: str

    @property
    def tensor(self) -> torch.Tensor | None:
        return self.owner._buffers.get(self.name)

    def state(self) -> tuple[int, int]:
        """Another one once something was written to it, or it was replaced."""
        tensor = self.tensor
        return id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version


class Writing:
    """The buffers that forwards write, such as BatchNorm's statistics: learned in the first one of a mode (train or eval, module
    by module), for which all are copied.

    Args:
        modules: what runs.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._written: dict[tuple[bool, ...], list[_Buffer]] = {}  # by mode

    @contextmanager
    def watched(self, name: str, values: dict[_Buffer, torch.Tensor | None]) -> Iterator[None]:
        """While a forward runs, note what it writes.

        Args:
            name: the microbatch, for messages.
            values: to be filled with what the forward found in the buffers that it writes.

        Raises:
            StageError: it wrote a parameter, or a buffer that the mode's first forward left alone.
        """
        parts = [part for module in self._modules for part in module.modules()]
        mode = tuple(part.training for part in parts)
        parameters = [(name, p, p._version) for part in parts for name, p in part.named_parameters(recurse=False) if not is_lazy(p)]
        buffers = [_Buffer(part, name) for part in parts for name in part._buffers]
        candidates = self._written.get(mode, buffers)
        before = {buffer: buffer.state() for buffer in buffers}
        copies = {id(buffer.tensor): None if buffer.tensor is None else buffer.tensor.clone() for buffer in candidates}
        found = {buffer: copies[id(buffer.tensor)] for buffer in candidates}  # modules that share a buffer share its copy
        yield
        written = {buffer for buffer in buffers if buffer.state() != before[buffer]}
        odd = [f"the buffer {buffer.name}, which earlier ones did not" for buffer in sorted(written - {*candidates}, key=_name)]
        odd += [f"the parameter {parameter}" for parameter, p, version in parameters if p._version != version]
        if odd:
            raise StageError(
                f"{name} cannot be recomputed: its forward writes {odd[0]}. Let it write the same buffers each time, and no "
                "parameter, or evict instead (by='evict')"
            )
        if mode not in self._written:  # some operations, BatchNorm's among them, write without counting it
            self._written[mode] = [one for one in candidates if one in written or not _are_equal(one.tensor, found[one])]
        values.update((buffer, found[buffer]) for buffer in self._written[mode])


class Rerun:
    """The two forwards of one microbatch.

    Args:
        name: the microbatch, for messages.
        given: the tensors that the forward gets.
        writing: what the module writes.
        device: where it computes.
    """

    def __init__(self, name: str, given: Sequence[torch.Tensor], writing: Writing, device: torch.device) -> None:
        self._name, self._writing, self._device = name, writing, device
        self._given = [(tensor, tensor._version) for tensor in given if not tensor.is_inference()]
        self._values: dict[_Buffer, torch.Tensor | None] = {}
        self._random = torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    @contextmanager
    def first(self) -> Iterator[None]:
        """Run forward and save nothing.

        Raises:
            StageError: the forward changes its input, so that it could not be run again.
        """
        with following(self._name), self._writing.watched(self._name, self._values), saved_tensors_hooks(_drop, _missing):
            yield
        self._check_input()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Run forward with the random numbers and buffers of the first time, and leave those of now as they are.

        Raises:
            StageError: the input was changed since.
        """
        self._check_input()
        cpu, cuda = self._random
        now = {buffer: buffer.tensor for buffer in self._values}
        forked = torch.random.fork_rng([] if cuda is None else [self._device])
        with keeping(forked), keeping(ExitStack()) as after:
            torch.set_rng_state(cpu)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda, self._device)
            for buffer, value in self._values.items():
                after.callback(buffer.owner._buffers.__setitem__, buffer.name, now[buffer])
                buffer.owner._buffers[buffer.name] = value
            yield

    def _check_input(self) -> None:
        if any(tensor._version != version for tensor, version in self._given):
            raise StageError(
                f"{self._name} cannot be recomputed: its input was changed in place. Let the stage work on a clone of it"
            )


def _name(buffer: _Buffer) -> str:
    return buffer.name


def _are_equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def _drop(tensor: torch.Tensor) -> None:
    return None


def _missing(packed: Any) -> torch.Tensor:
    raise StageError("a backward ran inside the first of two forwards, which saves nothing: such a stage cannot be recomputed")
