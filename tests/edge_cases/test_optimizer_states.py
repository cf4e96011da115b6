"""Whose optimizer states count, from when on, and what a budget says that they overrun."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.optimizer import _global_optimizer_post_hooks

import bpipe
from bpipe.errors import BudgetError, ConfigurationError
from bpipe.memory.optimizers import STEPPED
from tests.edge_cases.case import M, pipeline
from tests.models import batch_of, modules_of, mse
from tests.over import Over
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 4
MATRIX, ROW = 4 * WIDTH * WIDTH, 4 * WIDTH  # the bytes of a Linear's weight and bias
X = torch.ones(M, WIDTH)
MOMENTUM: dict[str, Any] = {"lr": 0.01, "momentum": 0.9}


class Lengthens(Optimizer):
    """Keeps a list that grows in each step, as LBFGS does, and a count that belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.state["steps"] = torch.zeros(2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("old", []).append(torch.clone(parameter))


class Tied(nn.Module):
    """One matrix in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


def linears() -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def all_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules for parameter in module.parameters()]


def joining(modules: Sequence[nn.Module]) -> list[Optimizer]:
    """An optimizer that gets the biases when it has stepped, and takes another step then."""
    optimizer = SGD([module.weight for module in modules], **MOMENTUM)

    def join(*_: Any) -> None:
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": [module.bias for module in modules]})
            optimizer.step()

    optimizer.register_step_post_hook(join)
    return [optimizer]


def partly_frozen() -> list[nn.Module]:
    return [module.requires_grad_(i != 1) for i, module in enumerate(linears())]


Make = Callable[[Sequence[nn.Module]], list[Optimizer]]
WHOSE: dict[str, tuple[Callable[[], list[nn.Module]], Make, list[int]]] = {
    "one a rank": (linears, lambda modules: [SGD(one.parameters(), **MOMENTUM) for one in modules], [MATRIX + ROW] * 4),
    "one for all ranks": (linears, lambda modules: [Adam(all_of(modules))], [2 * (MATRIX + ROW) + 2 * 4] * 4),
    "two a rank": (
        linears,
        lambda modules: [make for one in modules for make in (SGD([one.weight], **MOMENTUM), AdamW([one.bias]))],
        [MATRIX + 2 * ROW + 4] * 4,
    ),
    "of a part": (linears, lambda modules: [SGD([modules[3].bias], **MOMENTUM)], [0, 0, 0, ROW]),
    "groups that come later": (linears, joining, [MATRIX + ROW] * 4),
    "tied": (lambda: [Tied() for _ in range(4)], lambda modules: [SGD(all_of(modules), **MOMENTUM)], [MATRIX + 2 * ROW] * 4),
    "many of each": (
        linears,
        lambda modules: [RMSprop(one.parameters(), centered=True, momentum=0.9) for one in modules],
        [3 * (MATRIX + ROW) + 2 * 4] * 4,
    ),
    "of a rank that trains nothing": (
        partly_frozen,
        lambda modules: [SGD(all_of(modules), **MOMENTUM)],
        [MATRIX + ROW, 0, MATRIX + ROW, MATRIX + ROW],
    ),
    "without any": (linears, lambda modules: [SGD(all_of(modules), lr=0.01)], [0] * 4),
    "a list": (linears, lambda modules: [Lengthens(one.parameters()) for one in modules], [MATRIX + ROW + 8] * 4),
}


def stepped(schedules: Sequence[Any], loopback: bpipe.Loopback, optimizers: Sequence[Any] = ()) -> list[float]:
    """What stays on each rank after a step, and then the optimizers step."""
    loopback.step(schedules, X, target=X, return_outputs=False)
    for optimizer in optimizers:
        optimizer.step()
    return [schedule.stats["static_bytes"] for schedule in schedules]


@pytest.mark.parametrize("way", [bpipe.OneFOneB, Over(bpipe.OneFOneB, {"budget": "lowest"})], ids=["plain", "bytes"])
@pytest.mark.parametrize("whose", WHOSE)
def test_states_of_a_ranks_parameters_count(whose, way):
    make, make_optimizers, expected = WHOSE[whose]
    modules = make()
    optimizers = make_optimizers(modules)
    elsewhere = AdamW(nn.Linear(9, 9).parameters())
    elsewhere.param_groups[0]["params"][0].grad = torch.ones(9, 9)
    loopback, schedules = pipeline(way, modules, mse)
    before = stepped(schedules, loopback, [*optimizers, elsewhere])
    after = stepped(schedules, loopback)
    assert [now - then for then, now in zip(before, after)] == expected
    for schedule in schedules:
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]


def test_what_grows_in_a_list_is_counted_in_each_step():
    modules = linears()
    optimizers = [Lengthens(module.parameters()) for module in modules]
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, mse)
    first, second, third = (stepped(schedules, loopback, optimizers)[0] for _ in range(3))
    assert (second - first, third - second) == (MATRIX + ROW + 8, MATRIX + ROW)


def test_states_that_were_loaded_or_are_given_up():
    """A given optimizer's count before it steps; and none when they are gone."""
    modules = linears()
    for parameter in all_of(modules):
        parameter.grad = torch.ones_like(parameter)
    optimizer = Adam(all_of(modules))
    optimizer.step()
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest", "optimizer": optimizer}), modules, mse)
    loaded = stepped(schedules, loopback)
    optimizer.state.clear()
    assert [there - gone for there, gone in zip(loaded, stepped(schedules, loopback))] == [2 * (MATRIX + ROW) + 8] * 4


def test_states_that_are_cast_or_freed_in_place():
    """As many values as before, and other bytes."""
    modules = linears()
    optimizer = Adam(all_of(modules))
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, mse)
    stepped(schedules, loopback, [optimizer])
    full = stepped(schedules, loopback)
    for state in optimizer.state.values():
        state.update({name: state[name].bfloat16() for name in ("exp_avg", "exp_avg_sq")})
    half = stepped(schedules, loopback)
    for state in optimizer.state.values():
        state["exp_avg"].untyped_storage().resize_(0)
        state["exp_avg_sq"].untyped_storage().resize_(0)
    none = stepped(schedules, loopback)
    assert [a - b for a, b in zip(full, half)] == [b - c for b, c in zip(half, none)] == [MATRIX + ROW] * 4


class OfAnotherKind:
    """No torch optimizer: its parameters are copies in another precision, as for mixed precision."""

    def __init__(self, module: nn.Module) -> None:
        self.copies = [parameter.detach().double() for parameter in module.parameters()]
        self.state: dict[Any, Any] = {}

    def step(self) -> None:
        self.state = {copy: {"copy": copy, "moments": (torch.zeros_like(copy), torch.zeros_like(copy))} for copy in self.copies}


def test_an_optimizer_of_another_kind_is_given():
    modules = linears()
    optimizers = {module: OfAnotherKind(module) for module in modules}
    loopback, plain = pipeline(bpipe.OneFOneB, modules, mse)
    schedules = [
        bpipe.Balanced(one, "lowest", optimizer=optimizers[one.session.context.stages[i].submod]) for i, one in enumerate(plain)
    ]
    before = stepped(schedules, loopback, [*optimizers.values()])
    assert [now - then for then, now in zip(before, stepped(schedules, loopback))] == [3 * 2 * (MATRIX + ROW)] * 4
    with pytest.raises(ConfigurationError, match="optimizer= is of str, which has no mapping `state`"):
        bpipe.Balanced(pipeline(bpipe.OneFOneB, linears(), mse)[1][0], optimizer="none")


SEVERAL = {
    "a list": list,
    "a tuple": tuple,
    "by name": lambda both: dict(zip(("first", "second"), both)),
    "an iterator": iter,
    "one of another kind": lambda both: [both[0], Wrapped(both[1])],
    "a container with a mapping": lambda both: Wrapped(both[0], both[1]),
}


class Wrapped:
    """Has the states of the optimizers inside it."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    @property
    def state(self):
        return {key: value for one in self.optimizers for key, value in one.state.items()}


@pytest.mark.parametrize("kind", SEVERAL)
def test_several_optimizers_are_given(kind):
    """Their states count from the first step on, as those of one that has all parameters."""
    static = []
    for several in (False, True):
        (module,) = linears()[:1]
        parameters = list(module.parameters())
        parts = (parameters[:1], parameters[1:]) if several else (parameters,)
        optimizers = [torch.optim.Adam(part) for part in parts]
        module(torch.ones(1, parameters[0].shape[1])).sum().backward()
        for one in optimizers:
            one.state.update({p: {"a": p.detach() + 0, "b": p.detach() + 0} for group in one.param_groups for p in group["params"]})
        stage = bpipe.PipelineStage(module, 0, 1, "cpu", group=bpipe.Loopback(1).rank(0))
        given = SEVERAL[kind](optimizers) if several else optimizers[0]
        schedule = bpipe.Balanced(bpipe.OneFOneB(stage, 2, mse), "lowest", optimizer=given)
        schedule.step(torch.ones(4, parameters[0].shape[1]), target=torch.ones(4, parameters[0].shape[0]))
        static.append((schedule.session.context.states.of(schedule.session.context.modules), schedule.stats["peak_bytes"]))
    assert static[0] == static[1] and static[0][0] == 2 * sum(p.nbytes for p in parameters)


def num_hooks() -> int:
    return len(_global_optimizer_post_hooks)


def test_one_hook_as_long_as_a_schedule_is_open():
    gc.collect()
    before, others = num_hooks(), len(STEPPED._open)
    modules = linears()
    first, second = pipeline(bpipe.OneFOneB, modules, mse)[1], pipeline(bpipe.OneFOneB, modules, mse)[1]
    assert num_hooks() == max(1, before) and len(STEPPED._open) == others + 8
    for schedule in first:
        schedule.close()
    assert num_hooks() == max(1, before)
    del second, schedule, first
    gc.collect()
    assert num_hooks() == before and len(STEPPED._open) == others


def test_optimizers_are_remembered_weakly():
    modules = linears()
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, mse)
    optimizer = Adam(all_of(modules))
    before = stepped(schedules, loopback, [optimizer])
    there, gone = stepped(schedules, loopback), weakref.ref(optimizer)
    del optimizer
    assert gone() is None
    assert stepped(schedules, loopback) == before < there


# Budgets that optimizers overrun.

EVEN = batch_of("quiet", 2 * M)[0]
WAYS: dict[str, dict[str, Any]] = {"evict": {}, "parts": {"options": bpipe.Options(parts=2)}, "recompute": {"by": "recompute"}}


def wide_step(schedules: Sequence[Any], loopback: bpipe.Loopback) -> None:
    loopback.step(schedules, EVEN, target=EVEN, return_outputs=False)


def peaks_without_states(**options: Any) -> int:
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest", **options}), modules_of("quiet", 4), mse)
    for _ in range(2):
        wide_step(schedules, loopback)
    return max(schedules[0].plan.device_peak_bytes)


@pytest.mark.parametrize("way, accumulated", [("evict", 1), ("evict", 3), ("parts", 3), ("recompute", 2)])
def test_a_budget_without_room_for_states(way, accumulated):
    """It is met until the optimizer steps; the next step refuses it before anything runs, and says which one would do."""
    budget, modules = peaks_without_states(**WAYS[way]), modules_of("quiet", 4)
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": budget, **WAYS[way]}), modules, mse)
    optimizer = AdamW(all_of(modules))
    for _ in range(accumulated):
        wide_step(schedules, loopback)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BudgetError, match=r"99\.\d KiB of optimizer states") as caught:
        wide_step(schedules, loopback)
    assert all(parameter.grad is None for parameter in all_of(modules))
    assert all(schedule.session.guard.broken is None for schedule in schedules)
    named = re.search(r"smallest budget that works here is budget=(\d+)", str(caught.value))
    assert named is not None
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": int(named[1]), **WAYS[way]}), modules, mse)
    for _ in range(2):
        wide_step(schedules, loopback)
    assert max(schedule.stats["device_peak_bytes"] for schedule in schedules) <= int(named[1])


def test_states_make_a_plan_anew_without_another_measurement():
    modules = modules_of("quiet", 4)
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules, mse)
    optimizer, plans = AdamW(all_of(modules[2:])), []
    for step in range(5):
        wide_step(schedules, loopback)
        plans.append(schedules[0].plan)
        if step == 2:
            optimizer.step()
    before, after = plans[2], plans[3]
    assert all(plan.sizes is not None for plan in plans)
    assert before is plans[0] and after is plans[4]
    assert after.sizes.stages == before.sizes.stages
    states = [sum(2 * parameter.nbytes + 4 for parameter in module.parameters()) * (i > 1) for i, module in enumerate(modules)]
    assert [now - then for then, now in zip(before.sizes.static, after.sizes.static)] == states


def overruns_alone(rank: int, budget: int) -> tuple[str, bool]:
    """One rank has an optimizer; the other is told in the same step."""
    module = modules_of("quiet", 2)[rank]
    schedule = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 2, "cpu"), M, loss_fn=mse), budget=budget)
    for _ in range(2):
        schedule.step(EVEN, target=EVEN)
    if rank == 1:
        optimizer = AdamW(module.parameters())
        optimizer.step()
    module.zero_grad()
    with pytest.raises(BudgetError) as caught:
        schedule.step(EVEN, target=EVEN)
    return str(caught.value), any(parameter.grad is not None for parameter in module.parameters())


def test_all_ranks_are_told_of_one_ranks_states():
    told, has_run = zip(*run_ranks(overruns_alone, 2, 280_000))
    assert told[0] == told[1] and "0 B, 99.3 KiB of optimizer states" in told[0]
    assert has_run == (False, False)
