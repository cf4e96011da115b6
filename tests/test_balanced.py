"""`Balanced` over every schedule: the same gradients to the bit, a plan once sizes are known, clear words where there is none."""

from __future__ import annotations

import ast
import copy
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
import bpipe.api.balanced
from bpipe.api.policy import Policy
from bpipe.errors import AgreementError, BudgetError, ConfigurationError
from bpipe.passes.communicate import computations_only
from bpipe.passes.profiling_order import profiling_order
from bpipe.passes.recompute import recompute_by_count
from bpipe.schedules import Costs, Destinations, Plan, Sizes, build, finish
from tests.models import WIDTH, Block, Result, as_rank, assert_same, batch_of, in_loopback, joined, modules_of, mse, single_process
from tests.over import Over, nested, pipeline
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

M, STEPS = 8, 3  # the first step measures, the second is the first that is balanced
ONE_STAGE = [bpipe.OneFOneB, bpipe.GPipe, bpipe.BalancedOneFOneB, bpipe.ZBH1, bpipe.ZBH2]
OF_SLICES = {bpipe.Seq1F1B, bpipe.TeraPipe}  # tests/slices
OF_TWINS = {bpipe.BitPipe, bpipe.BitPipeReordered, bpipe.BitPipeZB, bpipe.Chimera}  # tests/test_two_directions.py
LOOPED = [bpipe.Interleaved1F1B, bpipe.InterleavedZeroBubble, bpipe.BreadthFirst]
TWO_STAGES = [*LOOPED, bpipe.ZBV, bpipe.VHalf, bpipe.VMin, bpipe.DualPipeV]
SCHEDULES = [*ONE_STAGE, *TWO_STAGES]
# One stage on a rank may draw random numbers, several draw them in the order of the rank's list.
CASES = [(schedule, "transformer") for schedule in ONE_STAGE] + [(schedule, "quiet") for schedule in TWO_STAGES]
CASES += [(schedule, "nested") for schedule in (bpipe.OneFOneB, bpipe.GPipe, bpipe.BreadthFirst)]
TO_HOST, HOST_LAST = Destinations(host="only"), Destinations(host="last")
LOWEST: dict[str, dict[str, Any]] = {
    "whole": {},
    "parts": {"options": bpipe.Options(parts=2), "to": HOST_LAST},
    "parts, to the host": {"options": bpipe.Options(parts=4), "to": TO_HOST},
}
WITHIN_BYTES: dict[str, dict[str, Any]] = {"parts": {"options": bpipe.Options(parts=4)}, "host": {"to": TO_HOST}}


@cache
def reference(kind: str, steps: int, m: int = M) -> Result:
    return single_process(kind, 4, m, steps)


def balanced(schedule: type[bpipe.Schedule], kind: str, steps: int, m: int = M, **options: Any) -> Result:
    return in_loopback(kind, 4, m, Over(schedule, options), steps, num_ranks=4 if schedule in ONE_STAGE else 2)  # type: ignore[arg-type]


def squeezed(result: Result, slots: float) -> tuple[int | None, ...]:
    """Budgets that take some microbatches from the first rank, and leave the others as they were."""
    stats = result.stats[0]
    return (int(stats["device_peak_bytes"] - slots * stats["peak_bytes"] / stats["peak_slots"]), *(None for _ in result.stats[1:]))


# Gradients, losses and outputs.


def test_all_classes_are_here():
    found = {schedule.__name__ for schedule in {*SCHEDULES, *OF_SLICES, *OF_TWINS}}
    assert found == set(bpipe.api.catalogue.__all__) - {"FromPlan"}  # which is of no rule


FEW = 6  # microbatches
OPTIONS = list(zip(LOWEST, cycle(WITHIN_BYTES)))  # each at least once


@cache
def unlimited(schedule: type[bpipe.Schedule]) -> Result:
    return balanced(schedule, "conv", 2, FEW, budget=2**40)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.rule)
def test_equals_a_single_process_where_nothing_must_move(schedule):
    assert_same(unlimited(schedule), reference("conv", 2, FEW))
    assert all(stats["evicted_bytes"] == 0 for stats in unlimited(schedule).stats)
    assert_same(balanced(schedule, "conv", 2, FEW, budget=None), reference("conv", 2, FEW))


@pytest.mark.parametrize(
    "schedule, lowest, within",
    [(schedule, *options) for schedule in SCHEDULES for options in OPTIONS],
    ids=lambda value: getattr(value, "rule", value),
)
def test_equals_a_single_process_with_any_budget(schedule, lowest, within):
    result = balanced(schedule, "conv", 2, FEW, budget="lowest", **LOWEST[lowest])
    assert_same(result, reference("conv", 2, FEW))
    for name in ("peak_bytes", "device_peak_bytes", "host_peak_bytes"):
        assert [stats[name] for stats in result.stats] == [stats[f"predicted_{name}"] for stats in result.stats]
    squeeze = squeezed(unlimited(schedule), 0.5)
    result = balanced(schedule, "conv", 2, FEW, budget=squeeze, **WITHIN_BYTES[within])
    assert_same(result, reference("conv", 2, FEW))
    assert result.stats[0]["evicted_bytes"] > 0
    assert result.stats[0]["device_peak_bytes"] <= squeeze[0]


@pytest.mark.parametrize("schedule, kind", CASES)
def test_equals_a_single_process_whatever_the_stages(schedule, kind):
    for options in (LOWEST["whole"], LOWEST["parts"]):
        assert_same(balanced(schedule, kind, STEPS, budget="lowest", **options), reference(kind, STEPS))


@cache
def reference_for_eight(num_stages: int, m: int) -> Result:
    return single_process("tied", num_stages, m, 2)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.rule)
def test_eight_ranks(schedule):
    num_stages, m = 8 if schedule in ONE_STAGE else 16, 16 if schedule is bpipe.DualPipeV else 8
    result = in_loopback("tied", num_stages, m, Over(schedule, {"to": HOST_LAST}), 2, num_ranks=8)
    assert_same(result, reference_for_eight(num_stages, m))
    is_level = schedule in (bpipe.ZBH1, bpipe.ZBH2)  # and at the peaks gradients wait for weight halves, which cannot move
    assert is_level or sum(stats["evicted_bytes"] for stats in result.stats) > 0


def test_the_first_step_alone_equals_a_single_process():
    for schedule in SCHEDULES:
        result = in_loopback("tied", 4, M, Over(schedule), 1, num_ranks=4 if schedule in ONE_STAGE else 2)
        assert_same(result, single_process("tied", 4, M, 1))


def several(rank: int, num_ranks: int, cases: list[tuple[str, Over]]) -> list[Result]:
    stages = [num_ranks if over.schedule in ONE_STAGE else 2 * num_ranks for _, over in cases]
    options: list[Any] = [(kind, num_stages, M, over) for (kind, over), num_stages in zip(cases, stages)]
    return [as_rank(rank, *each, STEPS, {}, num_ranks=num_ranks) for each in options]


PARTS_TO_HOST = {"options": bpipe.Options(parts=4), "to": TO_HOST}


@pytest.mark.parametrize(
    "num_ranks, cases",
    [
        (2, [("quiet", Over(bpipe.ZBV)), ("conv", Over(bpipe.DualPipeV, PARTS_TO_HOST)), ("nested", Over(bpipe.Interleaved1F1B))]),
        (3, [("transformer", Over(bpipe.ZBH1, PARTS_TO_HOST)), ("frozen", Over(bpipe.GPipe, {"options": bpipe.Options(parts=2)}))]),
        (3, [("quiet", Over(bpipe.VMin, {"options": bpipe.Options(parts=2), "to": HOST_LAST})), ("tied", Over(bpipe.ZBH2))]),
        (
            4,
            [
                ("transformer", Over(bpipe.OneFOneB)),
                ("conv", Over(bpipe.OneFOneB, {"options": bpipe.Options(parts=3)})),
                ("lstm", Over(bpipe.OneFOneB)),
            ],
        ),
        (4, [("quiet", Over(bpipe.OneFOneB, {"budget": [340_000, None, None, None]})), ("tied", Over(bpipe.BreadthFirst))]),
    ],
)
def test_processes(num_ranks, cases):
    results = run_ranks(several, num_ranks, num_ranks, cases)
    for (kind, over), result in zip(cases, map(joined, zip(*results))):
        assert_same(result, single_process(kind, len(result.gradients), M, STEPS))
        assert over.schedule is not bpipe.OneFOneB or sum(stats["evicted_bytes"] for stats in result.stats) > 0


# Shapes.


def by_hand(modules: list[nn.Module], xs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Gradients of one process, microbatch by microbatch."""
    copies = copy.deepcopy(modules)
    for module in copies:
        module.zero_grad()
    for x in xs:
        (mse(nn.Sequential(*copies)(x), x) / len(xs)).backward()
    return [p.grad for module in copies for p in module.parameters()]


def batch(sizes: list[int], tokens: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes) + tokens)
    return [torch.randn(size, tokens, WIDTH, generator=generator) for size in sizes]


EVEN, SHORTER, UNEVEN = batch([2] * M), batch([2] * M, tokens=8), batch([1, 2, 3, 1, 2, 3, 1, 4])


def messages(caplog: pytest.LogCaptureFixture, beginning: str) -> int:
    return sum(record.message.startswith(f"rank 0: 1f1b: {beginning}") for record in caplog.records)


@pytest.mark.parametrize("options", [{}, {"options": bpipe.Options(parts=3)}, {"options": bpipe.Options(parts=2), "to": TO_HOST}])
def test_other_shapes_are_measured_and_planned_anew_and_both_plans_stay(caplog, options):
    caplog.set_level(logging.INFO, "bpipe")
    modules = [Block(dropout=0.0) for _ in range(4)]
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest", **options}), modules, M, mse)
    plans: dict[int, set[int]] = {}
    for step, xs in enumerate([EVEN, EVEN, SHORTER, EVEN, SHORTER, SHORTER, UNEVEN, EVEN, UNEVEN]):
        for module in modules:
            module.zero_grad()
        loopback.step(schedules, arg_mbs=[(x,) for x in xs], target_mbs=xs, return_outputs=False)
        assert all(map(torch.equal, (p.grad for m in modules for p in m.parameters()), by_hand(modules, xs)))
        plans.setdefault(id(xs), set()).add(id(schedules[0].plan))
        if step % 3 == 0:  # an evaluation in between changes nothing
            assert torch.equal(loopback.eval(schedules, torch.cat(EVEN)), nn.Sequential(*modules)(torch.cat(EVEN)))
    assert [len(plans[id(xs)]) for xs in (EVEN, SHORTER, UNEVEN)] == [1, 1, 1]
    assert (messages(caplog, "new shapes or sizes"), messages(caplog, "moves ")) == (0, 3)
    assert schedules[0].stats["evicted_bytes"] > 0
    for schedule in schedules:  # microbatches differ, and the plan covers the largest of them
        assert schedule.stats["device_peak_bytes"] <= schedule.stats["predicted_device_peak_bytes"]


def test_what_is_level_already_is_left_alone_and_said_to_be(caplog):
    caplog.set_level(logging.INFO, "bpipe")
    loopback, schedules = pipeline(Over(bpipe.GPipe, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
    for _ in range(2):
        loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
    assert schedules[0].plan.actions == build("gpipe", 4, M).actions
    assert "rank 0: gpipe: is as low as it gets: nothing moves; by the plan, the most on each device is" in caplog.text


class Grows(nn.Module):
    """Saves more, from its second step on, for inputs of the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_grown = nn.Linear(WIDTH, WIDTH), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(self.linear(x))
        return y.exp().sin() if self.is_grown else y


def growing(steps: list[bool], which: Sequence[int] = range(4)) -> tuple[list[Any], list[list[float]]]:
    """Steps in which some stages save more, or do not: the schedules, and what each rank used beyond its plan in each step."""
    modules = [Grows() for _ in range(4)]
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules, M, mse)
    unplanned = []
    for is_grown in steps:
        for stage in which:
            modules[stage].is_grown = is_grown
        loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
        unplanned.append([s.stats["device_peak_bytes"] - s.stats["predicted_device_peak_bytes"] for s in schedules])
    return schedules, unplanned


@pytest.mark.parametrize("which", [[1], range(4)])
def test_sizes_that_grow_are_measured_anew_on_all_ranks(caplog, which):
    caplog.set_level(logging.INFO, "bpipe")
    schedules, unplanned = growing([False] * 2 + [True] * 4, which)
    always, _ = growing([True] * 2, which)
    assert "saves more than planned, so that sizes are found anew" in caplog.text
    assert [any(more > 0 for more in ranks) for ranks in unplanned] == [False, False, True, False, False, False]
    assert unplanned[-1] == [0] * 4
    assert schedules[0].plan.sizes == always[0].plan.sizes


def test_sizes_that_come_and_go_are_covered():
    _, unplanned = growing([False, False] + [True, False] * 4)
    beyond = [any(more > 0 for more in ranks) for ranks in unplanned]
    assert beyond[2] and not any(beyond[4:])


def test_states_that_an_optimizer_makes_later_are_counted():
    """As with gradients accumulated over several steps."""
    modules = modules_of("quiet", 4)
    optimizers = [torch.optim.Adam(module.parameters()) for module in modules]
    loopback, schedules = pipeline(bpipe.OneFOneB, modules, M, mse)
    schedules = [bpipe.Balanced(schedule, optimizer=optimizer) for schedule, optimizer in zip(schedules, optimizers)]
    static = []
    for step in range(6):
        loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
        static.append(schedules[0].stats["static_bytes"])
        for optimizer in optimizers if step % 3 == 2 else ():
            optimizer.step()
    states = sum(2 * p.nbytes + 4 for p in modules[0].parameters())
    assert static[4] == static[5] == static[2] + states


def test_shapes_that_hardly_repeat_are_warned_of(caplog):
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
    for tokens in range(1, 21):
        x = torch.cat([row[:, :1].expand(-1, tokens, -1) for row in EVEN])
        loopback.step(schedules, x, target=x, return_outputs=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "needs new sizes and a new plan: pad inputs to a few shapes" in caplog.text


# What is given instead of measured.


def sizes_of(plan: Plan) -> Sizes:
    assert plan.sizes is not None
    return plan.sizes


def test_ranks_of_a_loopback_make_a_plan_once(monkeypatch):
    """And another one for other sizes."""
    made = []
    make = Policy.plan_in_bytes
    monkeypatch.setattr(Policy, "plan_in_bytes", lambda *asked: made.append(asked) or make(*asked))
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
    for xs in (EVEN, EVEN, SHORTER, SHORTER):
        loopback.step(schedules, torch.cat(xs), target=torch.cat(xs), return_outputs=False)
    assert len(made) == 2
    assert len({id(schedule.plan) for schedule in schedules}) == 1


def test_given_sizes_are_not_measured():
    measured = pipeline(Over(bpipe.OneFOneB, {"budget": "lowest"}), modules_of("quiet", 4), M, mse)
    x, y = batch_of("quiet", 2 * M)
    for _ in range(2):
        measured[0].step(measured[1], x, target=y, return_outputs=False)
    plan = measured[1][0].plan
    for budget in ("lowest", "auto", max(plan.device_peak_bytes)):
        over = Over(bpipe.OneFOneB, {"budget": budget, "sizes": sizes_of(plan)})
        loopback, schedules = pipeline(over, modules_of("quiet", 4), M, mse)
        assert schedules[0].plan.actions == plan.actions
        loopback.step(schedules, x, target=y, return_outputs=False)
        assert schedules[0].plan.actions == plan.actions
        assert schedules[0].stats["evicted_bytes"] > 0


def test_there_are_no_more_parts_than_saved_storages():
    modules = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(4)]
    over = Over(bpipe.OneFOneB, {"budget": "lowest", "options": bpipe.Options(parts=64)})
    loopback, schedules = pipeline(over, modules, M, mse)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
    for stage in sizes_of(schedules[0].plan).stages:
        assert 2 <= len(stage.parts) <= 4 and all(stage.parts)
    assert all(map(torch.equal, (p.grad for m in modules for p in m.parameters()), by_hand(modules, EVEN)))
    assert sum(schedule.stats["evicted_bytes"] for schedule in schedules) > 0
    given = Over(bpipe.OneFOneB, {**over.options, "sizes": sizes_of(schedules[0].plan)})
    loopback, others = pipeline(given, modules, M, mse)
    loopback.step(others, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
    assert [one.stats["evicted_bytes"] for one in others] == [one.stats["evicted_bytes"] for one in schedules]


def test_by_count_is_the_papers_rule():
    _, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": None}), modules_of("quiet", 4), M, mse)
    assert schedules[0].plan.actions == build("balanced_1f1b", 4, M).actions
    assert schedules[0].plan.peak_slots == (3, 3, 2, 3)


def test_auto_is_the_lowest_on_cpu():
    plans = []
    for budget in ("auto", "lowest"):
        loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": budget}), modules_of("quiet", 4), M, mse)
        for _ in range(2):
            loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN))
        plans.append(schedules[0].plan)
    assert plans[0] == plans[1]
    assert plans[0].evicted(0)


def test_auto_adds_what_is_free_to_what_is_used(monkeypatch):
    """As on CUDA: ranks of a loopback share a device, and gradients that are still to come need room of what is free."""
    monkeypatch.setattr(bpipe.api.measured_plans, "available_bytes", lambda device, reserve_bytes: 4 * (2**20 - reserve_bytes))
    over = Over(bpipe.OneFOneB, {"budget": "auto", "options": bpipe.Options(reserve_bytes=2**10)})
    modules = modules_of("quiet", 4)
    loopback, schedules = pipeline(over, modules, M, mse)
    for schedule in schedules:
        schedule.session.source._is_lowest = False
    loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
    for module in modules:
        module.zero_grad()
    loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN), return_outputs=False)
    parameters = sum(p.nbytes for p in modules[0].parameters())
    assert schedules[0].plan.budgets == (parameters + 2**20 - 2**10,) * 4
    assert schedules[0].plan.sizes.static[0] == 2 * parameters


def test_modules_on_the_meta_device_are_initialised_later():
    with torch.device("meta"):
        modules = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    loopback, schedules = pipeline(Over(bpipe.OneFOneB), modules, M, mse)
    for module in modules:
        nn.init.eye_(module.to_empty(device="cpu").weight)
        nn.init.zeros_(module.bias)
    for _ in range(2):
        assert torch.equal(loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN)), torch.cat(EVEN))
    assert schedules[0].stats["static_bytes"] == 2 * sum(p.nbytes for p in modules[0].parameters())


def runs_stages_of_torch(rank: int) -> float:
    from torch.distributed.pipelining import PipelineStage as TorchStage  # takes each process a second

    theirs = TorchStage(modules_of("quiet", 4)[rank], rank, 4, torch.device("cpu"))
    schedule = bpipe.Balanced(bpipe.OneFOneB(theirs, M, loss_fn=mse))
    for _ in range(2):
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    return schedule.stats["evicted_bytes"]


def test_stages_of_torch():
    assert run_ranks(runs_stages_of_torch, 4)[0] > 0


# The step that measures.


@pytest.mark.parametrize("name, num_stages", [("1f1b", 3), ("zbv", 6), ("dualpipe_v", 6), ("interleaved_1f1b", 6)])
def test_one_microbatch_at_a_time(name, num_stages):
    plan = computations_only(build(name, num_stages, 6, num_ranks=3))
    measuring = bpipe.schedules.finish(profiling_order(plan))
    assert measuring.peak_slots == (num_stages // 3,) * 3
    for rank in range(3):
        theirs, ours = (
            sorted(str(action).replace("I", "B") for action in p.compute(rank) if action.op != "W") for p in (plan, measuring)
        )
        assert ours == theirs


def test_its_picture():
    import bpipe.passes.profiling_order as module

    plan = computations_only(build("1f1b", 3, 2))
    grid = str(bpipe.schedules.finish(profiling_order(plan))).split("\n", 1)[1]
    assert grid in (module.__doc__ or "")


# Bad input.


def schedule_of(m: int = M) -> bpipe.Schedule:
    return bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), 0, 4, "cpu", bpipe.Loopback(4).rank(0)), m, loss_fn=mse)


SIZES = Sizes.of([8, 8, 8, 8])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"budget": "atuo"}, "budget='atuo': give bytes, 'auto', 'lowest', or None to count microbatches"),
        ({"budget": -1}, "budget=-1: give a whole number of bytes of at least 1"),
        ({"budget": True}, "budget=True: give a whole number of bytes"),
        ({"budget": 1e9}, "budget=1000000000.0: give a whole number of bytes"),
        ({"budget": [9, 9, 9]}, "budget=[9, 9, 9]: give bytes, at least 1, or None for each of 4 ranks"),
        ({"budget": (9, 9, 9, 0)}, "budget=(9, 9, 9, 0): give bytes, at least 1"),
        ({"parts": 0}, "parts=0: give a whole number from 1 to 64"),
        ({"parts": 65}, "parts=65: give a whole number from 1 to 64"),
        ({"budget": None, "options": bpipe.Options(parts=2)}, "budget=None counts microbatches and does not use parts"),
        ({"budget": None, "sizes": SIZES, "costs": Costs()}, "does not use costs, sizes"),
        ({"sizes": Sizes.of([8, 8])}, "2 stages in up to 1 parts and 2 ranks: give 4 stages, each in at most parts=1, and 4 ranks"),
        (
            {"sizes": Sizes.of([8] * 4, num_parts=3), "options": bpipe.Options(parts=2)},
            "in up to 3 parts and 4 ranks: give 4 stages, each in at most parts=2",
        ),
        ({"to": Destinations(pairs=[1, 0])}, "pairs=(1, 0): name one acceptor"),
        ({"to": Destinations(host="perhaps")}, "host='perhaps': choose"),
        ({"replicas": 3}, "replicas must be a process group of torch.distributed, got int"),
    ],
)
def test_arguments_that_cannot_work(options, message):
    schedule = schedule_of()
    with pytest.raises(ConfigurationError, match=re.escape(message)):
        bpipe.Balanced(schedule, **nested(options))
    bpipe.Balanced(schedule)  # nothing has become of the schedule


def test_schedules_that_cannot_be_balanced():
    with pytest.raises(
        ConfigurationError, match=re.escape("Balanced takes a schedule such as OneFOneB(stage, 8, loss_fn), got Linear")
    ):
        bpipe.Balanced(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="is balanced already: give Balanced the schedule that it was made from"):
        bpipe.Balanced(bpipe.Balanced(schedule_of()))
    loopback, schedules = pipeline(bpipe.OneFOneB, modules_of("quiet", 2), M, mse)
    loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN))
    closed = schedule_of()
    closed.close()
    for used in (schedules[0], closed):
        with pytest.raises(ConfigurationError, match="has not run and is not closed: make a new one"):
            bpipe.Balanced(used)


def test_the_schedule_that_was_balanced_runs_no_more():
    schedule = schedule_of()
    balanced = bpipe.Balanced(schedule)
    with pytest.raises(bpipe.errors.PipelineBrokenError, match="given to Balanced: call the schedule that Balanced returned"):
        schedule.step(torch.zeros(M, WIDTH))
    with pytest.raises(ConfigurationError, match="given to Balanced already: use the schedule that Balanced returned"):
        bpipe.Balanced(schedule)
    schedule.close()  # which leaves the balanced one open
    assert balanced.session.is_unused


def test_a_budget_that_given_sizes_cannot_meet_is_refused_at_once():
    with pytest.raises(BudgetError, match=r"^9 bytes are too few for 1f1b.*rank \d.*smallest budget that works here is budget=\d+"):
        bpipe.Balanced(schedule_of(), budget=9, sizes=SIZES)


@pytest.mark.parametrize("options", [{}, {"options": bpipe.Options(parts=4)}, {"options": bpipe.Options(parts=3), "to": HOST_LAST}])
def test_the_budgets_of_each_rank_that_are_named_work(options):
    """Where the given ones cannot be met: the message has them raised alike, None where there was none."""
    modules, x = modules_of("quiet", 4), torch.cat(EVEN)
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": [1, 200_000, None, 10_000], **options}), modules, M, mse)
    with pytest.raises(BudgetError, match=r"^\(1, 200000, None, 10000\) bytes are too few.* rank \d ") as caught:
        loopback.step(schedules, x, target=x)
    named = re.search(r"With all raised alike, the smallest budget that works here is budget=(\(.*?\))", str(caught.value))
    assert named is not None
    budget = ast.literal_eval(named[1])
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": budget, **options}), modules, M, mse)
    for _ in range(2):
        loopback.step(schedules, x, target=x)
    for schedule, most in zip(schedules, budget, strict=True):
        assert most is None or schedule.stats["device_peak_bytes"] <= most
    assert budget[0] - 1 == budget[1] - 200_000 == budget[3] - 10_000


def too_small(rank: int, budget: Any) -> list[str]:
    """What a step, an evaluation and another step say, and then one of a pipeline with the budget that was named."""
    module = modules_of("quiet", 4)[rank]
    schedule = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 4, "cpu"), M, loss_fn=mse), budget=budget)
    x, told = torch.cat(EVEN), []
    for _ in range(2):
        with pytest.raises(BudgetError) as caught:
            schedule.step(x, target=x)
        told.append(str(caught.value))
        schedule.eval(x)
    schedule.close()
    named = re.search(r"smallest budget that works here is budget=(\d+)", told[0])
    assert named is not None
    enough = bpipe.Balanced(bpipe.OneFOneB(bpipe.PipelineStage(module, rank, 4, "cpu"), M, loss_fn=mse), budget=int(named[1]))
    for _ in range(2):
        enough.step(x, target=x)
    assert enough.stats["device_peak_bytes"] <= int(named[1])
    return told


@pytest.mark.parametrize("budget", [1, 200_000])
def test_a_budget_that_cannot_be_met(budget):
    results = run_ranks(too_small, 4, budget)
    assert all(told == results[0] for told in results)
    first, again = results[0]
    assert first == again
    assert re.match(rf"{budget} bytes are too few for 1f1b with 4 stages and 8 microbatches: rank \d ", first)


def differing(rank: int, options: list[dict[str, Any]]) -> str:
    stage = bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, "cpu")
    schedule = bpipe.Balanced(bpipe.OneFOneB(stage, M, loss_fn=mse), **options[rank])
    with pytest.raises(AgreementError) as caught:
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    return str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        [{"budget": 10**6}, {"budget": 10**6 + 1}],
        [{"options": bpipe.Options(parts=1)}, {"options": bpipe.Options(parts=2)}],
        [{}, {"to": HOST_LAST}],
    ],
)
def test_ranks_that_were_given_different_things(options):
    assert all("the ranks disagree on the plan" in told for told in run_ranks(differing, 2, options))


def grows_alone(rank: int) -> list[float]:
    """Two pipelines of two ranks: in one of them microbatches grow, and all reduce gradients with their replicas in each step."""
    pipelines, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    which, stage = divmod(rank, 2)
    torch.manual_seed(stage)
    module = Grows()
    plain = bpipe.GPipe(bpipe.PipelineStage(module, stage, 2, "cpu", pipelines[which]), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, budget="lowest", to=Destinations(host="only"), replicas=replicas[stage])
    for step in range(6):
        module.is_grown = which == 0 and step >= 2
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad, group=replicas[stage])
    return [schedule.session.source.revision, *(float(parameter.grad.sum()) for parameter in module.parameters())]


def test_a_pipeline_that_grows_alone_does_not_wait_for_its_replicas():
    results = run_ranks(grows_alone, 4)
    assert [revision for revision, *_ in results] != [0] * 4
    assert [gradients for _, *gradients in results[:2]] == [gradients for _, *gradients in results[2:]]


def changes_alone(rank: int) -> list[float]:
    """Two replicas of a pipeline on one rank each: the first one's modules change, before the comparison and after it."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    torch.manual_seed(0)
    module = nn.Linear(WIDTH, WIDTH)
    plain = bpipe.GPipe(bpipe.PipelineStage(module, 0, 1, "cpu", groups[rank]), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, budget="lowest", replicas=dist.group.WORLD)
    for step in range(6):
        if rank == 0 and step in (1, 3):
            module.register_forward_hook(lambda *_: None)
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
        for parameter in module.parameters():
            dist.all_reduce(parameter.grad)
    return [float(parameter.grad.sum()) for parameter in module.parameters()]


def test_a_replica_whose_modules_change_alone_does_not_wait_for_the_others():
    first, second = run_ranks(changes_alone, 2)
    assert first == second


def with_replicas(rank: int, sizes: list[int]) -> tuple[str, float]:
    """Two pipelines of two ranks; the second one's microbatches may be of another size."""
    pipelines, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    which, stage = divmod(rank, 2)
    module = Block(dropout=0.0)
    plain = bpipe.OneFOneB(bpipe.PipelineStage(module, stage, 2, "cpu", pipelines[which]), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, replicas=replicas[stage])
    x = torch.cat(batch([sizes[which]] * M))
    schedule.step(x, target=x)
    told = ""
    try:
        schedule.step(x, target=x)
    except AgreementError as error:
        told = str(error)
    return told, schedule.stats["device_peak_bytes"]


def test_replicas_with_different_sizes_are_refused_on_every_rank():
    told, _ = zip(*run_ranks(with_replicas, 4, [2, 4]))
    pattern = (
        r"replicas differ: for a microbatch of stage [01], rank [01] has (\d+) saved bytes and rank [23] has (\d+)\. "
        "Give all replicas microbatches of the same shapes."
    )
    found = [re.fullmatch(pattern, text) for text in told]
    assert all(match is not None and 2 * int(match[1]) == int(match[2]) for match in found)


def test_replicas_with_the_same_sizes():
    told, peaks = zip(*run_ranks(with_replicas, 4, [2, 2]))
    assert told == ("",) * 4
    assert peaks[:2] == peaks[2:]


def fails_alone(rank: int) -> str:
    """One rank cannot say what it needs: the other must not wait for it."""
    plain = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, "cpu"), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain)
    if rank:
        schedule.session.source._own_budget = None
    with pytest.raises(AgreementError) as caught:
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    return str(caught.value)


def fails_beside_a_replica(rank: int) -> str:
    """Two pipelines of two ranks; one rank cannot say what it needs, and its replica in the other pipeline goes on."""
    pipelines, replicas = ([dist.new_group(ranks) for ranks in groups] for groups in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]))
    which, stage = divmod(rank, 2)
    plain = bpipe.OneFOneB(bpipe.PipelineStage(Block(dropout=0.0), stage, 2, "cpu", pipelines[which]), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, replicas=replicas[stage])
    if rank == 1:
        schedule.session.source._own_budget = None
    try:
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    except AgreementError as error:
        return str(error)
    return ""


def test_no_rank_waits_for_a_replica_that_cannot_plan():
    told = run_ranks(fails_beside_a_replica, 4)
    assert all(text.startswith("rank 1 cannot make a plan: TypeError") for text in told[:2])
    assert told[2:] == ["", ""]


def test_a_rank_that_cannot_plan_tells_the_others():
    assert all(told.startswith("rank 1 cannot make a plan: TypeError") for told in run_ranks(fails_alone, 2))


def plans_otherwise(rank: int, policy: dict[str, Any]) -> str:
    """One rank makes another plan of the same sizes, or none, as with other code it might."""
    plain = bpipe.OneFOneB(bpipe.PipelineStage(modules_of("quiet", 4)[rank], rank, 4, "cpu"), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, budget="lowest")
    if rank == 1:
        source: Any = schedule.session.source
        source._is_lowest, source._policy = policy["budget"] == "lowest", replace(source._policy, **policy)
    with pytest.raises((AgreementError, BudgetError)) as caught:
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    schedule.eval(torch.cat(EVEN))
    return f"{type(caught.value).__name__}: {caught.value}"


def interrupted(rank: int, error: str) -> str:
    """Planning fails on one rank with an error that is not bpipe's own."""
    plain = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), rank, 2, "cpu"), M, loss_fn=mse)
    schedule = bpipe.Balanced(plain, budget="lowest")
    make = schedule.session.source._made_plan

    def fail(*_: Any) -> None:
        raise KeyboardInterrupt if error == "KeyboardInterrupt" else RecursionError

    if rank:
        schedule.session.source._made_plan = fail
    with pytest.raises((AgreementError, KeyboardInterrupt, RecursionError)) as caught:
        schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    schedule.session.source._made_plan = make
    schedule.step(torch.cat(EVEN), target=torch.cat(EVEN))
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("error", ["KeyboardInterrupt", "RecursionError"])
def test_a_rank_whose_planning_fails_tells_the_others(error):
    told = run_ranks(interrupted, 2, error)
    assert told[0].startswith("AgreementError: the ranks made different plans") and error in told[0]
    assert told[1].startswith(error)


@pytest.mark.parametrize("wrapped", ["slots", "a plan that evicts", "a plan that recomputes"])
def test_what_the_wrapped_schedule_evicts_is_dropped(wrapped):
    """Before anything is measured, too: nobody makes room for what will not come."""
    loopback = bpipe.Loopback(4)
    stages = [bpipe.PipelineStage(module, i, 4, "cpu", loopback.rank(i)) for i, module in enumerate(modules_of("quiet", 4))]
    plans = {
        "a plan that evicts": build("balanced_1f1b", 4, M),
        "a plan that recomputes": finish(recompute_by_count(computations_only(build("1f1b", 4, M)))),
    }
    schedules = [
        bpipe.Balanced(
            bpipe.OneFOneB(stage, M, loss_fn=mse, options=bpipe.Options(slots=3))
            if wrapped == "slots"
            else bpipe.FromPlan(stage, plans[wrapped], mse),
            budget="lowest",
        )
        for stage in stages
    ]
    for schedule in schedules:
        assert not any(schedule.plan.evicted(rank) or schedule.plan.recomputed(rank) for rank in range(4))
        assert set(schedule.plan.slots) == {None}
    loopback.eval(schedules, torch.cat(EVEN))
    assert not any(schedule.session.context.memory.remote_buffers for schedule in schedules)


def test_ranks_that_make_different_plans():
    told = run_ranks(plans_otherwise, 4, {"budget": "lowest", "to": TO_HOST})
    assert all(text.startswith("AgreementError: the ranks made different plans") for text in told)
    told = run_ranks(plans_otherwise, 4, {"budget": 1})
    assert [text.split(":")[0] for text in told] == ["AgreementError", "BudgetError", "AgreementError", "AgreementError"]


# What it costs.


def test_nothing_is_hooked_where_nothing_is_evicted(monkeypatch):
    """After the measuring step, a step without evictions does what the plain one does."""
    loopback, schedules = pipeline(Over(bpipe.OneFOneB, {"budget": 2**40}), modules_of("quiet", 4), M, mse)
    for _ in range(2):
        loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN))
    monkeypatch.setattr(bpipe.memory.saved.stash.Stash, "capture", lambda self: pytest.fail("followed a microbatch"))
    loopback.step(schedules, torch.cat(EVEN), target=torch.cat(EVEN))
    plain = bpipe.OneFOneB.rule
    assert schedules[0].plan.actions == build(plain, 4, M).actions
