"""Find the parts of a value that a user gives or returns, and make another value like it.

Cutting, merging, describing and finding tensors share this one notion of a pytree: tuples, lists and dicts, types registered with
`torch.utils._pytree`, dataclasses, `UserDict` (such as transformers' BatchEncoding) and subclasses of dict and list.
"""

from __future__ import annotations

import copy
import sys
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

from bpipe.comm.wire.message import PLAIN
from bpipe.torch_private.pytrees import is_registered, parts_of

__all__: list[str] = []

_PLAIN = frozenset(PLAIN)
_SINGLE = (np.ndarray, torch.nn.Module, torch.Size, Enum, type, types.ModuleType)
# bpipe treats these values as single objects, whatever they hold, and even if they are registered as pytrees.
_WHOLE = (*_SINGLE, torch.Tensor, PackedSequence, types.FunctionType, partial)
_OPAQUE = (*_SINGLE, types.BuiltinFunctionType, types.MethodType, str, bytes)
_OBJECTS_DEEP = 3  # how many levels of nested objects are searched for tensors


class Inside(NamedTuple):
    """The parts of a value."""

    keys: Sequence[Any]  # how a spec names the parts: indices, keys or names of fields; after them the names of other attributes
    parts: Sequence[Any]  # the parts themselves
    make: Callable[[Sequence[Any]], Any]  # makes another value like it from as many other parts
    num_own: int  # how many of the parts are the value's own; those after them are attributes beside them, such as a cached length
    are_fields: bool = False  # whether its own parts are attributes, too
    context: Any = ""  # other properties of the value, such as the structure of a registered pytree

    def path(self, i: int, path: str) -> str:
        """Return the path of part `i` of the value at `path`, as Python writes it."""
        is_attribute = self.are_fields or i >= self.num_own
        return f"{path}.{self.keys[i]}" if is_attribute else f"{path}[{self.keys[i]!r}]"


def inside(value: Any) -> Inside | None:
    """Return the parts of a value; None for a single object, or an unknown one."""
    kind = type(value)
    if kind in _PLAIN or isinstance(value, torch.Tensor):
        return None
    if kind is tuple or kind is list:
        return Inside(range(len(value)), value, kind, len(value))
    if kind is dict:
        keys = list(value)
        return Inside(keys, list(value.values()), lambda parts: dict(zip(keys, parts)), len(keys))
    if isinstance(value, _WHOLE) or is_block_mask(value):
        return None
    return _registered(value) if is_registered(value) else _known(value)


def _registered(value: Any) -> Inside | None:
    if isinstance(value, tuple) and getattr(value, "__dict__", None):
        return None  # a named tuple with attributes, which would be lost
    parts, tree, make_another = parts_of(value)
    keys: Sequence[Any] = range(len(parts))
    if isinstance(value, Mapping) and len(value) == len(parts):
        keys = list(value)
    are_fields = hasattr(value, "_fields") and len(value._fields) == len(parts)
    if are_fields:
        keys = value._fields
    make = partial(_checked, make_another, keys)
    return Inside(keys, parts, make, len(parts), are_fields, tree)


def _known(value: Any) -> Inside | None:
    """Return the parts of a value that is not a registered pytree; None if it is unknown."""
    if isinstance(value, (dict, UserDict)):
        items = dict(value.items())
        return _like(value, list(items), list(items.values()), _put_items, are_fields=False)
    if isinstance(value, list):
        return _like(value, range(len(value)), list(value), _put_items, are_fields=False)
    if is_dataclass(value):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return _like(value, names, [getattr(value, name) for name in names], _put_fields, are_fields=True)
    return None


def _put_items(new: Any, keys: Sequence[Any], parts: Sequence[Any]) -> None:
    for key, part in zip(keys, parts):
        new[key] = part


def _put_fields(new: Any, keys: Sequence[Any], parts: Sequence[Any]) -> None:
    for name, part in zip(keys, parts):
        object.__setattr__(new, name, part)  # works for frozen classes too


def _like(value: Any, keys: Sequence[Any], own: Sequence[Any], put: Callable[..., None], *, are_fields: bool) -> Inside:
    """Return the parts of a value for which another one is made by copying it and putting other parts into the copy.

    An attribute that is one of its parts, as in dicts whose items are attributes too, follows that part.
    """
    attributes = attributes_of(value)
    for name in keys if are_fields else ["data"] if isinstance(value, UserDict) else []:
        attributes.pop(name, None)
    places = {id(part): i for i, part in enumerate(own) if type(part) not in _PLAIN}  # equal numbers are the same object by chance
    twins = {name: places[id(part)] for name, part in attributes.items() if id(part) in places}
    beside = {name: part for name, part in attributes.items() if name not in twins}
    names = [*keys, *beside]

    def make(parts: Sequence[Any]) -> Any:
        new = _copy(value)
        put(new, keys, parts[: len(own)])
        _put_fields(new, list(beside), parts[len(own) :])
        _put_fields(new, list(twins), [parts[i] for i in twins.values()])
        return new

    return Inside(names, [*own, *beside.values()], partial(_checked, make, names), len(own), are_fields)


def _copy(value: Any) -> Any:
    """Make a shallow copy to put parts into; raise a TypeError if that would change the value itself."""
    new = copy.copy(value)
    if getattr(value, "__dict__", None) is value:
        new.__dict__ = new
    stores = ("__dict__", "data") if isinstance(value, UserDict) else ("__dict__",)
    if new is value or any(getattr(new, name, None) is getattr(value, name, new) for name in stores):
        raise TypeError("its copy is itself")
    return new


def _checked(make: Callable[[Sequence[Any]], Any], keys: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Make a value from parts, and check it by reading them back; raise a TypeError if it holds something else."""
    try:
        new = make(parts)
        again = inside(new)
    except Exception as error:
        raise TypeError(f"it cannot be rebuilt from other parts: {type(error).__qualname__}: {error}") from error
    if again is None or list(again.keys) != list(keys) or not all(map(_is_same, again.parts, parts)):
        raise TypeError("rebuilt from other parts, it does not hold the parts that it was given")
    return new


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an instance, those in slots included."""
    return {**in_slots(value), **getattr(value, "__dict__", {})}


def in_slots(value: Any) -> dict[str, Any]:
    """Return the attributes that an instance has in slots."""
    return {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}


def slots_of(kind: type) -> list[str]:
    """Return the names of the attributes that a class's instances have in slots; private ones as Python mangles them."""
    members = [vars(base) for base in kind.__mro__ if "__slots__" in vars(base)]
    return [name for some in members for name, member in some.items() if isinstance(member, types.MemberDescriptorType)]


def is_block_mask(value: Any) -> bool:
    """Return whether a value is flex attention's BlockMask, without importing flex attention, because few programs use it."""
    loaded = sys.modules.get("torch.nn.attention.flex_attention")
    return loaded is not None and isinstance(value, loaded.BlockMask)


def leaves_of(value: Any, *, objects_deep: int = _OBJECTS_DEEP, without: str | None = None) -> Iterator[Any]:
    """Yield the leaves of a pytree, and the values in functions' closures.

    Args:
        objects_deep: how many levels of objects with unknown parts are searched too.
        without: a package whose own objects are not searched.
    """
    return _leaves(value, objects_deep, without, {})


def _leaves(value: Any, deep: int, without: str | None, seen: dict[int, Any]) -> Iterator[Any]:
    found = inside(value)
    parts, deep = (found.parts, deep) if found is not None else _seen_in(value, deep, without)
    if found is None:
        yield value
    if id(value) in seen:
        return
    if parts:
        seen[id(value)] = value
    for part in parts:
        yield from _leaves(part, deep, without, seen)


def _seen_in(value: Any, deep: int, without: str | None) -> tuple[Sequence[Any], int]:
    """Return the values in an object or a function, and how deep to search from there."""
    if isinstance(value, torch.Tensor) or type(value) in _PLAIN or isinstance(value, _OPAQUE):
        return (), deep
    if isinstance(value, PackedSequence):
        return tuple(value), deep
    if is_block_mask(value):
        return list(vars(value).values()), deep
    if isinstance(value, partial):
        return (value.func, value.args, value.keywords), 0
    if isinstance(value, types.FunctionType):
        return (*closure_of(value), value.__defaults__, value.__kwdefaults__), 0
    is_left = not deep or str(type(value).__module__).partition(".")[0] == without
    return ((), deep) if is_left else (list(attributes_of(value).values()), deep - 1)


def closure_of(function: types.FunctionType) -> Iterator[Any]:
    """Yield the values in a function's closure."""
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not yet filled
            continue


def flattened(value: Any) -> list[Any]:
    """Return the leaves of a pytree; a value that is not one is its only leaf."""
    found = inside(value)
    return [value] if found is None else [leaf for part in found.parts for leaf in flattened(part)]


def refilled(value: Any, leaves: Iterator[Any]) -> Any:
    """Return a pytree like another one, with other leaves, taken in order."""
    found = inside(value)
    return next(leaves) if found is None else found.make([refilled(part, leaves) for part in found.parts])


def mapped(change: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return a pytree like another one, with each tensor changed; a value that is not a pytree stays the same."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, PackedSequence):
        return value._replace(data=change(value.data))
    found = inside(value)
    return value if found is None else found.make([mapped(change, part) for part in found.parts])


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors that `mapped` changes, in its order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, PackedSequence):
        return [value.data]
    found = inside(value)
    return [] if found is None else [tensor for part in found.parts for tensor in tensors_of(part)]
