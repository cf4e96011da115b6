"""Find the state that a forward may read and change besides its arguments, wherever its modules keep it."""

from __future__ import annotations

import sys
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from bpipe.device.generators import Source, source_of
from bpipe.model.pytree import slots_of
from bpipe.model.state.contents import ATOMS, Container, Contents, are_same, shown, values_in, values_in_script, values_in_slots
from bpipe.torch_private.modules import FORWARD, OF_ALL, REPEATING, hooks_of, script_of, script_state

__all__: list[str] = []

# These entries are in every module's dict, or say again what others say; a forward may change one: whether the module trains.
_SKIPPED = (OF_ALL - {"training"}) | REPEATING
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy", "bpipe", "triton"}  # objects of these packages keep no forward's state
_HOLDERS = (SimpleNamespace, UserDict, UserList)  # but these do
_MOST_OBJECTS = 1000  # besides modules, in one search
_DEEPEST = 5  # containers in containers, from a module
_LONGEST = 1000  # a longer container is compared, but not searched
_SPECIAL = (torch.jit.ScriptModule, LazyModuleMixin)


class Place(NamedTuple):
    """The place of a tensor; `put` is None if it cannot be replaced."""

    container: Any
    key: Any
    put: Any


# An object that the search has reached, how many containers lie between it and a module, and whether it is a module's state.
_Step = tuple[Any, int, bool]


class Reachable:
    """The objects reachable from some roots now: modules, a loss function, and everything that their attributes lead to.

    Containers and tensors count if attributes of modules lead to them. Only modules and generators count behind functions, hooks
    and bound methods, because other objects there may also belong to other code.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.places: dict[int, list[Place]] = {}  # of each tensor
        self.sources: list[Source] = []
        self.parameters: list[tuple[str, torch.Tensor]] = []
        self.mode: tuple[bool, ...] = ()  # train or eval, module by module
        self.containers: list[Container] = []  # in which modules keep state besides attributes
        self._dicts: list[dict[Any, Any]] = []  # of attributes
        self._dicts_beside: list[dict[Any, Any]] = []  # other dicts that were searched
        self._containers_beside: list[Container] = []
        self._functions: list[tuple[Any, Sequence[Any]]] = []  # with what they use
        self._owners: list[Any] = []  # modules and other objects with attributes
        self._attributes: list[Any] = []  # the dicts of these
        self._is_steady = True  # whether `is_current` looks at everything that another search would look at
        self._seen: dict[int, Any] = {}  # by identity, and kept alive: another object must not get its identity
        self._holders: dict[int, tuple[int, Any]] = {}  # for an object in a container: the container, and the key there
        self._num_objects = 0
        self._todo: list[_Step] = [(root, 0, True) for root in roots]
        self._later: list[_Step] = []  # searched last: state that is also reached in other ways counts as state
        while self._todo or self._later:
            self._visit(*(self._todo or self._later).pop())
        self._is_steady &= {*map(type, self._dicts_beside)} <= {dict, OrderedDict}
        self.contents = Contents(self._dicts)
        self._searched = Contents(self._dicts_beside if self._is_steady else ())
        self.parameters = [(name, one) for name, one in self.parameters if not one.is_inference()]  # those that have versions
        self._kinds = [*map(type, self._seen.values())]

    def is_current(self) -> bool:
        """Return whether another search would find the same: no object that this search has looked at has changed."""
        is_same = self._is_steady and self._kinds == [*map(type, self._seen.values())]
        is_same = is_same and all(map(is_, self._attributes, map(vars, self._owners)))
        is_same = is_same and self.contents.are_same() and self._searched.are_same()
        is_same = is_same and all(map(Container.is_same, chain(self.containers, self._containers_beside)))
        return is_same and all(are_same(used, _used_by(function)) for function, used in self._functions)

    def everything(self) -> tuple[list[dict[Any, Any]], list[Container], list[tuple[CellType, Any]]]:
        """Return all that was searched, whoever else uses it: dicts, other containers, and variables of functions."""
        functions = [one for one, _ in self._functions if isinstance(one, FunctionType)]
        cells = [(cell, cell.cell_contents) for one in functions for cell in one.__closure__ or () if cell != CellType()]
        return [*self._dicts, *self._dicts_beside], [*self.containers, *self._containers_beside], cells

    def is_contained(self, tensor: int) -> bool:
        """Return whether a tensor, given its identity, is in a container or a slot, where no copy can take its place."""
        return any(place.put is None for place in self.places[tensor])

    def name(self, tensor: int) -> str:
        """Return the name of a tensor, given its identity: that of a module's attribute or buffer, and the path to it in there."""
        container, key, _ = self.places[tensor][0]
        return self._path(id(container), [key])

    def _path(self, above: int, way: list[Any]) -> str:
        while above in self._holders and len(way) <= _DEEPEST:
            above, key = self._holders[above]
            way.append(key)
        return "".join([str(way.pop()), *(f"[{shown(key)}]" for key in reversed(way))]) if way else ""

    def _visit(self, value: Any, depth: int, is_state: bool) -> None:
        if (key := id(value)) in self._seen:
            return
        self._seen[key] = value
        if isinstance(value, nn.Module):
            self._module(value)
        elif depth <= _DEEPEST and self._num_objects < _MOST_OBJECTS:
            self._num_objects += 1
            self._object(value, depth, is_state)

    def _module(self, module: nn.Module) -> None:
        self.mode += (module.training,)
        if isinstance(module, _SPECIAL):
            self._special(module)
        else:
            self._buffers_of(module)
            self._attributes_of(module)
            self._dicts_beside += module._modules, module._parameters, *hooks_of(module)[:FORWARD]
        if slots_of(type(module)):
            self._compare(module, values_in_slots, 0, True)
        for name, parameter in module._parameters.items():
            if type(parameter) is nn.Parameter or (parameter is not None and not is_lazy(parameter)):
                self.parameters += ((name, parameter),)
            elif parameter is not None:
                self._is_steady = False
        if module._modules:
            self._todo += [(child, 0, True) for child in module._modules.values() if child is not None]
        for hooks in hooks_of(module)[:FORWARD]:
            if hooks:
                self._later += [(hook, 0, False) for hook in hooks.values()]

    def _buffers_of(self, module: nn.Module) -> None:
        if type(module._buffers) is not dict:  # as in modules that an old torch has pickled
            self._compare(module._buffers, values_in, 0, True, dict.__setitem__, f"the buffers of {type(module).__qualname__}")
        else:
            self._dicts += (module._buffers,)
            self._values(module._buffers, module._buffers.items(), dict.__setitem__, 0, True)

    def _attributes_of(self, module: nn.Module) -> None:
        attributes = module.__dict__
        self._dicts += (attributes,)
        self._owners += (module,)
        self._attributes += (attributes,)
        found = [one for one in attributes.items() if one[0] not in _SKIPPED and type(one[1]) not in ATOMS]
        if found:
            self._values(attributes, found, dict.__setitem__, 0, True)

    def _special(self, module: nn.Module) -> None:
        """Search a lazy module or one of `torch.jit`."""
        self._is_steady = False
        if isinstance(module, torch.jit.ScriptModule):
            script = script_of(module)
            if script is not None and id(state := script_state(script)) not in self._seen:
                self._seen[id(state)] = state
                name = f"attributes of the scripted {script.original_name}"
                self._compare(script, values_in_script, 0, True, _put_in_script, name)
        else:
            self._buffers_of(module)
        if LazyModuleMixin not in type(module).__mro__:  # its first forward makes another module of it, once
            self._attributes_of(module)

    def _object(self, value: Any, depth: int, is_state: bool) -> None:
        source = source_of(value)
        if source is not None:
            self.sources.append(source)
        elif isinstance(value, (tuple, frozenset)):
            self._values(value, enumerate(value), None, depth, is_state)
        elif isinstance(value, (FunctionType, MethodType, partial)):
            used = _used_by(value)
            self._functions.append((value, used))
            self._later += [(one, depth + 1, False) for one in used]
        elif values_in(value) is not None:
            self._compare(value, values_in, depth, is_state)
        if not isinstance(value, type) and (isinstance(value, _HOLDERS) or not _is_foreign(type(value).__module__)):
            self._instance(value, depth, is_state)

    def _instance(self, value: Any, depth: int, is_state: bool) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            if id(value) in self._holders:
                self._holders[id(attributes)] = self._holders[id(value)]
            self._owners.append(value)
            self._attributes.append(attributes)
            (self._dicts if is_state else self._dicts_beside).append(attributes)
            if len(attributes) <= _LONGEST:
                self._values(attributes, attributes.items(), dict.__setitem__, depth, is_state)
        if slots_of(type(value)):
            self._compare(value, values_in_slots, depth, is_state)

    def _compare(
        self, value: Any, read: Callable[[Any], Any], depth: int, is_state: bool, put: Any = None, name: str = ""
    ) -> None:
        """Note an object whose content is compared, and search it."""
        content = read(value)
        if is_state and not name:
            name = f"the {type(value).__qualname__} {self._path(id(value), [])}".rstrip()
        (self.containers if is_state else self._containers_beside).append(Container(name, value, read, content))
        half = len(content) // 2
        has_keys = read is not values_in or issubclass(type(value), dict)
        items = [*zip(content[:half], content[half:])] if has_keys else [*enumerate(content)]
        if len(items) <= _LONGEST:
            self._values(value, items, put, depth, is_state)

    def _values(self, container: Any, items: Iterable[tuple[Any, Any]], put: Any, depth: int, is_state: bool) -> None:
        for key, value in items:
            if type(value) in ATOMS or (type(value) is tuple and ATOMS.issuperset(map(type, value))):
                continue
            if not isinstance(value, torch.Tensor):
                self._holders.setdefault(id(value), (id(container), key))
                (self._todo if is_state else self._later).append((value, depth + 1, is_state))
            elif is_state:
                self.tensors[id(value)] = value
                self.places.setdefault(id(value), []).append(Place(container, key, put))


def _put_in_script(script: Any, name: str, value: torch.Tensor) -> None:
    script_state(script).setattr(name, value)


def _used_by(function: Any) -> Sequence[Any]:
    """Return the objects that a function, a bound method or a partial uses besides its arguments and globals."""
    if isinstance(function, MethodType):
        return [function.__self__, function.__func__]
    if isinstance(function, partial):
        return [function.func, *function.args, *function.keywords.values()]
    if _is_foreign(function.__module__):
        return []
    closure = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]  # empty until it is assigned
    return [*closure, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_foreign(module: Any) -> bool:
    return str(module).partition(".")[0] in _FOREIGN
