"""Detect a computation's side effects: random numbers that it draws, and changes to its module's state."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.random  # its first import would look like a draw
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.device.generators import PYTHON, TORCH, GlobalNumPy, are_equal, source_of, torch_on
from bpipe.memory.saved.storages import as_bytes, storages_of
from bpipe.model.pytree import attributes_of
from bpipe.model.state.checksums import sum_of_memory
from bpipe.torch_private.modules import OF_ALL
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

MOST_VALUES, MOST_DEPTH = 10_000, 5  # of plain attributes: a module may keep anything
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
CONTAINERS = (list, tuple, set, frozenset, deque)
NOBODYS = frozenset({"torch", *sys.stdlib_module_names})  # packages whose objects, such as loggers, keep no state of a model

# By the name of the state, and for a parameter its identity: a value that compares equal while the state is unchanged.
State = dict[tuple[str, int], object]


# The states of random numbers; the parameters and buffers; the attributes of modules, and the arguments that are not tensors.
States = tuple[State, State, State]


def look_at(device: torch.device, modules: Iterable[tuple[str, nn.Module]], others: Iterable[Any]) -> States:
    """Look at everything that a computation may change."""
    look = _Look()
    for name, module in modules:
        look.module(name, module)
    for other in others:
        look.value("an argument", other, 0)
    everybodys = (("torch's", TORCH), ("the device's", torch_on(device)), ("Python's", PYTHON), ("NumPy's", GlobalNumPy()))
    return {**{(whose, 0): source.get() for whose, source in everybodys}, **look.random}, look.tensors, look.others


def changed(before: State, after: State) -> str | None:
    """Name one thing that has changed; None if nothing has. Parameters that were replaced, as under FSDP, do not count."""
    for key in {**before, **after}:
        is_replaced = key[1] and not (key in before and key in after)
        if not is_replaced and not are_equal(before.get(key), after.get(key)):
            return key[0]
    return None


class _Look:
    """One look at a model's state. Its findings refer to no tensor, because bpipe counts the owners of storages."""

    def __init__(self) -> None:
        self.random: State = {}
        self.tensors: State = {}
        self.others: State = {}
        self._seen: dict[int, object] = {}  # kept alive, so that no other object gets its id
        self._storages: dict[int, object] = {}  # a number for the contents of each, because tensors may share one

    def module(self, name: str, module: nn.Module) -> None:
        for key, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                self.tensors[f"the parameter {_path(name, key)}", id(parameter)] = self._contents(parameter)
        for key, buffer in module._buffers.items():
            contents = None if buffer is None or is_lazy(buffer) else self._contents(buffer)
            self.tensors[f"the buffer {_path(name, key)}", 0] = contents
        if not _is_torchs(type(module)):
            for key, value in attributes_of(module).items():
                if key not in OF_ALL:
                    self.value(f"the attribute {_path(name, key)}", value, 0)

    def value(self, name: str, value: Any, depth: int) -> None:
        """Enter a value, and the values inside it."""
        if isinstance(value, PLAIN):
            self.others[name, 0] = repr(value)
        elif (source := source_of(value)) is not None:
            self.random[name, 0] = source.get()
        elif isinstance(value, torch.Tensor):
            self.others[name, 0] = self._contents(value)
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            self.others[name, 0] = (value.shape, hash(value.tobytes()))
        elif id(value) not in self._seen and depth < MOST_DEPTH and len(self.others) < MOST_VALUES:
            self._seen[id(value)] = value
            for key, part in _parts_of(value):
                self.value(f"{name}{key}", part, depth + 1)

    def _contents(self, tensor: torch.Tensor) -> object:
        if tensor.device.type == "meta":
            return None
        shape = () if tensor.is_nested else tuple(tensor.shape)
        for storage in storages_of(tensor):
            if address_of(storage) not in self._storages:
                self._storages[address_of(storage)] = sum_of_memory(as_bytes(storage))
        return (shape, *(self._storages[address_of(storage)] for storage in storages_of(tensor)))


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values inside a container or an object of the user's, each with its path."""
    if isinstance(value, dict):  # no other Mapping: those may make what is asked for
        yield "'s length", len(value)
        yield from ((f"[{key!r}]" if isinstance(key, PLAIN) else f"[{i}]", part) for i, (key, part) in enumerate(dict.items(value)))
    elif isinstance(value, CONTAINERS):
        yield "'s length", len(value)
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    elif isinstance(value, SimpleNamespace) or not (isinstance(value, nn.Module) or _package(type(value)) in NOBODYS):
        yield from ((f".{key}", part) for key, part in attributes_of(value).items())


def _is_torchs(kind: type) -> bool:
    """Return whether a class is torch's own, such as DistributedDataParallel: its attributes are not state of the model."""
    return all(_package(base) in NOBODYS for base in kind.__mro__)  # some bases are Python's


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
