"""Models with skips whose forwards run twice: what the statistics say, what the plan says and what a rank holds are one number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.passes.communicate import computations_only
from bpipe.passes.recompute import recompute
from bpipe.schedules import Costs, Link, Plan, build, finish
from tests.occupied import Counting, Whose
from tests.skips.models import Model, model_of
from tests.skips.test_bytes import assert_as_planned
from tests.skips.test_equality import schedules_of
from tests.skips.test_in_place import WIDTH, Stage, hands_on, in_a_list, last, of_a_mask, output_too, plain, selects, view_of_output
from tests.skips.test_in_place import from_list as uses_list
from tests.skips.test_in_place import narrow as uses_view

pytestmark = pytest.mark.usefixtures("one_thread")

M = 8


def small(*does: Any, **skips: tuple[int, ...]) -> Model:
    torch.manual_seed(0)
    x = torch.randn(2 * M, WIDTH, dtype=torch.float64)
    return Model([Stage(one).double() for one in does], skips, x, torch.randn_like(x), {})


def pair(linear: nn.Module, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
    return linear(x) if y is None else linear(x) + y


CASES: dict[str, Callable[[], Model]] = {
    "a U-Net": lambda: model_of("unet", 4, 2 * M),
    "a U-Net whose middle is small": lambda: model_of("unet", 8, 2 * M),
    "residuals of all stages": lambda: model_of("residuals", 8, 2 * M),
    "a list, and two outputs": lambda: small(in_a_list, pair, plain, uses_list, kept=(0, 3)),
    "two users": lambda: small(hands_on, plain, plain, last, kept=(0, 2, 3)),
    "the output itself": lambda: small(output_too, plain, plain, last, kept=(0, 3)),
    "a mask": lambda: small(of_a_mask, plain, plain, selects, kept=(0, 3)),
    "a view": lambda: small(view_of_output, plain, plain, uses_view, kept=(0, 3)),
    "of a stage in the middle": lambda: small(plain, hands_on, plain, last, kept=(1, 3)),
}


def counted(model: Model, plan: Plan, **how: Any) -> tuple[list[Any], list[Counting]]:
    """The third step of a plan, balanced if it is said how, and counted after every action."""
    whose, (loopback, schedules) = Whose(), schedules_of(model, plan)
    schedules = [bpipe.Balanced(one, **how) for one in schedules] if how else schedules
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):
        for count in counts:
            count.batch, count.looks = (model.x, model.target, *model.kwargs.values()), step == 2
        with whose:
            loopback.step(schedules, model.x, target=model.target, return_outputs=False, **model.kwargs)
    return schedules, counts


def check(schedules: list[Any], counts: list[Counting]) -> None:
    assert any(schedules[0].plan.recomputed(rank) for rank in range(len(schedules)))
    assert_as_planned(schedules, counts)


def plan_of(model: Model) -> Plan:
    return build("1f1b", len(model.stages), M, skips=sorted(set(model.skips.values())))


def both_of(model: Model) -> tuple[Plan, Plan]:
    """Plans in which nothing is recomputed, and as much as can be, with the sizes of a step in which nothing is."""
    plain = plan_of(model)
    sizes = counted(model, plain, budget=2**40)[0][0].plan.sizes
    again = recompute(plain, slots=[1] * plain.num_ranks)
    return finish(replace(computations_only(plain), sizes=sizes)), finish(replace(again, sizes=sizes))


@pytest.mark.parametrize("name", CASES)
def test_a_plan_counts_what_a_rank_has(name: str) -> None:
    model = CASES[name]()
    check(*counted(model, both_of(model)[1]))


@pytest.mark.parametrize("by", ["recompute", "evict_or_recompute"])
def test_within_a_budget(by: Any) -> None:
    """In the middle between a plan that recomputes nothing and one that recomputes all."""
    model = CASES["residuals of all stages"]()
    budget = [sum(peaks) // 2 for peaks in zip(*(plan.device_peak_bytes for plan in both_of(model)))]
    costs = Costs(saved_bytes=1000, link=Link(bytes_per_s=1)) if by == "evict_or_recompute" else None
    schedules, counts = counted(model, plan_of(model), budget=budget, by=by, costs=costs)
    check(schedules, counts)
    assert all(one.stats["device_peak_bytes"] <= limit for one, limit in zip(schedules, budget))
