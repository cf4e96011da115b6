"""Find what a forward may read and change besides its arguments: the state of its modules, wherever they keep it."""

from __future__ import annotations

import sys
from collections import UserDict, UserList
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from bpipe.runtime.contents import ATOMS, DICT, SCRIPT, SLOTS, Kind, has_slots, kind_of
from bpipe.runtime.generators import Source, source_of

__all__: list[str] = []

# What every module has in its dict, but what a forward may change: whether it trains.
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "bpipe", "triton"}  # whose objects keep no state of a forward
_HOLDERS = (SimpleNamespace, UserDict, UserList)  # but these do
_MOST_OBJECTS = 1000  # besides modules, in one search
_DEEPEST = 5  # containers in containers, from a module
_LONGEST = 1000  # a longer container is copied, and not searched


class Content(NamedTuple):
    """A container and what was in it."""

    kind: Kind
    container: Any
    before: Any

    def now(self) -> Any:
        """What is in it now: the same object, where nothing has changed."""
        return self.before if self.kind.is_same(self.container, self.before) else self.kind.copy(self.container)


class Place(NamedTuple):
    """Where a tensor is to be found; `put` is None where it cannot be replaced."""

    container: Any
    key: Any
    put: Any


class _Step(NamedTuple):
    """An object that the search has come to.

    Args:
        depth: how many containers lie between it and a module.
        is_state: whether it is what a module keeps.
    """

    value: Any
    depth: int
    is_state: bool


class Reachable:
    """What is reached from some roots now: modules, a loss function, and whatever their attributes lead to.

    Containers and tensors count where attributes of modules lead to them. Behind functions, hooks and bound methods, whose
    objects are also others', only modules and generators do.

    Args:
        roots: the modules that run and, if any, the loss function.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.contents: list[Content] = []
        self.tensors: dict[int, torch.Tensor] = {}
        self.places: dict[int, list[Place]] = {}  # of each tensor
        self.sources: list[Source] = []
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.mode: list[bool] = []  # train or eval, module by module
        self._seen: dict[int, Any] = {}  # by identity, and kept alive: another object must not get its identity
        self._num_objects = 0
        self._todo: list[_Step] = [_Step(root, 0, True) for root in roots]
        self._later: list[_Step] = []  # what is state and is also reached in other ways is state
        while self._todo or self._later:
            self._visit((self._todo or self._later).pop())
        del self._seen

    def _visit(self, step: _Step) -> None:
        value = step.value
        if id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._module(value)
        elif step.depth <= _DEEPEST and self._num_objects < _MOST_OBJECTS:
            self._num_objects += 1
            self._object(value, step)

    def _module(self, module: nn.Module) -> None:
        attributes, here = vars(module), _Step(module, 0, True)
        self.mode.append(module.training)
        if isinstance(module, torch.jit.ScriptModule):
            self._script(module)
        else:
            self._content(kind_of(module._buffers), module._buffers, here)
        if LazyModuleMixin not in type(module).__mro__:  # its first forward makes another module of it, once
            self._content(DICT, attributes, here, attributes.keys() - _OF_EVERY_MODULE)
        for name, parameter in module._parameters.items():
            if parameter is not None and not is_lazy(parameter):
                self.parameters.append((name, parameter))
        for child in module._modules.values():
            if child is not None:
                self._todo.append(_Step(child, 0, True))
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            self._later += [_Step(hook, 0, False) for hook in hooks.values()]

    def _script(self, module: Any) -> None:
        script = module if "_c" in vars(module) else vars(module).get("_actual_script_module")
        if script is not None and id(script._c) not in self._seen:
            self._seen[id(script._c)] = script._c
            self._content(SCRIPT, script, _Step(script, 0, True))

    def _object(self, value: Any, step: _Step) -> None:
        kind, source = kind_of(value), source_of(value)
        if source is not None:
            self.sources.append(source)
        elif isinstance(value, (tuple, frozenset)):
            self._values(value, enumerate(value), None, step)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            self._later += [_Step(one, step.depth + 1, False) for one in _behind(value)]
        elif kind is not None:
            self._content(kind, value, step)
        if not isinstance(value, type) and (isinstance(value, _HOLDERS) or not _is_foreign(type(value).__module__)):
            self._instance(value, step)

    def _instance(self, value: Any, step: _Step) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._content(kind_of(attributes), attributes, step)
        if has_slots(value):
            self._content(SLOTS, value, step)

    def _content(self, kind: Kind | None, container: Any, step: _Step, keys: Collection[Any] | None = None) -> None:
        """Note a container, and search it: all of it, or what is under some keys."""
        assert kind is not None
        before = kind.copy(container)
        if step.is_state:
            self.contents.append(Content(kind, container, before))
        if keys is not None:
            self._values(container, ((key, before[key]) for key in keys), kind.put, step)
        elif isinstance(before, (dict, list)) and len(before) <= _LONGEST:
            self._values(container, _items(before), kind.put, step)

    def _values(self, container: Any, items: Iterable[tuple[Any, Any]], put: Any, step: _Step) -> None:
        for key, value in items:
            if type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value))):
                continue
            if not isinstance(value, torch.Tensor):
                (self._todo if step.is_state else self._later).append(_Step(value, step.depth + 1, step.is_state))
            elif step.is_state:
                self.tensors[id(value)] = value
                self.places.setdefault(id(value), []).append(Place(container, key, put))


def _behind(function: Any) -> Iterable[Any]:
    """What a function, a bound method or a partial uses besides its arguments, globals left out."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if _is_foreign(function.__module__):
        return []
    closure = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # empty until it is assigned
    return [*closure, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _items(content: Any) -> Iterator[tuple[Any, Any]]:
    yield from content.items() if isinstance(content, Mapping) else enumerate(content)


def _is_foreign(module: Any) -> bool:
    return str(module).partition(".")[0] in _FOREIGN
