"""Refuse arguments that cannot be meant, in the same words everywhere: names, numbers, and budgets of ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from sys import float_info
from typing import Any, TypeGuard, TypeVar

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


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise unless a value is one of a few texts."""
    if value not in choices:
        *others, last = map(repr, choices)
        raise ConfigurationError(f"{name}={value!r}: choose {', '.join(others)} or {last}")


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_count(value: object, least: int = 1) -> TypeGuard[int]:
    """Return whether a value is a whole number of at least `least`."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def check_count(name: str, value: object, *, least: int = 1, most: int | None = None, or_none: bool = False) -> None:
    """Raise unless a value is a whole number of at least `least`, and at most `most`."""
    if not (is_count(value, least) and (most is None or value <= most)) and not (or_none and value is None):
        limit = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name}={value!r}: give a whole number {limit}{', or None' * or_none}")


def series(name: str, given: object) -> tuple[Any, ...]:
    """Return one value or several as a tuple; raise if there is none."""
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        return (given,)
    if not (listed := tuple(given)):
        raise ConfigurationError(f"{name} is empty: give at least one")
    return listed


def counts_of(name: str, given: object, *, of_one: str = "", least: int = 1) -> list[int]:
    """Return one whole number or several, each once and in order; the error for one of them may call it `of_one`."""
    listed = series(name, given)
    for one in listed:
        check_count(of_one or name, one, least=least)
    return sorted(set(listed))


def check_positive(name: str, value: object, *, most: float = float("inf")) -> None:
    """Raise unless a value is a finite number above 0, and at most `most`."""
    if not is_number(value) or not 0 < value <= min(most, float_info.max):
        limit = "" if most == float("inf") else f", at most {most:g}"
        raise ConfigurationError(f"{name}={value!r}: give a positive number{limit}")


def check_seconds(name: str, value: object, *, or_none: bool = False) -> None:
    """Raise unless a value is a positive number of seconds, which may be infinite."""
    if not (is_number(value) and value > 0) and not (or_none and value is None):
        raise ConfigurationError(f"{name}={value!r}: give a positive number of seconds")


def check_length(name: str, values: Sequence[object], expected: int, what: str) -> None:
    """Raise unless there is a value for each of something."""
    if len(values) != expected:
        raise ConfigurationError(f"{name} has {len(values)} entries: give one number, or one for each of {expected} {what}")


def budgets_of(name: str, given: object, num_ranks: int, advice: str = "") -> tuple[int | None, ...]:
    """Return the budget of each rank, which must be None (no limit) or a whole number of at least 1.

    Args:
        name: of the argument.
        given: one budget for all ranks, or a sequence with one for each.
        num_ranks: p.
        advice: what to give instead of anything else.
    """
    budgets: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) and not isinstance(given, str) else (given,) * num_ranks
    if len(budgets) != num_ranks or not all(one is None or is_count(one) for one in budgets):
        advice = advice or f"give a whole number of at least 1, or one for each of {num_ranks} ranks"
        raise ConfigurationError(f"{name}={given!r}: {advice}")
    return budgets
