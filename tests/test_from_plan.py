"""Plans that come from outside: proven before they run, and then run like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bpipe
from bpipe.errors import CommError, ConfigurationError, PlanError, StageError, printable
from bpipe.schedules import Plan, StageSizes, build
from bpipe.schedules.by_name import forward_plan
from bpipe.session.report import Report
from tests.amounts import amounts, changed
from tests.models import batch_of, modules_of, mse, single_process
from tests.tiers import examples

P, M = 4, 8


def loop_of(plan: Plan) -> tuple[bpipe.Loopback, list[bpipe.Schedule], list[torch.nn.Module]]:
    modules = modules_of("quiet", plan.num_stages)
    loopback = bpipe.Loopback(plan.num_ranks)
    held = [[s for s, rank in enumerate(plan.stage_ranks) if rank == r] for r in range(plan.num_ranks)]
    stages = [
        [bpipe.PipelineStage(modules[s], s, plan.num_stages, "cpu", loopback.rank(r)) for s in of] for r, of in enumerate(held)
    ]
    return loopback, [bpipe.FromPlan(of_rank, plan, loss_fn=mse) for of_rank in stages], modules


@pytest.mark.parametrize("name", ["1f1b", "balanced_1f1b", "zb_h1", "interleaved_1f1b"])
def test_a_plan_from_a_file_runs_as_the_schedule_does(name, tmp_path):
    path = tmp_path / "plan.txt"
    num_stages = 2 * P if name == "interleaved_1f1b" else P
    path.write_text(build(name, num_stages, M, num_ranks=P).to_text())
    loopback, schedules, modules = loop_of(Plan.from_text(path.read_text()))
    x, y = batch_of("quiet", 2 * M, 0)
    loopback.step(schedules, x, target=y)
    expected = single_process("quiet", num_stages, M, steps=1)
    for module, gradients in zip(modules, expected.gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))


def test_a_plan_in_bytes_and_parts_that_was_kept_runs_again():
    """As `Balanced` has made it: its second run needs no measuring step."""
    x, y = batch_of("quiet", 2 * M, 0)
    modules, loopback = modules_of("quiet", P), bpipe.Loopback(P)
    plain = [bpipe.OneFOneB(bpipe.PipelineStage(one, r, P, "cpu", loopback.rank(r)), M, mse) for r, one in enumerate(modules)]
    balanced = [bpipe.Balanced(schedule, budget="lowest", options=bpipe.Options(parts=4)) for schedule in plain]
    for _ in range(2):
        loopback.step(balanced, x, target=y)
    kept = Plan.from_text(balanced[0].plan.to_text())
    assert any(action.part for action in kept.actions[0])
    loopback, schedules, modules = loop_of(kept)
    expected = single_process("quiet", P, M, steps=1)
    loopback.step(schedules, x, target=y)
    assert all(schedule.stats["evicted_bytes"] > 0 for schedule in schedules[:1])
    for module, gradients in zip(modules, expected.gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))


def test_a_plan_from_a_file_may_be_balanced():
    loopback, schedules, modules = loop_of(build("1f1b", P, M))
    balanced = [bpipe.Balanced(schedule, budget="lowest") for schedule in schedules]
    x, y = batch_of("quiet", 2 * M, 0)
    for _ in range(2):
        for module in modules:
            module.zero_grad()
        loopback.step(balanced, x, target=y)
    assert balanced[0].stats["evicted_bytes"] > 0
    expected = single_process("quiet", P, M, steps=1)
    for module, gradients in zip(modules, expected.gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))


def test_an_unsound_plan_is_refused_with_what_is_wrong():
    plan = build("1f1b", 2, 4)
    lane = plan.actions[1]
    unsound = replace(plan, actions=(plan.actions[0], (lane[1], lane[0], *lane[2:])))
    with pytest.raises(PlanError, match="plan '1f1b' breaks"):
        bpipe.FromPlan(bpipe.PipelineStage(torch.nn.Linear(2, 2), 0, 2, "cpu", bpipe.Loopback(2).rank(0)), unsound, mse)


def test_a_plan_for_other_stages_or_without_backwards_is_refused():
    stage = bpipe.PipelineStage(torch.nn.Linear(2, 2), 0, 2, "cpu", bpipe.Loopback(2).rank(0))
    with pytest.raises(ConfigurationError, match="is for 3 stages on 3 ranks, but these are 2 stages"):
        bpipe.FromPlan(stage, build("1f1b", 3, 4), mse)
    with pytest.raises(ConfigurationError, match="has no backwards"):
        bpipe.FromPlan(stage, forward_plan(build("1f1b", 2, 4)), mse)


SIZES = st.builds(
    lambda parts, fixed, sent: StageSizes(parts=tuple(parts), fixed=fixed, amounts=amounts(sent=sent)),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=4),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
)
REPORTS = st.builds(
    Report,
    st.integers(0, 64),
    st.dictionaries(st.integers(0, 64), st.lists(SIZES, max_size=3).map(tuple), max_size=3),
    st.integers(0, 2**50),
    st.none() | st.integers(0, 2**50),
    st.text(max_size=20).map(printable),  # as it arrives
    st.integers(0, 2**50),
)


@given(REPORTS)
def test_reports_survive_packing(report):
    assert Report.unpack(report.pack(), 0) == report


@given(REPORTS, st.data())
@settings(max_examples=examples(200))
def test_damaged_reports_are_reports_or_refused(report, data):
    damaged = bytearray(report.pack()[: data.draw(st.integers(0, 200))])
    if damaged:
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        seen = Report.unpack(bytes(damaged), 3)
    except CommError:
        return
    assert seen.static >= 0


@pytest.mark.parametrize(
    "text", ['{"stages": 3}', "[]", '{"stages": {"0": {"parts": [-1]}}}', '{"stages": {}, "rank": true}', "[" * 9**5]
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(CommError, match="rank 1 sent an unreadable report of its sizes"):
        Report.unpack(text.encode(), 1)


@pytest.mark.parametrize("scale, message", [(1.0, ""), (0.5, r"0EVICT\d+ would move \d+ bytes, but the sizes .* give \d+")])
def test_an_eviction_larger_than_the_plan_s_sizes_is_refused_by_its_sender(scale, message):
    """With sizes that were measured the plan runs; with half of them it is refused before anything too large leaves."""
    x, y = batch_of("quiet", 2 * M, 0)
    modules, loopback = modules_of("quiet", P), bpipe.Loopback(P)
    plain = [bpipe.OneFOneB(bpipe.PipelineStage(one, r, P, "cpu", loopback.rank(r)), M, mse) for r, one in enumerate(modules)]
    balanced = [bpipe.Balanced(schedule, budget="lowest") for schedule in plain]
    for _ in range(2):
        loopback.step(balanced, x, target=y)
    found = balanced[0].plan.sizes
    sizes = replace(
        found,
        stages=tuple(
            replace(changed(one, kept_sent=0, kept_received=0), parts=tuple(int(n * scale) for n in one.parts))
            for one in found.stages
        ),
    )
    loopback, modules = bpipe.Loopback(P), modules_of("quiet", P)
    plain = [bpipe.OneFOneB(bpipe.PipelineStage(one, r, P, "cpu", loopback.rank(r)), M, mse) for r, one in enumerate(modules)]
    given = [bpipe.Balanced(schedule, budget="lowest", sizes=sizes) for schedule in plain]
    if message:
        with pytest.raises(StageError, match=message):
            loopback.step(given, x, target=y)
    else:
        loopback.step(given, x, target=y)
        assert given[0].stats["evicted_bytes"] > 0
