"""Look up names that people write in many ways, refuse unknown ones with the nearest known one, and refuse impossible sizes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from sys import float_info
from typing import TypeVar

from bpipe.errors import ConfigurationError

__all__: list[str] = []

T = TypeVar("T")


def lookup(what: str, name: object, table: Mapping[str, T]) -> T:
    """Return the entry of a table whose name is the given one, ignoring case and punctuation.

    Raises:
        ConfigurationError: there is none; the message names the nearest.

    Example:
        >>> lookup("model", "GPT3_96B", {"gpt3-96b": 1})
        1
    """
    plain = {_plain(key): key for key in table}
    key = plain.get(_plain(str(name)))
    if key is not None and isinstance(name, str):
        return table[key]
    near = [plain[match] for match in get_close_matches(_plain(str(name)), plain, n=1)]
    hint = f", did you mean {near[0]!r}?" if near else ""
    raise ConfigurationError(f"no {what} is called {name!r}{hint}; there are {', '.join(table)}")


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def check_count(name: str, value: object, *, least: int = 1) -> None:
    """Raise unless a value is a whole number of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}={value!r}: give a whole number of at least {least}")


def check_positive(name: str, value: object, *, most: float = float("inf")) -> None:
    """Raise unless a value is a finite number above 0, and at most `most`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value <= min(most, float_info.max):  # type: ignore[operator]
        limit = "" if most == float("inf") else f", at most {most:g}"
        raise ConfigurationError(f"{name}={value!r}: give a positive number{limit}")
