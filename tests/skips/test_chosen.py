"""Plans that are chosen for models that are no chains: for measured layers, and by `auto` for a whole model and for stages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.chooser.plan_choice import Choice
from bpipe.errors import ConfigurationError
from bpipe.flow.shape_arguments import skips_of
from bpipe.partition import LayerCost
from bpipe.schedules import Amount, Link
from tests.ranks import run_ranks
from tests.skips.models import KINDS, gradients_by_itself, model_of

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, ROWS, M = 8, 2, 8
WHOLE = ["1f1b", "gpipe", "interleaved_1f1b"]  # of whole backwards: layers do not tell what waits between halves
mse = nn.functional.mse_loss


class UNet(nn.Module):
    """Each size on the way down goes to the same size on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(3))
        self.middle = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.up = nn.ModuleList(nn.Conv1d(2 * WIDTH, WIDTH, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = []
        for down in self.down:
            x = torch.tanh(down(x))
            sizes.append(x)
            x = nn.functional.avg_pool1d(x, 2)
        x = torch.tanh(self.middle(x))
        for up in self.up:
            x = torch.tanh(up(torch.cat([nn.functional.interpolate(x, scale_factor=2.0), sizes.pop()], 1)))
        return x


class Detection(nn.Module):
    """Each layer of the decoder reads what the encoder has made, as in DETR; its queries are parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(2))
        self.queries = Queries()
        self.decoder = nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, WIDTH, 0.0, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.encoder:
            x = layer(x)
        queries = self.queries(x)
        for layer in self.decoder:
            queries = layer(queries, x)
        return self.head(queries)


class Queries(nn.Module):
    """As many queries as there are positions, for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + torch.zeros_like(x)


MODELS = {"unet": UNet, "detection": Detection}
SHAPES = {"unet": (WIDTH, 64), "detection": (WIDTH, WIDTH)}
LAYERS = {
    "unet": ["down.0", "down.1", "down.2", "middle", "up.0", "up.1", "up.2"],
    "detection": ["embed", "encoder.0", "encoder.1", "queries", "decoder.0", "decoder.1", "decoder.2", "head"],
}


class Case:
    """A model in float64, its batch, and its gradients in one process."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.model, self.layers = MODELS[kind]().double(), [[one] for one in LAYERS[kind]]
        self.x, self.target = torch.randn(2, ROWS * M, *SHAPES[kind], dtype=torch.float64)
        alone = deepcopy(self.model)
        mse(alone(self.x), self.target).backward()
        self.gradients = {name: one.grad for name, one in alone.named_parameters()}

    @cached_property
    def measured(self) -> dict[int, tuple[LayerCost, ...]]:
        """Its layers, for microbatches of ROWS; their seconds are made up, so that each run chooses the same."""
        x, target = self.x[:ROWS], self.target[:ROWS]
        parts = bpipe.split_traced(self.model, self.layers, (x,))
        costs = bpipe.measure_layers(parts, x, layers=self.layers, loss_fn=mse, target=target, bytes_per_parameter=16)
        return {ROWS: tuple(replace(one, forward_s=1.0, backward_s=2.0, input_s=1.1, weight_s=1.1) for one in costs)}

    def trained(self, loopback: bpipe.Loopback, schedules: Sequence[Any], modules: Sequence[nn.Module], steps: int = 2) -> None:
        """Train, and compare gradients with those of one process."""
        for _ in range(steps):
            for module in modules:
                module.zero_grad()
            loopback.step(schedules, self.x, target=self.target, return_outputs=False)
        found = {name: one.grad for module in modules for name, one in module.named_parameters()}
        assert found.keys() == self.gradients.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, self.gradients[name], rtol=0, atol=1e-12)


def check_is_told(choice: Choice) -> None:
    """It reads as a choice for a chain does, and comes back from a file as it was."""
    told = str(choice)
    assert told.startswith(f"Run {choice.name}: a step of") and f"Compared: {choice.num_considered} ways." in told
    assert Choice.from_json(choice.to_json()) == choice


def chosen(case: Case, num_ranks: int, **wishes: Any) -> Choice:
    how = {"link": 1e9, "options": bpipe.Options(effort=0, reserve_bytes=0)} | wishes
    return bpipe.choose_plan(case.measured, batch=ROWS * M, num_ranks=num_ranks, **how)


@pytest.mark.parametrize(("kind", "num_ranks", "less"), [("unet", 2, 1), ("unet", 4, 0), ("detection", 2, 0), ("detection", 4, 1)])
def test_a_plan_for_measured_layers_runs(kind: str, num_ranks: int, less: int) -> None:
    """Cut as it says, within a budget of some bytes less than 1F1B's; ranks hold no more than it says, but for the loss."""
    case = Case(kind)
    budget = max(chosen(case, num_ranks, schedules=["1f1b"]).device_peak_bytes) - less
    choice = chosen(case, num_ranks, memory_bytes=budget, schedules=WHOLE)
    assert max(choice.device_peak_bytes) <= budget < max(chosen(case, num_ranks, schedules=["gpipe"]).device_peak_bytes)
    check_is_told(choice)
    parts, skips = bpipe.split_traced(case.model, choice.stages, (case.x[:ROWS],))
    loopback, plan = bpipe.Loopback(num_ranks), choice.plan
    assert tuple(sorted(set(skips.values()))) == skips_of(plan.flow)
    schedules = []
    for rank in range(num_ranks):
        own = {stage: parts[stage] for stage in plan.stages_of(rank)}
        stages = [bpipe.PipelineStage(part, i, len(parts), "cpu", loopback.rank(rank), skips=skips) for i, part in own.items()]
        schedules.append(bpipe.FromPlan(stages, plan, mse))
    assert not less or any(map(plan.evicted, range(num_ranks)))
    case.trained(loopback, schedules, parts)
    of_loss = 2 * case.target[:ROWS].nbytes  # and its gradient
    for rank, schedule in enumerate(schedules):
        most = choice.device_peak_bytes[rank] + of_loss * (plan.stage_ranks[-1] == rank)
        assert schedule.stats["device_peak_bytes"] <= most


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_whole_model(kind: str, num_ranks: int) -> None:
    """It is no chain, so that it is cut by a trace; what ranks hold is what was expected of the plan for its first step."""
    case, loopback = Case(kind), bpipe.Loopback(num_ranks)
    how: dict[str, Any] = {"layers": case.layers, "options": bpipe.Options(effort=0), "microbatch_sizes": [ROWS]}
    ranks = map(loopback.rank, range(num_ranks))
    schedules = [bpipe.auto(case.model, case.x, mse, target=case.target, group=rank, **how) for rank in ranks]
    case.trained(loopback, schedules, [module for one in schedules for module in one.modules], steps=3)
    check_is_told(schedules[0].choice)
    for rank, schedule in enumerate(schedules):
        assert schedule.stats["device_peak_bytes"] == schedule.choice.device_peak_bytes[rank]


def test_a_whole_model_over_processes() -> None:
    """Rank 0 says to all that a trace cuts it."""
    case = Case("unet")
    found = {name: gradient for of_rank in run_ranks(in_a_process, 2) for name, gradient in of_rank.items()}
    assert found.keys() == case.gradients.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, case.gradients[name], rtol=0, atol=1e-12)


def in_a_process(rank: int) -> dict[str, torch.Tensor | None]:
    case = Case("unet")
    schedule = bpipe.auto(case.model, case.x, mse, target=case.target, options=bpipe.Options(effort=0), microbatch_sizes=[ROWS])
    for _ in range(2):
        for module in schedule.modules:
            module.zero_grad()
        schedule.step(case.x, target=case.target, return_outputs=False)
    schedule.close()
    return {name: one.grad for module in schedule.modules for name, one in module.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_stages_within_a_budget(kind: str) -> None:
    """That of a plan that takes as little as can be: what one evicts or computes in another order is what ranks then hold."""
    model, loopback = model_of(kind, 4, 2 * M), bpipe.Loopback(4)
    ranks = range(4)
    stages = [bpipe.PipelineStage(model.stages[i], i, 4, "cpu", loopback.rank(i), skips=model.skips) for i in ranks]
    lowest = [bpipe.Balanced(bpipe.OneFOneB(one, M, mse), budget="lowest") for one in stages]
    batch: dict[str, Any] = {"target": model.target, "return_outputs": False} | model.kwargs
    for _ in range(2):
        loopback.step(lowest, model.x, **batch)
    budget = max(lowest[0].plan.device_peak_bytes)
    how: dict[str, Any] = {"options": bpipe.Options(effort=0), "memory_bytes": budget, "schedules": ["1f1b", "gpipe"]}
    schedules = [bpipe.auto(one, M, mse, **how) for one in stages]
    for _ in range(2):
        for module in model.stages:
            module.zero_grad()
        loopback.step(schedules, model.x, **batch)
    assert schedules[0].choice is not None and schedules[0].plan.budgets == (budget,) * 4
    assert all(schedule.stats["device_peak_bytes"] <= budget for schedule in schedules)
    found = [parameter.grad.clone() for module in model.stages for parameter in module.parameters() if parameter.grad is not None]
    for module in model.stages:
        module.zero_grad()
    alone = [gradient for gradient in gradients_by_itself(model, M) if gradient is not None]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


LAYERS_OF_COST = [LayerCost(names=(f"{i}",), forward_s=1.0, backward_s=2.0, saved_bytes=10, output_bytes=4) for i in range(4)]


def with_values(*values: Amount, layer: int = 0) -> list[LayerCost]:
    return [replace(one, values=values) if i == layer else one for i, one in enumerate(LAYERS_OF_COST)]


def test_values_are_in_the_costs() -> None:
    """Of the memory of the rank that waits with one, and of the time that it takes to send it."""
    far, near = (with_values(Amount(name, 100)) for name in ("0-3", "0-2"))
    how: dict[str, Any] = {"batch": 8, "num_ranks": 4, "schedules": ["1f1b"], "options": bpipe.Options(effort=0)}
    chain, with_far, with_near = (bpipe.choose_plan(one, **how) for one in (LAYERS_OF_COST, far, near))
    assert skips_of(with_far.plan.flow) == ((0, 3),)
    of_chain = chain.device_peak_bytes
    assert with_far.device_peak_bytes[3] >= of_chain[3] + 100 and with_near.device_peak_bytes[3] == of_chain[3]
    assert with_near.device_peak_bytes[2] >= of_chain[2] + 100
    slow = how | {"link": Link(bytes_per_s=10.0)}
    assert bpipe.choose_plan(far, **slow).step_s > bpipe.choose_plan(LAYERS_OF_COST, **slow).step_s + 60.0
    joined = bpipe.choose_plan(far, **how | {"num_ranks": 1})
    assert not joined.plan.flow.has_asides  # it stays in the stage
    message = bpipe.choose_plan(with_values(Amount("1-2", 100), layer=1), **how)
    assert not message.plan.flow.has_asides and message.plan.sizes is not None
    assert [one["out"].num_bytes for one in message.plan.sizes.stages] == [4, 104, 4, 4]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((Amount("out", 1),), "name each by the places of layers"),
        ((Amount("1-3", 1),), "value 1-3 of layer 0: its name has the place of this layer"),
        ((Amount("0-3-2", 1),), "in ascending order"),
        ((Amount("0-4", 1),), "up to 3"),
    ],
)
def test_values_that_are_none(values: tuple[Amount, ...], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        bpipe.choose_plan(with_values(*values), batch=8, num_ranks=4)


def test_recomputation_within_a_budget() -> None:
    how: dict[str, Any] = {"batch": 16, "num_ranks": 4, "memory_bytes": 35, "options": bpipe.Options(effort=0, reserve_bytes=0)}
    costs = [replace(one, output_bytes=0) for one in with_values(Amount("0-3", 1))]
    for by in ("recompute", "evict"):
        assert max(bpipe.choose_plan(costs, by=by, **how).device_peak_bytes) <= 35


def test_a_model_that_no_trace_cuts() -> None:
    class Branching(UNet):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if x.sum() > 0 else -x)

    case, rank = Case("unet"), bpipe.Loopback(2).rank(0)
    model = Branching().double()
    with pytest.raises(ConfigurationError, match=r"it is no chain of its layers .*, and no trace cuts it: torch.fx cannot trace"):
        bpipe.auto(model, case.x, mse, target=case.target, group=rank, layers=case.layers, microbatch_sizes=[ROWS])


def test_parts_and_names_differ_in_number() -> None:
    case = Case("unet")
    parts = bpipe.split_traced(case.model, case.layers, (case.x[:ROWS],))
    with pytest.raises(ConfigurationError, match="layers= names 1 layers, and there are 7 parts"):
        bpipe.measure_layers(parts, case.x[:ROWS], layers=["down"])
    named = bpipe.measure_layers(parts, case.x[:ROWS], repeats=1)
    assert [one.names for one in named] == [(str(place),) for place in range(7)]
    of_a_row = WIDTH * 8 * ROWS
    assert [[(one.name, one.num_bytes) for one in layer.values] for layer in named[:3]] == [
        [("0-6", 64 * of_a_row)], [("1-5", 32 * of_a_row)], [("2-4", 16 * of_a_row)]
    ]  # fmt: skip


class Scaling(nn.Module):
    """Scales by a number that Python draws."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + random.random())


class Counting(nn.Module):
    """Does something else each time, as a kernel that adds up in any order does."""

    num_runs = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_runs += 1
        return x * self.num_runs


@pytest.mark.parametrize("layer", [Scaling, Counting])
def test_a_chain_that_draws_or_differs_from_itself_is_a_chain(layer: type[nn.Module]) -> None:
    model, x = nn.Sequential(*(one for _ in range(2) for one in (nn.Linear(4, 4), layer()))), torch.ones(8, 4)
    loopback, options = bpipe.Loopback(2), bpipe.Options(effort=0, measure="in_order")
    how: dict[str, Any] = {"target": x, "microbatch_sizes": [2], "options": options}
    schedules = [bpipe.auto(model, x, mse, group=loopback.rank(rank), **how) for rank in range(2)]
    loopback.step(schedules, x, target=x, return_outputs=False)
    assert all(one.grad is not None for schedule in schedules for module in schedule.modules for one in module.parameters())
