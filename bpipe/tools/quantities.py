"""Quantities as people write and read them: 1.5GiB, 25GB/s, 20ms."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import TypeVar

from bpipe.errors import ConfigurationError
from bpipe.plan.amounts import show_seconds

__all__ = ["bytes_of", "bytes_per_second_of", "one_or_each", "seconds_of", "show_seconds"]

T = TypeVar("T")

BYTES = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
BITS = {"bit": 1 / 8, "kbit": 125, "mbit": 125 * 10**3, "gbit": 125 * 10**6}
SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}

_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)(?:/s)?", re.IGNORECASE)


def bytes_of(text: str) -> int:
    """Read a number of bytes.

    Raises:
        ConfigurationError: the text is not a number of bytes.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("4096")
        (1610612736, 4096)
    """
    return round(_read(text, BYTES, "bytes, such as 4096, 512MiB or 1.5GB"))


def bytes_per_second_of(text: str) -> float:
    """Read a bandwidth: `25GB/s`, `25GB`, or `200Mbit/s`.

    Example:
        >>> bytes_per_second_of("25GB/s"), bytes_per_second_of("200Mbit/s")
        (25000000000.0, 25000000.0)
    """
    return _read(text, {**BYTES, **BITS}, "bytes per second, such as 25GB/s or 200Mbit/s")


def seconds_of(text: str) -> float:
    """Read a time: `0.1`, `20ms`, `5us`.

    Example:
        >>> seconds_of("20ms"), seconds_of("10us")
        (0.02, 1e-05)
    """
    return _read(text, SECONDS, "seconds, such as 0.1, 20ms or 5us")


def _read(text: str, units: Mapping[str, float], expected: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    try:
        number = float(match[1]) if match else float("nan")
    except ValueError:
        number = float("nan")
    unit = units.get(match[2].lower()) if match else None
    if unit is None or not isfinite(number * unit):
        raise ConfigurationError(f"{text!r} is not a number of {expected}")
    return number * unit if unit >= 1 else number / round(1 / unit)  # 10 * 1e-6 is not 1e-5, and 10 / 10**6 is


def one_or_each(text: str, read: Callable[[str], T]) -> T | tuple[T, ...]:
    """Read one quantity, or several with commas between them.

    Example:
        >>> one_or_each("2ms", seconds_of), one_or_each("1,2", bytes_of)
        (0.002, (1, 2))
    """
    parts = tuple(read(part) for part in text.split(","))
    return parts[0] if len(parts) == 1 else parts
