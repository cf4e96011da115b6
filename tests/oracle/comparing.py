"""Compare plans in neutral words, and say of each unequal one where it first differs, section by section."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import isclose
from typing import Any, NamedTuple

TOLERANCE = 1e-9  # of seconds, a share, and of those near zero so many: sums may be added up in another order
NOTHING = "nothing"  # where one of both has ended


class Difference(NamedTuple):
    """The first place in a section of a plan at which two answers differ."""

    name: str
    section: str
    where: str
    values: tuple[Any, Any]

    def __str__(self) -> str:
        first, second = self.values
        return f"{self.name}: {', '.join(filter(None, (self.section, self.where)))}: {first} and {second}"


def differences(first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    """Yield the differences of two answers to all cases, in the order of the first one's cases."""
    for name in {**first["plans"], **second["plans"]}:
        if len(both := [made["plans"][name] for made in (first, second) if name in made["plans"]]) < 2:
            yield Difference(name, "asked", "", (name in first["plans"], name in second["plans"]))
            continue
        here, there = both
        if here["case"] != there["case"]:
            yield Difference(name, "case", *_first(here["case"], there["case"]))
        elif here["plan"].get("refused") != there["plan"].get("refused"):
            yield Difference(name, "refused", "", ("refused" in here["plan"], "refused" in there["plan"]))
        else:
            yield from _of_plans(name, here["plan"], there["plan"])


def _of_plans(name: str, first: dict[str, Any], second: dict[str, Any]) -> Iterator[Difference]:
    for section in {**first, **second}:
        both = first.get(section, NOTHING), second.get(section, NOTHING)
        if not _equal(*both):
            yield Difference(name, section, *_first(*both))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) or isinstance(other, float):
        return isinstance(one, (int, float)) and isinstance(other, (int, float)) and _close(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _close(one: float, other: float) -> bool:
    return isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


def _first(one: Any, other: Any) -> tuple[str, tuple[Any, Any]]:
    """Where two unequal values first differ, and both there; a list of plain values is one."""
    inner: Iterator[tuple[str, Any, Any]] = iter(())
    if isinstance(one, dict) and isinstance(other, dict):
        inner = ((key, one.get(key, NOTHING), other.get(key, NOTHING)) for key in {**one, **other})
    elif isinstance(one, list) and isinstance(other, list) and any(isinstance(value, list) for value in (*one, *other)):
        longest = range(max(len(one), len(other)))
        inner = ((f"place {i}", *(each[i] if i < len(each) else NOTHING for each in (one, other))) for i in longest)
    for key, here, there in inner:
        if not _equal(here, there):
            where, both = _first(here, there)
            return ", ".join(filter(None, (key, where))), both
    return "", (one, other)


def report(first: dict[str, Any], second: dict[str, Any], most: int = 20) -> tuple[list[str], int]:
    """Return lines about the differences, of `most` unequal cases, and how many cases are unequal."""
    found = list(differences(first, second))
    unequal = list(dict.fromkeys(one.name for one in found))
    shown = set(unequal[:most])
    lines = [str(one) for one in found if one.name in shown]
    if len(unequal) > most:
        lines.append(f"... and {len(unequal) - most} other cases")
    counted = ", ".join(f"{section} {count}" for section, count in Counter(one.section for one in found).items())
    refused = sum("refused" in each["plan"] for each in first["plans"].values())
    kinds = f"{len(first['plans']) - refused} plans and {refused} refusals"
    lines.append(f"{kinds} compared: {f'{len(unequal)} unequal ({counted})' if unequal else 'all equal'}")
    return lines, len(unequal)
