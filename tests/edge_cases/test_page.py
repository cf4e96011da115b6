"""`docs/batches.md`: one table of what is cut, put together and restored. Each row names its tests, and each kind has a row."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bpipe.errors import StageError
from tests.edge_cases import test_batches, test_outputs, test_recompute
from tests.edge_cases.case import NUM_STAGES, M, pipeline
from tests.test_recompute import AllTwice

pytestmark = pytest.mark.usefixtures("one_thread")

TABLE = [
    line.strip("| ").split(" | ")
    for line in (Path(__file__).parents[2] / "docs" / "batches.md").read_text().splitlines()
    if line.startswith("| ")
]
KINDS: dict[str, Any] = {
    "cut": test_batches.KINDS,
    "refused": test_batches.UNKNOWN,
    "merged": test_outputs.MERGED,
    "not merged": test_outputs.REFUSED,
    "random": test_recompute.RANDOM,
    "state": test_recompute.STATE,
    "changed": test_recompute.CHANGED,
    "buffers": test_recompute.BUFFERS,
    "differs": test_recompute.UNKNOWN,
}


def test_every_row_names_its_tests_and_every_kind_has_a_row() -> None:
    head, *rows = TABLE
    named = {prefix: set[str]() for prefix in KINDS}
    assert head[-1] == "tests"
    for row in rows:
        assert len(row) == len(head)
        tests = re.findall("`([^`]+)`", row[-1])
        assert tests
        for test in tests:
            is_kind = re.fullmatch(r"([a-z ]+)\[(.+)\]", test)
            if is_kind is None:
                assert_there(test)
            else:
                named[is_kind[1]].add(is_kind[2])
    assert named == {prefix: set(kinds) for prefix, kinds in KINDS.items()}


def assert_there(test: str) -> None:
    path, name = test.split("::")
    module = path.removeprefix("tests/").removesuffix(".py")
    package = "tests" if path.startswith("tests/") else "tests.edge_cases"
    assert callable(getattr(importlib.import_module(f"{package}.{module}"), name))


# What the other tests leave out: what a forward changes in its arguments.


def in_a_dict(x: torch.Tensor, given: Any) -> Any:
    given["calls"] += 1
    return 1 / given["calls"]


def in_an_array(x: torch.Tensor, given: Any) -> Any:
    given += 1
    return float(given[0][0])


ARGUMENTS: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "a dict": (in_a_dict, lambda: {"calls": 0}, "returned a different output"),
    "an array": (in_an_array, lambda: np.ones((M, 2)), "returned a different output"),
    "a generator": (lambda x, given: torch.rand(x.shape, generator=given), torch.Generator, "returned a different output"),
    "a tensor": (lambda x, given: given.add_(1), lambda: torch.ones(M, 4), "its input was changed in place"),
}


class Given(nn.Module):
    def __init__(self, scale: Callable[..., Any]) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), scale

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.linear(x) * self.scale(x, given)


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_what_a_forward_changes_in_its_arguments_is_refused(kind: str) -> None:
    scale, make, message = ARGUMENTS[kind]
    modules = [Given(scale if stage == 1 else lambda x, given: 1) for stage in range(NUM_STAGES)]
    loopback, schedules = pipeline(AllTwice, modules, F.mse_loss)
    with pytest.raises(StageError, match=f"of stage 1 cannot be recomputed: .*{message}"):
        loopback.step(schedules, torch.randn(M, 4), target=torch.randn(M, 4), given=make())
