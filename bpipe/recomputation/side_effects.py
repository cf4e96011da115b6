"""Detect a computation's side effects: random numbers that it draws, and changes to its module's state."""

from __future__ import annotations

import pickle
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from bpipe.device import random_state as device_random_state
from bpipe.memory.saved.storages import Storage, as_bytes, storages_of
from bpipe.model.pytree import attributes_of
from bpipe.torch_private.modules import OF_ALL
from bpipe.torch_private.owners_and_versions import address_of

__all__: list[str] = []

MOST_VALUES, MOST_DEPTH = 10_000, 5  # of plain attributes: a module may keep anything
EXACT_BYTES = 2**20  # storages up to this size are compared byte by byte, larger ones by their sum
PLAIN = (bool, int, float, complex, str, bytes, type(None), np.generic)
CONTAINERS = (list, tuple, set, frozenset, deque)
NOBODYS = frozenset({"torch", *sys.stdlib_module_names})  # packages whose objects, such as loggers, keep no state of a model
GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)

# By the name of the state, and for a parameter its identity: a value that compares equal while the state is unchanged.
State = dict[tuple[str, int], object]


def random_state(device: torch.device) -> State:
    """Return the states of the random numbers that a computation on a device may draw without being given a generator."""
    state: State = {
        ("torch's", 0): _bytes_of_state(torch.get_rng_state()),
        ("Python's", 0): random.getstate(),
        ("NumPy's", 0): pickle.dumps(np.random.get_state()),
    }
    if (of_device := device_random_state(device)) is not None:
        state["the device's", 0] = _bytes_of_state(of_device)
    return state


# The states of random numbers; the parameters and buffers; the attributes of modules, and the arguments that are not tensors.
States = tuple[State, State, State]


def look_at(device: torch.device, modules: Iterable[tuple[str, nn.Module]], others: Iterable[Any]) -> States:
    """Look at everything that a computation may change."""
    look = _Look()
    for name, module in modules:
        look.module(name, module)
    for other in others:
        look.value("an argument", other, 0)
    return {**random_state(device), **look.random}, look.tensors, look.others


def changed(before: State, after: State) -> str | None:
    """Name one thing that has changed; None if nothing has. Parameters that were replaced, as under FSDP, do not count."""
    replaced = {key for key in before.keys() ^ after.keys() if key[1]}
    return next((key[0] for key in {**before, **after} if key not in replaced and before.get(key) != after.get(key)), None)


class _Look:
    """One look at a model's state. Its findings refer to no tensor, because bpipe counts the owners of storages."""

    def __init__(self) -> None:
        self.random: State = {}
        self.tensors: State = {}
        self.others: State = {}
        self._seen: dict[int, object] = {}  # kept alive, so that no other object gets its id
        self._storages: dict[int, object] = {}  # their contents, for tensors that share one

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
        elif isinstance(value, GENERATORS):
            self.random[name, 0] = _state_of(value)
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
        return (shape, *(self._in_storage(storage) for storage in storages_of(tensor)))

    def _in_storage(self, storage: Storage) -> object:
        if address_of(storage) not in self._storages:
            self._storages[address_of(storage)] = _compared(as_bytes(storage))
        return self._storages[address_of(storage)]


def _compared(data: torch.Tensor) -> object:
    if data.numel() <= EXACT_BYTES:
        return data.clone().cpu().numpy().tobytes()  # a clone: numpy would pin the storage's size
    whole = data.numel() // 8 * 8
    return int(data[:whole].view(torch.int64).sum()), int(data[whole:].sum())


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


def _state_of(generator: Any) -> object:
    if isinstance(generator, random.SystemRandom):
        return None  # it has no state
    return _bytes_of_state(generator.get_state()) if isinstance(generator, torch.Generator) else pickle.dumps(generator)


def _bytes_of_state(state: torch.Tensor) -> bytes:
    return state.numpy().tobytes()


def _path(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name
