"""A plan that evicts some microbatches and recomputes others runs: plain 1F1B's gradients to the bit, and the bytes of the plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.passes.communicate import computations_only
from bpipe.passes.evict_or_recompute import evict_or_recompute
from bpipe.schedules import Costs, Link, Plan, Sizes, finish
from tests.models import assert_same, batch_of, in_loopback, modules_of, mse, single_process
from tests.over import Over
from tests.test_from_plan import M, P, loop_of

pytestmark = pytest.mark.usefixtures("one_thread")


def measured(kind: str) -> tuple[Plan, Sizes]:
    """The computations of 1F1B, and the bytes that its microbatches take."""
    x, y = batch_of(kind, 2 * M, 0)
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, r, P, "cpu", loopback.rank(r)) for r, module in enumerate(modules_of(kind, P))]
    schedules = [bpipe.Balanced(bpipe.OneFOneB(stage, M, mse), budget="lowest") for stage in stages]
    for _ in range(2):
        loopback.step(schedules, x, target=y)
    plan = schedules[0].plan
    assert plan.sizes is not None
    return computations_only(plan), plan.sizes


@pytest.mark.parametrize("microbatches", [(2.2, 9, 9, 9), (3.2, 2.2, 9, 9)])  # of each rank's budget
def test_a_plan_that_evicts_and_recomputes_runs(microbatches: tuple[float, ...]) -> None:
    plan, sizes = measured("quiet")
    saved = [stage.saved for stage in sizes.stages]
    budgets = [static + int(number * one) for static, one, number in zip(sizes.static, saved, microbatches)]
    costs = Costs(saved_bytes=saved, link=Link(bytes_per_s=2 * saved[0]))
    mixed = finish(evict_or_recompute(plan, sizes=sizes, budgets=budgets, costs=costs))
    assert mixed.evicted(0) and mixed.recomputed(0) and bool(mixed.recomputed(1)) is (microbatches[1] < 9)
    loopback, schedules, modules = loop_of(mixed)
    x, y = batch_of("quiet", 2 * M, 0)
    loopback.step(schedules, x, target=y)
    for module, gradients in zip(modules, single_process("quiet", P, M, steps=1).gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))
    for rank, schedule in enumerate(schedules):
        assert schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"]
        assert (schedule.stats["evicted_bytes"] > 0) is bool(mixed.evicted(rank))


def test_balanced_evicts_and_recomputes() -> None:
    _, sizes = measured("quiet")
    saved = [stage.saved for stage in sizes.stages]
    budget = [static + int(number * one) for static, one, number in zip(sizes.static, saved, (2.2, 9, 9, 9))]
    costs = Costs(saved_bytes=saved, link=Link(bytes_per_s=2 * saved[0]))
    options = {"budget": budget, "by": "evict_or_recompute", "costs": costs}
    result = in_loopback("quiet", P, M, Over(bpipe.OneFOneB, options), 2)
    assert_same(result, single_process("quiet", P, M, 2))
    assert result.stats[0]["evicted_bytes"] > 0
    assert [one["peak_bytes"] for one in result.stats] == [one["predicted_peak_bytes"] for one in result.stats]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"budget": 2**30}, "give costs=, and a budget in bytes"),
        ({"budget": "lowest", "costs": Costs()}, "give costs=, and a budget in bytes"),
    ],
)
def test_what_it_cannot_do_is_refused(options: dict[str, Any], reason: str) -> None:
    stage = bpipe.PipelineStage(modules_of("quiet", 1)[0], 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    with pytest.raises(ConfigurationError, match=reason):
        bpipe.Balanced(bpipe.OneFOneB(stage, M, mse), by="evict_or_recompute", **options)
