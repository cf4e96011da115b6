"""Names in any writing; unknown ones name the nearest; numbers that are none are refused, and budgets of other ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bpipe.checks import budgets_of, check_choice, check_count, check_positive, check_seconds, counts_of, lookup
from bpipe.errors import ConfigurationError

TABLE = {"gpt3-96b": 1, "llama-65b": 2}


@pytest.mark.parametrize("name", ["gpt3-96b", "GPT3-96B", "gpt3_96b", "GPT-3 96B"])
def test_names_in_any_writing(name: str) -> None:
    assert lookup("model", name, TABLE) == 1


def test_unknown_names_come_with_the_nearest_and_with_all() -> None:
    with pytest.raises(
        ConfigurationError, match=r"no model is called 'llama-66b', did you mean 'llama-65b'\?; there are gpt3-96b, "
    ):
        lookup("model", "llama-66b", TABLE)
    with pytest.raises(ConfigurationError, match=r"no model is called 'zzz'; there are"):
        lookup("model", "zzz", TABLE)


@pytest.mark.parametrize("name", [None, 5, ["gpt3-96b"]])
def test_what_is_no_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match="no model is called"):
        lookup("model", name, TABLE)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "1", None])
def test_counts(value: Any) -> None:
    check_count("n", 1)
    with pytest.raises(ConfigurationError, match="n="):
        check_count("n", value)


@pytest.mark.parametrize("value", [0, -0.1, math.inf, math.nan, True, "1", None, 1.5])
def test_positive_numbers(value: Any) -> None:
    check_positive("n", 1, most=1)
    with pytest.raises(ConfigurationError, match="n="):
        check_positive("n", value, most=1)


@pytest.mark.parametrize("value", [0, -0.1, math.nan, True, "1", None])
def test_seconds(value: Any) -> None:
    check_seconds("n", math.inf)
    check_seconds("n", None, or_none=True)
    with pytest.raises(ConfigurationError, match=r"n=.*: give a positive number of seconds"):
        check_seconds("n", value)
    if value is not None:
        with pytest.raises(ConfigurationError, match="n="):
            check_seconds("n", value, or_none=True)


def test_choices_are_named() -> None:
    check_choice("by", "b", ("a", "b", "c"))
    with pytest.raises(ConfigurationError, match=r"by=None: choose 'a', 'b' or 'c'$"):
        check_choice("by", None, ("a", "b", "c"))


def test_lists_of_counts() -> None:
    assert counts_of("n", [3, 1, 3]) == [1, 3] and counts_of("n", 4) == [4] and counts_of("n", 0, least=0) == [0]
    for given in ("12", b"1", None, [1.5], ["1"]):
        with pytest.raises(ConfigurationError, match=r"^n=.*: give a whole number of at least 1$"):
            counts_of("n", given)
    with pytest.raises(ConfigurationError, match=r"^n is empty: give at least one$"):
        counts_of("n", ())
    with pytest.raises(ConfigurationError, match=r"^size=0: "):
        counts_of("n", [0], of_one="size")


def test_budgets_of_ranks() -> None:
    assert budgets_of("budget", 5, 2) == budgets_of("budget", [5, 5], 2) == (5, 5)
    assert budgets_of("budget", [None, 1], 2) == (None, 1) and budgets_of("budget", None, 2) == (None, None)
    for given in (0, True, 1.0, "11", [1], [1, 0], [1, "1"]):
        with pytest.raises(ConfigurationError, match=r"^budget=.*: give a whole number of at least 1, or one for each of 2 ranks$"):
            budgets_of("budget", given, 2)
    with pytest.raises(ConfigurationError, match=r"^budget=0: give more$"):
        budgets_of("budget", 0, 2, "give more")
