"""The containers in which modules keep their state: copied, compared and filled again, one kind at a time."""

from __future__ import annotations

import sys
from bisect import bisect
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from operator import is_
from typing import Any, NamedTuple

import torch

from bpipe.model.pytree import in_slots, slots_of

__all__: list[str] = []

ATOMS = frozenset({int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device, torch.Size, type, slice, range})
SMALL_BYTES = 2**16  # containers up to this size are copied for each microbatch


class Kind(NamedTuple):
    """The operations on a kind of container."""

    copy: Callable[[Any], Any]  # returns its content: a mapping from place to value, a list of values, or an array
    is_same: Callable[[Any, Any], bool]  # returns whether that content is still in it, each object itself
    fill: Callable[[Any, Any], None]  # restores that content, in place of the present one
    put: Callable[[Any, Any, Any], None] | None = None  # sets the value at one place; None: its values have no places


def kind_of(value: Any) -> Kind | None:
    """Return the kind of container that an object is, if any."""
    if type(value) is dict:
        return DICT
    if isinstance(value, dict):
        return _ORDERED if isinstance(value, OrderedDict) else DICT
    if isinstance(value, list):
        return _LIST
    if isinstance(value, deque):
        return _DEQUE
    if isinstance(value, set):
        return _SET
    return _ARRAY if is_small_array(value) else None


def is_small_array(value: Any) -> bool:
    """Return whether an object is a writeable NumPy array of numbers that is small enough to be copied for each microbatch."""
    numpy = sys.modules.get("numpy")
    is_array = numpy is not None and type(value) is numpy.ndarray
    return is_array and not value.dtype.hasobject and value.flags.writeable and value.nbytes <= SMALL_BYTES


def _is_same_dict(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    if not one and not other:
        return True
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and all(map(is_, one, other))


def is_same_sequence(one: Any, other: Any) -> bool:
    """Return whether two sequences consist of the very same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


def _is_same_set(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(one.__contains__, other))


def _fill_dict(container: dict[Any, Any], content: Mapping[Any, Any]) -> None:
    """Fill a dict, which may be an object's attributes: it is emptied only if nothing less restores the order."""
    for key in [key for key in container if key not in content]:
        dict.__delitem__(container, key)
    dict.update(container, content)
    if not all(map(is_, container, content)):
        dict.clear(container)
        dict.update(container, content)


def _fill_ordered(container: OrderedDict[Any, Any], content: Mapping[Any, Any]) -> None:
    OrderedDict.clear(container)
    for key, value in content.items():
        OrderedDict.__setitem__(container, key, value)


def _fill_list(container: list[Any], content: Iterable[Any]) -> None:
    list.__setitem__(container, slice(None), content)


def _fill_deque(container: deque[Any], content: Iterable[Any]) -> None:
    container.clear()
    container.extend(content)


def _fill_set(container: set[Any], content: Iterable[Any]) -> None:
    set.clear(container)
    set.update(container, content)


def _fill_array(array: Any, content: Any) -> None:
    array[...] = content


def _fill_slots(value: Any, content: Mapping[str, Any]) -> None:
    for name in slots_of(type(value)):
        if name in content:
            object.__setattr__(value, name, content[name])  # even where the class is frozen
        elif hasattr(value, name):
            object.__delattr__(value, name)


def _fill_script(script: Any, content: Mapping[str, Any]) -> None:
    """Set the attributes of a `torch.jit` module, buffers included. They are in C++: there is no dict, and none comes or goes."""
    for name, value in content.items():
        script._c.setattr(name, value)


def _copy_script(script: Any) -> dict[str, Any]:
    attributes = script._concrete_type.get_attributes()
    return {name: script._c.getattr(name) for name, (_, is_parameter) in attributes.items() if not is_parameter}


def _is_same_script(script: Any, content: Mapping[str, Any]) -> bool:
    now = _copy_script(script)  # numbers are other objects each time
    return all(now[name] is value or (type(value) in ATOMS and now[name] == value) for name, value in content.items())


DICT = Kind(dict, _is_same_dict, _fill_dict, dict.__setitem__)
_ORDERED = Kind(dict, _is_same_dict, _fill_ordered, OrderedDict.__setitem__)
_LIST = Kind(list, is_same_sequence, _fill_list, list.__setitem__)
_DEQUE = Kind(list, is_same_sequence, _fill_deque, deque.__setitem__)
_SET = Kind(list, _is_same_set, _fill_set)
_ARRAY = Kind(lambda array: array.copy(), lambda one, other: bool(one.tobytes() == other.tobytes()), _fill_array)
SLOTS = Kind(in_slots, lambda value, content: _is_same_dict(in_slots(value), content), _fill_slots, object.__setattr__)
SCRIPT = Kind(_copy_script, _is_same_script, _fill_script, lambda script, name, value: script._c.setattr(name, value))


class Content(NamedTuple):
    """A container and its content at some time."""

    kind: Kind
    container: Any
    before: Any

    def is_same(self) -> bool:
        """Return whether the same content is still in the container."""
        return self.kind.is_same(self.container, self.before)

    def now(self) -> Content:
        """Return the container with its present content."""
        return self._replace(before=self.kind.copy(self.container))


class Contents:
    """Containers, and their contents when this is made.

    Nearly all are dicts of modules, and nearly always none of them has changed: they are compared all at once.
    """

    def __init__(self, dicts: Sequence[dict[Any, Any]], others: Sequence[Content]) -> None:
        self._dicts, self._others = dicts, others
        self._before = [*map(dict, dicts)]
        self._lengths, self._keys, self._values = [*map(len, dicts)], [*_keys_of(dicts)], [*_values_of(dicts)]

    def are_same(self) -> bool:
        """Return whether the very same objects are still in the containers, in the same places."""
        are_same = self._have_same_keys() and all(map(is_, self._values, _values_of(self._dicts)))
        return are_same and all(map(Content.is_same, self._others))

    def _have_same_keys(self) -> bool:
        return self._lengths == [*map(len, self._dicts)] and all(map(is_, self._keys, _keys_of(self._dicts)))

    def now(self) -> Contents:
        """Return the containers with their present contents; this same object if nothing has changed."""
        if self.are_same():
            return self
        return Contents(self._dicts, [one if one.is_same() else one.now() for one in self._others])

    def fill(self) -> None:
        """Restore the contents that have changed."""
        if self.are_same():
            return
        for i in self._changed():
            _fill_dict(self._dicts[i], self._before[i])
        for one in self._others:
            if not one.is_same():
                one.kind.fill(one.container, one.before)

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
