"""Names in any writing; unknown ones name the nearest; numbers that are none are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from bpipe.errors import ConfigurationError
from bpipe.estimate.checks import check_count, check_positive, lookup

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
