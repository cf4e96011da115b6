"""Random skips under random schedules: whatever stages hand on, to whom, and in how many messages."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import BPipeError, BudgetError
from bpipe.schedules import Plan, build, rules
from tests.schedules.shape_of_plan import shape_of
from tests.skips.models import by_itself
from tests.skips.test_equality import assert_close, gradients_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6
RULES = [rule.name for rule in rules() if not rule.local]


class Stage(nn.Module):
    """Adds what it gets to its input, and hands on its output, something inside, or a tuple with a tensor that trains nothing."""

    def __init__(self, index: int, skips: Mapping[str, tuple[int, ...]], choices: random.Random) -> None:
        super().__init__()
        kinds = "output", "inside", "its own", "input", "fixed"
        self.made = {name: choices.choice(kinds) for name in skips if skips[name][0] == index}
        self.used = sorted(name for name, (_, *users) in skips.items() if index in users)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gates = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in self.made})

    def forward(self, x: torch.Tensor, **skips: Any) -> Any:
        assert sorted(skips) == self.used
        given = x
        for name in self.used:
            value, number = skips[name] if isinstance(skips[name], tuple) else (skips[name], 1)
            x = x + number * torch.tanh(value) * value.sin()
        inside = torch.tanh(self.up(x))
        y = x + self.down(inside)
        values = {
            "output": y,
            "inside": inside,
            "its own": (torch.zeros(()), 2),
            "input": given,
            "fixed": (y.detach().cos(), 3),
        }
        made = {name: (self.gates[name](inside), 2) if kind == "its own" else values[kind] for name, kind in self.made.items()}
        return (y, made) if made else y


def some_skips(choices: random.Random, depth: int) -> dict[str, tuple[int, ...]]:
    skips = {}
    for number in range(choices.randint(1, 5)):
        source = choices.randrange(depth - 1)
        users = choices.sample(range(source + 1, depth), choices.randint(1, min(4, depth - 1 - source)))
        skips[f"s{number}"] = (source, *sorted(users))
    return skips


def some_plan(choices: random.Random) -> tuple[Plan, dict[str, tuple[int, ...]]]:
    """A plan of whole microbatches, which is balanced where its schedule leaves room for that."""
    while True:
        p, v, m = choices.choice((1, 2, 3, 4)), choices.choice((1, 2, 3)), choices.randint(1, 6)
        name = choices.choice(RULES)
        try:
            plain = build(name, p * v, m, num_ranks=p)
        except BPipeError:
            continue
        if plain.depth < 3:
            continue
        skips = some_skips(choices, plain.depth)
        slots = max(plain.peak_slots) - 1 if max(plain.peak_slots) > 3 and choices.random() < 0.6 else None
        try:
            return build(name, p * v, m, num_ranks=p, slots=slots, skips=skips.values()), skips
        except BudgetError:
            return build(name, p * v, m, num_ranks=p, skips=skips.values()), skips


def check(seed: int) -> None:
    choices = random.Random(seed)
    plan, skips = some_plan(choices)
    torch.manual_seed(seed)
    m, depth = plan.num_microbatches, plan.depth
    stages = [Stage(index, skips, choices).double() for index in range(depth)]
    alone = deepcopy(stages)
    x, target = torch.randn(2, 2 * m, WIDTH, dtype=torch.float64)
    loopback = bpipe.Loopback(plan.num_ranks)
    schedules: list[bpipe.Schedule] = []
    copies = [deepcopy(stages[i % depth]) for i in range(plan.num_stages)]
    for rank in range(plan.num_ranks):
        directions = shape_of(plan).directions
        how: dict[str, Any] = {"device": "cpu", "group": loopback.rank(rank), "directions": directions, "skips": skips}
        held = [bpipe.PipelineStage(copies[i], i, plan.num_stages, **how) for i in plan.stages_of(rank)]
        schedules.append(bpipe.FromPlan(held, plan, loss_fn=nn.functional.mse_loss))
    steps = 2
    for _ in range(steps):
        output = loopback.step(schedules, x, target=target)
        for one, wanted in zip(x.chunk(m), target.chunk(m)):
            (nn.functional.mse_loss(by_itself(alone, skips, one, {}), wanted) / m).backward()
    expected = by_itself(alone, skips, x, {})
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loopback.eval(schedules, x), expected, rtol=0, atol=1e-12)
    gradients = [parameter.grad for stage in alone for parameter in stage.parameters()]
    assert_close(gradients_of(schedules), gradients * shape_of(plan).directions)


@pytest.mark.parametrize("seed", range(12))
def test_a_random_graph_of_stages_trains_as_in_a_single_process(seed: int) -> None:
    check(seed)


@pytest.mark.parametrize("first", range(100, 200, 50))
def test_many_random_graphs_of_stages(first: int) -> None:
    for seed in range(first, first + 50):
        check(seed)
