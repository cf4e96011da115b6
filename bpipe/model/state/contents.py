"""Attributes, which are restored for another forward, and the containers that they lead to, which are compared."""

from __future__ import annotations

from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from bpipe.model.pytree import in_slots
from bpipe.torch_private.modules import script_attributes, script_state

__all__: list[str] = []

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type, slice, range})
SMALL_BYTES = 2**16  # arrays and storages up to this size are copied for each microbatch


def values_in(value: Any) -> Sequence[Any] | None:
    """Return what a container has in it, in an order that stays (keys before values); None for other objects."""
    kind = type(value)  # objects may claim to be of another one
    if issubclass(kind, dict):
        order = OrderedDict if issubclass(kind, OrderedDict) else dict
        return [*order.keys(value), *order.values(value)]
    if issubclass(kind, (list, deque)):
        return [*value]
    if issubclass(kind, set):
        return [frozenset(value)]
    return [value.tobytes()] if is_small_array(value) else None


def values_in_slots(value: Any) -> Sequence[Any]:
    """Return the names of the attributes that an object has in slots, and their values."""
    return values_in(in_slots(value)) or ()


def values_in_script(script: Any) -> Sequence[Any]:
    """Return the names of the attributes of a module of `torch.jit`, except parameters, and their values, which are in C++."""
    names = [name for name, (_, is_parameter) in script_attributes(script).items() if not is_parameter]
    return [*names, *(_in_tuples(script_state(script).getattr(name)) for name in names)]


def _in_tuples(value: Any) -> Any:
    """Return a value of `torch.jit`, whose containers are other objects each time, in tuples that can be compared."""
    if not isinstance(value, (dict, list, tuple)):
        attributes = {} if isinstance(value, (torch.Tensor, nn.Module)) else getattr(value, "__dict__", {})  # of a scripted class
        return _in_tuples(attributes) if attributes else value
    return tuple(map(_in_tuples, [*value, *value.values()] if isinstance(value, dict) else value))


def shown(key: Any) -> str:
    """Return a key of a container for people; what is no plain value may be a tensor, or anything."""
    return repr(key) if type(key) in ATOMS else f"a {type(key).__qualname__}"


def is_small_array(value: Any) -> bool:
    """Return whether an object is a writeable NumPy array of numbers that is small enough to be copied for each microbatch."""
    return type(value) is np.ndarray and not value.dtype.hasobject and value.flags.writeable and value.nbytes <= SMALL_BYTES


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in ATOMS or isinstance(value, np.generic)


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Return whether two sequences consist of the very same objects, or of equal plain values."""
    return len(one) == len(other) and (all(map(is_, one, other)) or all(map(_is_same, one, other)))


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if type(one) is tuple:
        return are_same(one, other)
    return bool(one == other) if type(one) is frozenset else _is_plain(one) and repr(one) == repr(other)


def _is_same_dict(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and all(map(is_, one, other))


def _fill_dict(attributes: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    """Fill an object's attributes again: they are emptied only if nothing less restores the order."""
    for key in [key for key in attributes if key not in content]:
        del attributes[key]
    attributes.update(content)
    if not all(map(is_, attributes, content)):
        attributes.clear()
        attributes.update(content)


def _fill(value: Any, content: Sequence[Any]) -> None:
    """Fill a container again, past what its class does when something is put into it, or an object's slots."""
    half = len(content) // 2
    if isinstance(value, dict):
        order = OrderedDict if isinstance(value, OrderedDict) else dict
        order.clear(value)
        for key, one in zip(content[:half], content[half:]):
            order.__setitem__(value, key, one)
    elif isinstance(value, (list, deque)):
        kind: Any = list if isinstance(value, list) else deque
        kind.clear(value)
        kind.extend(value, content)
    elif isinstance(value, set):
        set.clear(value)
        set.update(value, content[0])
    elif isinstance(value, np.ndarray):
        value[...] = np.frombuffer(content[0], value.dtype).reshape(value.shape)
    else:
        for name in in_slots(value).keys() - set(content[:half]):
            object.__delattr__(value, name)
        for name, one in zip(content[:half], content[half:]):
            object.__setattr__(value, name, one)


class Container(NamedTuple):
    """An object whose content is compared, and its content at some time."""

    name: str
    value: Any
    values_in: Callable[[Any], Sequence[Any] | None]
    before: Sequence[Any]

    def is_same(self) -> bool:
        """Return whether the same content is still in it."""
        return are_same(self.before, self.values_in(self.value) or ())

    def fill(self) -> None:
        """Restore the content, if it has changed and the container can be filled."""
        if not self.is_same():
            _fill(self.value, self.before)

    def now(self) -> Container:
        """Return it with its present content."""
        return self if self.is_same() else self._replace(before=self.values_in(self.value) or ())


class Contents:
    """The attributes of modules and other objects, as they are when this is made.

    Nearly always none of them has changed: they are compared all at once.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]]) -> None:
        self._dicts = dicts
        self._before = [*map(dict, dicts)]
        self._lengths, self._keys, self._values = [*map(len, dicts)], [*_keys_of(dicts)], [*_values_of(dicts)]

    def are_same(self) -> bool:
        """Return whether the very same objects are still in the dicts, in the same places."""
        return self._have_same_keys() and all(map(is_, self._values, _values_of(self._dicts)))

    def _have_same_keys(self) -> bool:
        return self._lengths == [*map(len, self._dicts)] and all(map(is_, self._keys, _keys_of(self._dicts)))

    def now(self) -> Contents:
        """Return the dicts with their present contents; this same object if nothing has changed."""
        return self if self.are_same() else Contents(self._dicts)

    def fill(self) -> None:
        """Restore the contents that have changed."""
        for i in self._changed() if not self.are_same() else ():
            _fill_dict(self._dicts[i], self._before[i])

    def _changed(self) -> Iterable[int]:
        """Return the indices of the dicts that have changed."""
        if self._have_same_keys():
            ends = [*accumulate(self._lengths)]
            pairs = enumerate(zip(self._values, _values_of(self._dicts)))
            return {bisect(ends, i) for i, (one, other) in pairs if one is not other}
        return [i for i, (one, other) in enumerate(zip(self._dicts, self._before)) if not _is_same_dict(one, other)]


def _keys_of(dicts: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(dicts)


def _values_of(dicts: Iterable[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))
