"""The bytes of skips: what a plan says is what a rank has, after every action."""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError, PlanError
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Amount, Destinations, Plan, Sizes, StageSizes, build, finish
from tests.amounts import amounts
from tests.occupied import Counting, Whose
from tests.pairs import pairs
from tests.schedules.shape_of_plan import shape_of
from tests.skips.models import KINDS, by_itself, model_of
from tests.skips.models import WIDTH as WIDTH_OF_SUMS
from tests.skips.test_equality import SCHEDULES, assert_close, gradients_of, schedules_of
from tests.skips.test_options import SKIPS, Sums
from tests.skips.test_random import WIDTH, Stage, some_plan

pytestmark = pytest.mark.usefixtures("one_thread")

M = 8


def counted(kind: str, num_stages: int, name: str, budget: Any = "lowest") -> tuple[list[Any], list[Counting]]:
    """The schedules of three steps in a loopback, and the counts of the last one."""
    model, whose = model_of(kind, num_stages, 2 * M), Whose()
    plan = build(name, num_stages, M, num_ranks=num_stages // SCHEDULES[name], skips=model.skips.values())
    loopback, plain = schedules_of(model, plan)
    schedules = [bpipe.Balanced(one, budget=budget) for one in plain]
    counts = [Counting(one, whose) for one in schedules]
    for step in range(3):  # the first measures, in the second buffers are made as remote activations arrive
        for count in counts:
            count.batch, count.looks = (model.x, model.target, *model.kwargs.values()), step == 2
        with whose:
            loopback.step(schedules, model.x, target=model.target, return_outputs=False, **model.kwargs)
    return schedules, counts


def random_counts(seed: int) -> None:
    """Whatever stages hand on, a rank never has more than its plan says, and gradients are those without a budget, to the bit."""
    choices = random.Random(seed)
    plan, skips = some_plan(choices)
    while shape_of(plan).directions > 1:  # the gradients that twins set aside are counted elsewhere
        plan, skips = some_plan(choices)
    plan, m, depth = finish(computations_only(plan)), plan.num_microbatches, plan.depth
    torch.manual_seed(seed)
    stages, gradients = [Stage(index, skips, choices).double() for index in range(depth)], []
    x, target = torch.randn(2, 2 * m, WIDTH, dtype=torch.float64)
    for budget in (None, "lowest"):
        whose, loopback, schedules = Whose(), bpipe.Loopback(plan.num_ranks), list[bpipe.Schedule]()
        copies = [deepcopy(stages[index % depth]) for index in range(plan.num_stages)]
        for rank in range(plan.num_ranks):
            directions = shape_of(plan).directions
            how: dict[str, Any] = {"device": "cpu", "group": loopback.rank(rank), "directions": directions, "skips": skips}
            held = [bpipe.PipelineStage(copies[index], index, plan.num_stages, **how) for index in plan.stages_of(rank)]
            plain = bpipe.FromPlan(held, plan, loss_fn=nn.functional.mse_loss)
            schedules.append(plain if budget is None else bpipe.Balanced(plain, budget="lowest"))
        counts = [Counting(schedule, whose) for schedule in schedules] if budget else []
        for step in range(3):
            for count in counts:
                count.batch, count.looks = (x, target), step == 2
            with whose:
                loopback.step(schedules, x, target=target, return_outputs=False)
        gradients.append(gradients_of(schedules))
        for moment in (moment for count in counts for moment in count.moments()):
            assert moment.counted_after <= moment.planned_after, moment
            assert moment.counted_during is None or moment.counted_during <= moment.planned_during, moment
    for one, other in zip(*gradients, strict=True):
        assert (one is None and other is None) or (one is not None and other is not None and torch.equal(one, other))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_graph_of_stages_has_no_more_than_planned(seed: int) -> None:
    random_counts(seed)


def test_many_random_graphs_of_stages_have_no_more_than_planned() -> None:
    for seed in range(100, 140):
        random_counts(seed)


def assert_as_planned(schedules: list[Any], counts: list[Counting]) -> None:
    """A rank has what its plan says, after every action."""
    for schedule in schedules:
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
        assert Plan.from_text(schedule.plan.to_text()) == schedule.plan
    for count in counts:
        for moment in count.moments():
            assert moment.counted_after == moment.planned_after, moment


CASES = pairs(KINDS, (2, 4, 8), SCHEDULES)


@pytest.mark.parametrize(("kind", "num_stages", "name"), CASES)
def test_a_plan_counts_what_a_rank_has(kind: str, num_stages: int, name: str) -> None:
    assert_as_planned(*counted(kind, num_stages, name))


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("parts", [1, 3])
def test_slices_count_what_a_rank_has(k: int, parts: int) -> None:
    torch.manual_seed(0)
    stages, whose, loopback = [Sums(index).double() for index in range(4)], Whose(), bpipe.Loopback(4)
    x, target = torch.randn(2, 8, 3 * k, WIDTH_OF_SUMS, dtype=torch.float64)
    held = [bpipe.PipelineStage(stage, i, 4, "cpu", loopback.rank(i), skips=SKIPS) for i, stage in enumerate(stages)]
    plain = [bpipe.Seq1F1B(stage, 4, nn.functional.mse_loss, slices=k) for stage in held]
    schedules = [bpipe.Balanced(schedule, budget="lowest", options=bpipe.Options(parts=parts)) for schedule in plain]
    counts = [Counting(schedule, whose) for schedule in schedules]
    for step in range(3):
        for count in counts:
            count.batch, count.looks = (x, target), step == 2
        with whose:
            loopback.step(schedules, x, target=target, return_outputs=False)
    for moment in (moment for count in counts for moment in count.moments()):
        assert moment.counted_after == moment.planned_after, moment


@pytest.mark.parametrize("skip", [(0, 2), (0, 3), (1, 3)])
def test_a_stage_between_leaves_a_value_where_it_is(skip: tuple[int, ...]) -> None:
    """It has saved its input, which waits for a later stage on this rank: what it evicts is the rest."""
    torch.manual_seed(0)
    skips, loopback = {"kept": skip}, bpipe.Loopback(1)
    stages = [Kept(index, skips).double() for index in range(4)]
    x, target = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    alone = deepcopy(stages)
    held = [bpipe.PipelineStage(stage, i, 4, "cpu", loopback.rank(0), skips=skips) for i, stage in enumerate(stages)]
    plain = bpipe.Interleaved1F1B(held, 8, loss_fn=nn.functional.mse_loss)
    schedule = bpipe.Balanced(plain, budget="lowest", to=Destinations(host="only"))
    for _ in range(3):
        loopback.step([schedule], x, target=target, return_outputs=False)
        for one, wanted in zip(x.chunk(8), target.chunk(8)):
            (nn.functional.mse_loss(by_itself(alone, skips, one, {}), wanted) / 8).backward()
    assert schedule.stats["evicted_bytes"] > 0
    assert_close(gradients_of([schedule]), [p.grad for stage in alone for p in stage.parameters()])


class Kept(nn.Module):
    """Saves its input, hands on its output, which it has not saved, and adds what it gets."""

    def __init__(self, index: int, skips: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.linear, self.makes = nn.Linear(WIDTH, WIDTH), skips["kept"][0] == index

    def forward(self, x: torch.Tensor, kept: torch.Tensor | None = None) -> Any:
        y = self.linear(x.tanh() * x)
        y = y if kept is None else y + kept
        return (y, {"kept": y}) if self.makes else y


def test_text_has_the_bytes_of_skips() -> None:
    def of(*skips: Amount) -> StageSizes:
        return StageSizes(parts=(5, 7), fixed=3, amounts=(*amounts(received=2, sent=2, state=1), *skips))

    ends = of(Amount("0-1", 8, 3, 4, 9), Amount("0-2", 6)), of(Amount("0-1", 8, 8, 0, 0), Amount("0-2", 6, 6))
    plan = build("1f1b", 3, 2, skips=[(0, 1), (0, 2)])
    plan = replace(plan, sizes=Sizes(stages=(ends[0], of(Amount("0-1", 8, 3, 4, None, 2)), ends[1]), static=(0, 0, 0)))
    text = plan.to_text()
    assert "size 0: 5,7 3 0-1=8:3:4:9 0-2=6 in=2 out=2 state=1\n" in text
    assert "size 2: 5,7 3 0-1=8:8:0:0 0-2=6:6 in=2 out=2 state=1\n" in text
    assert "size 1: 5,7 3 0-1=8:3:4:-:2 in=2 out=2 state=1\n" in text
    assert Plan.from_text(text) == plan
    wrong = ["0-1=8:3:4:9:4", "0-1=8:3:4:9:1:1", "0-1=8:-:4", "0-1=8:3:4:x", "0-1=8:5:4:8", "0-1=8 0-1=8"]
    for new in (*wrong, "0-1=", "0-1", "0=1", "a%=1"):
        with pytest.raises(PlanError, match="not a plan: the sizes in 'size 0: 5,7 3"):
            Plan.from_text(text.replace("0-1=8:3:4:9", new))


@pytest.mark.parametrize(
    "skips",
    [
        (Amount("in-0-1", 1),),
        (Amount("0-1", 5), Amount("0-1", 5, gradient=5)),
        (Amount("between", 0), Amount("0-1", 1)),
        (Amount("0-1", -1),), (Amount("0-1", 1, 2),), (Amount("0-1", 1), Amount("0-1", 2)), (Amount("0-1", 2**60),),
    ],
)
def test_sizes_that_no_skip_can_have(skips: tuple[Amount, ...]) -> None:
    with pytest.raises(ConfigurationError, match="0-1"):
        StageSizes(parts=(9,), amounts=skips)
