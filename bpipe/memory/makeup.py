"""Detect from step to step whether a stage's module is still the one whose memory and messages were learned."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain, count
from operator import is_
from typing import Any

import torch
from torch import nn

from bpipe.memory.recent import Recent
from bpipe.torch_private.modules import SEES_HOOKS, compiled_call, hooks_of

__all__: list[str] = []

REMEMBERED = 64  # makeups that keep their number
UNREADABLE = (RuntimeError, ValueError, TypeError, AttributeError)  # raised by a tensor without strides, or not yet initialised


class Makeups:
    """Numbers for the makeup of a module, its composition: the same makeup always has the same number.

    It is the same if it has the same modules, with hooks of the same names, and parameters and buffers of the same types, dtypes,
    shapes, strides and devices. Their values do not count; nor do train or eval mode and which parameters are trainable, which a
    stage's mode covers. So a module that was changed and changed back has its old number again.
    """

    def __init__(self) -> None:
        self._seen: object = None
        self._modules: list[weakref.ref[nn.Module]] = []
        self._number = -1
        self._numbers = count()
        self._known = Recent[bytes, int](REMEMBERED)  # by a digest
        self._names: dict[int, tuple[weakref.ref[nn.Module], int]] = {}  # of modules, by identity while they live

    def number(self, modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> int:
        """Return the number of the current makeup; a makeup that was not seen before gets a new number."""
        seen = _seen_in(modules, parameters)
        if seen != self._seen or len(modules) != len(self._modules) or not self._are(modules):
            self._seen, self._modules = seen, [weakref.ref(module) for module in modules]
            makeup = f"{self._named(modules)} {list(_hooks_of(modules))} {seen[1:]}"
            self._number = self._known.use(hashlib.sha256(makeup.encode()).digest(), next(self._numbers))
        return self._number

    def _are(self, modules: Sequence[nn.Module]) -> bool:
        """Return whether these are the modules of the last call; a new module at the address of a dead one is another one."""
        return all(map(is_, [module() for module in self._modules], modules))

    def _named(self, modules: Sequence[nn.Module]) -> list[int]:
        """Return a unique number for each module, never used for another one."""
        self._names = {key: name for key, name in self._names.items() if name[0]() is not None}
        for module in modules:
            self._names.setdefault(id(module), (weakref.ref(module), next(self._numbers)))
        return [self._names[id(module)][1] for module in modules]


def _seen_in(modules: Sequence[nn.Module], parameters: Sequence[torch.Tensor]) -> tuple[object, ...]:
    """Return values that show a change cheaply: the keys of hooks, which are never reused, and how the rest looks."""
    hooks = [[*chain.from_iterable(its)] for its in map(hooks_of, modules) if any(its)] if SEES_HOOKS else []
    ways = [(one.__class__, "forward" in one.__dict__, compiled_call(one) is None) for one in modules]
    return hooks, ways, looks_of(parameters), looks_of(buffers_of(modules))


def buffers_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [buffer for one in modules if one._buffers for buffer in one._buffers.values() if buffer is not None]


def looks_of(tensors: Sequence[torch.Tensor]) -> object:
    """Return how tensors look (class, dtype, shape, strides, device), regardless of their values."""
    try:
        looks = [(one.dtype, one.shape, one.device, one.__class__) for one in tensors]
        odd = [_sharding(one) for one in tensors if one.__class__ not in (nn.Parameter, torch.Tensor)]
        return looks, [*map(torch.Tensor.stride, tensors)], odd
    except UNREADABLE:
        return [_look_of(one) for one in tensors]


def _look_of(tensor: torch.Tensor) -> object:
    """Return how one tensor looks; it may be sparse or not yet initialised."""
    try:
        return tensor.dtype, tensor.layout, tensor.shape, tensor.device, tensor.__class__
    except UNREADABLE:
        return tensor.__class__


def _sharding(tensor: Any) -> object:
    """Return how a tensor is placed over ranks, if it is a DTensor: shards have other bytes than the whole."""
    return getattr(tensor, "placements", None), getattr(tensor, "device_mesh", None)


def _hooks_of(modules: Sequence[nn.Module]) -> Iterator[tuple[int, str]]:
    """Yield the module's index and the name of each hook, so that hooks registered again in each step count as the same."""
    for place, one in enumerate(modules if SEES_HOOKS else ()):
        for hooks in hooks_of(one):
            for hook in hooks.values():
                yield place, f"{hook.__module__}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
