"""Large values that every microbatch gets whole: looked through once in a step, in few calls, and each shape in them counts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.model.microbatch import describe, tensors_in
from tests.edge_cases.case import NUM_STAGES, M

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, WIDTH, ENTRIES = 2 * M, 4, 1000


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, table: Any = None) -> torch.Tensor:
        return x[..., :1] * self.linear(x[..., :WIDTH])


def calls_of(function: Callable[[], Any]) -> int:
    """How many Python functions a call calls."""
    count = 0

    def profiler(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(profiler)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def calls_of_a_step(table: Any, *, by_microbatch: bool = False) -> int:
    """How many Python functions the third step calls."""
    loopback = bpipe.Loopback(NUM_STAGES)
    stages = [bpipe.PipelineStage(Stage(), i, NUM_STAGES, "cpu", loopback.rank(i)) for i in range(NUM_STAGES)]
    schedules = [bpipe.OneFOneB(one, M, loss_fn=F.mse_loss, kwargs_chunk_spec={"table": None}) for one in stages]
    x = torch.randn(ROWS, WIDTH)
    kwargs = {"kwarg_mbs": [{"table": table}] * M} if by_microbatch else {"table": table}

    def step() -> None:
        loopback.step(schedules, x, target=x, return_outputs=False, **kwargs)

    step(), step()
    return calls_of(step)


PLAIN: dict[str, Callable[[int], Any]] = {
    "a dict of numbers": lambda n: {f"key {i}": i for i in range(n)},
    "a list of floats": lambda n: [float(i) for i in range(n)],
    "a tuple of words": lambda n: tuple(map(str, range(n))),
    "dicts in a dict": lambda n: {"ids": dict.fromkeys(range(n), 0), "names": dict.fromkeys(range(n), "a")},
    "weights in a list": lambda n: [[float(i) for i in range(n)], list(range(n))],
}


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_values_are_not_looked_at_one_by_one(kind: str) -> None:
    few, many = (calls_of_a_step(PLAIN[kind](n)) for n in (64, ENTRIES))
    assert many - few < ENTRIES // 4


@pytest.mark.parametrize("by_microbatch", [False, True])
def test_what_must_be_looked_at_is_so_once_and_not_for_each_microbatch(by_microbatch: bool) -> None:
    """On each rank: a graph is looked for, the value described, and the storages found of which no activation is."""
    table = {i: [torch.zeros(1)] for i in range(ENTRIES)}
    at_once = calls_of(lambda: (tensors_in(table), describe(table)))
    usual, seen = (calls_of_a_step(one, by_microbatch=by_microbatch) for one in ({}, table))
    assert seen - usual < NUM_STAGES * 3 * at_once


MANY = dict.fromkeys(range(100), 1)
DIFFERENT: dict[str, tuple[Any, Any]] = {
    "a shape": ({**MANY, 50: torch.zeros(2)}, {**MANY, 50: torch.zeros(3)}),
    "a dtype, inside": ([MANY, [torch.zeros(2)] * 99], [MANY, [torch.zeros(2)] * 98 + [torch.zeros(2).double()]]),
    "a gradient": ([torch.zeros(2)] * 64, [torch.zeros(2)] * 63 + [torch.zeros(2, requires_grad=True)]),
    "a word": (["a"] * 64, ["a"] * 63 + ["b"]),
    "a type": ([1] * 64, [1] * 63 + [True]),
    "a key": (MANY, {**dict.fromkeys(range(99), 1), "99": 1}),
    "a number": ([1] * 64, [1] * 63 + [2]),
    "the length": ([1.0] * 64, [1.0] * 65),
    "the container": ([1] * 64, (1,) * 64),
    "a long word": (["a" * 5000] * 64, ["a" * 4999 + "b"] + ["a" * 5000] * 63),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_whatever_decides_in_a_large_value_makes_another_form(kind: str) -> None:
    one, other = DIFFERENT[kind]
    assert describe(one) == describe(one) != describe(other)
    assert str(describe(one)) != str(describe(other))
    known: Any = {}
    assert [describe(value, known) for value in (one, other, one)] == [describe(value) for value in (one, other, one)]


def test_floats_decide_nothing_and_numbers_are_told_apart() -> None:
    assert describe([1.0] * 64) == describe([1.0] * 63 + [2.0])
    assert describe([1] * 64).form == describe([2] * 64).form
    assert len(str(describe(list(range(ENTRIES))))) < 5000


class Widening(Stage):
    """Its output is as wide as a tensor somewhere in a table says."""

    def forward(self, x: torch.Tensor, table: Any = None) -> torch.Tensor:
        return torch.cat([super().forward(x), table[60].expand(len(x), -1)], 1)


def test_a_shape_deep_in_a_table_is_another_shape_of_the_step() -> None:
    torch.manual_seed(0)
    modules = [Widening(), *(Stage() for _ in range(NUM_STAGES - 1))]
    loopback = bpipe.Loopback(NUM_STAGES)
    stages = [bpipe.PipelineStage(one, i, NUM_STAGES, "cpu", loopback.rank(i)) for i, one in enumerate(modules)]
    specs = {"kwargs_chunk_spec": {"table": None}}
    schedules = [bpipe.BalancedOneFOneB(one, M, loss_fn=F.mse_loss, **specs) for one in stages]
    x, losses, expected = torch.randn(ROWS, WIDTH), [], []
    for width in (1, 2, 1):
        table = {**MANY, 60: torch.ones(1, width)}
        loopback.step(schedules, x, target=x, losses=losses, table=table)
        gradients = [parameter.grad for module in modules for parameter in module.parameters()]
        loopback_losses = torch.stack(losses)
        for module in modules:
            module.zero_grad()
        for part in x.chunk(M):
            y = part
            for module in modules:
                y = module(y, table=table)
            loss = F.mse_loss(y, part)
            (loss / M).backward()
            expected.append(loss.detach())
        assert torch.equal(torch.stack(expected[-M:]), loopback_losses)
        assert all(map(torch.equal, gradients, (parameter.grad for module in modules for parameter in module.parameters())))
        for module in modules:
            module.zero_grad()
