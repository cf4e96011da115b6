"""Encode the records that ranks send each other, except headers, which are frequent and have a separate format.

A record is a NamedTuple. It travels as a JSON array of its type's name and its fields, bytes in hexadecimal digits, a record or
dataclass inside it as an array of fields, and Python's `array` as one of numbers, with null for nan. A dataclass with a method
`read`, which returns one of several types, travels with the name of its type, too. What arrives is checked against the types of the
fields once, in `decode`, so that nothing else has to doubt it: text can be shown on a terminal. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import IntEnum
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from bpipe.errors import CommError, printable

__all__: list[str] = []

Record = TypeVar("Record", bound=tuple[Any, ...])
T = TypeVar("T")
Read = Callable[[Any], Any]  # checks a JSON value and converts it; raises a ValueError, TypeError, LookupError or OverflowError

MAX_BYTES = 2**18  # of a record
MAX_INT = 2**64  # which is more than any field holds; Python's integers have no end


def encode(record: tuple[Any, ...]) -> bytes:
    """Return a record as the bytes that are sent."""
    values = [type(record).__name__, *record]
    return json.dumps(values, ensure_ascii=False, separators=(",", ":"), default=_plain).encode(errors="replace")


def _plain(value: Any) -> Any:
    """Return bytes as text, and an array or a dataclass as a list; raise a TypeError for anything else."""
    if isinstance(value, array):
        return [None if number != number else number for number in value]
    if isinstance(value, bytes):
        return value.hex()
    return [type(value).__name__] * hasattr(value, "read") + [getattr(value, field.name) for field in fields(value)]


def decode_text(data: bytes) -> str:
    """Return the text that another process sent outside a record, as it can be shown."""
    return printable(data.decode(errors="replace"))


def decode(kind: type[Record], data: bytes, what: str, most_bytes: float = MAX_BYTES) -> Record:
    """Return the record that `encode` wrote.

    Args:
        kind: the type of the record.
        data: bytes from another process.
        what: what they should be, for the error.
        most_bytes: how many they may be; those that come by a collective call are no more than this allows.

    Raises:
        CommError: they are not that, or are too many.
    """
    try:
        if not len(data) <= most_bytes or not (data.startswith(b"[") and data.endswith(b"]")):
            raise ValueError("it is too long, or not a JSON array")
        name, *values = json.loads(data.decode())
        if name != kind.__name__:
            raise ValueError(f"it is of type {name!r:.40}")
        return read_record(kind, values)
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CommError(f"{len(data)} bytes that start {data[:24]!r} are not a valid {what}: {error!s:.200}") from error


@cache
def _reads(kind: Callable[..., Any]) -> dict[str, Read]:
    """Return what reads each field of a NamedTuple or dataclass."""
    return {name: _read_of(hint) for name, hint in get_type_hints(kind, localns={"array": _ArrayOf}).items()}


class _ArrayOf:
    """What `array` stands for in hints: `array[int]` is what reads one. Before Python 3.12, `array` itself takes no type."""

    def __class_getitem__(cls, item: type) -> Read:
        return partial(_numbers, "d", _number) if item is float else partial(_numbers, "q", _integer)


def _read_of(hint: Any) -> Read:
    origin, args = get_origin(hint), get_args(hint)
    if origin is tuple:
        return partial(_many, _read_of(args[0])) if args[1:] == (...,) else partial(_some, list(map(_read_of, args)))
    if isinstance(hint, partial):
        return hint
    if origin is UnionType:  # with None
        read = _read_of(args[0])
        return lambda value: None if value is None else read(value)
    if origin is Mapping:
        return partial(_mapping, *map(_read_of, args))
    if issubclass(hint, IntEnum):
        return lambda value: hint(_integer(value))
    read = getattr(hint, "read", None) or partial(read_record, hint)
    return {bool: _boolean, int: _integer, float: _number, str: _text, bytes: _bytes}.get(hint, read)


def read_record(kind: Callable[..., T], values: Any) -> T:
    """Return a record or dataclass, given its fields as JSON has them; raise as a `Read` does if they are not its."""
    reads = _reads(kind)
    return kind(**dict(zip(reads, _some(list(reads.values()), values))))


def _mapping(read_key: Read, read: Read, values: Any) -> dict[Any, Any]:
    if type(values) is not dict:
        raise TypeError("a field is not an object")
    return {read_key(int(key) if read_key is _integer else key): read(value) for key, value in values.items()}


def _many(read: Read, values: Any) -> tuple[Any, ...]:
    return tuple(map(read, _array(values)))


def _some(reads: list[Read], values: Any) -> tuple[Any, ...]:
    return tuple(read(value) for read, value in zip(reads, _array(values), strict=True))


def _array(value: Any) -> list[Any]:
    if type(value) is not list:
        raise TypeError("a field is not an array")
    return value


def _numbers(typecode: str, read: Read, values: Any) -> array[Any]:
    return array(typecode, [math.nan if value is None else read(value) for value in _array(values)])


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("a field is neither true nor false")
    return value


def _integer(value: Any) -> int:
    if type(value) is not int or not -MAX_INT < value < MAX_INT:
        raise TypeError("a field is not a 64-bit integer")
    return value


def _number(value: Any) -> float:
    if type(value) is not float:
        return float(_integer(value))
    if not math.isfinite(value):
        raise TypeError("a field is not a finite number")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("a field is not a string")
    value.encode()  # which refuses half a character
    return printable(value)


def _bytes(value: Any) -> bytes:
    return bytes.fromhex(_text(value))
