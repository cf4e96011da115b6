"""Local learning: each stage learns what its block learns alone, to the bit, and holds what the plan says."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import bpipe
from bpipe.errors import BPipeError, BudgetError, ConfigurationError, StageError
from bpipe.fill import OptimizerSteps
from bpipe.flow.shape_arguments import skips_of
from bpipe.passes.communicate import computations_only
from bpipe.schedules import Plan, build, finish
from tests.live import LiveRanks
from tests.ranks import run_ranks
from tests.relaxed.models import (
    KINDS,
    Trained,
    alone,
    as_rank,
    assert_same,
    batch_of,
    loopback_of,
    loss_of,
    modules_of,
    schedules_of,
)
from tests.schedules.shape_of_plan import reshaped, shape_of
from tests.sleepers import Sleeper

pytestmark = pytest.mark.usefixtures("one_thread")

P, M = 4, 8


@pytest.mark.parametrize("kind", KINDS)
def test_each_stage_learns_as_its_block_does_alone(kind: str) -> None:
    """In a loopback; the caller's list has the losses of the last stage."""
    modules, expected = modules_of(kind, P), alone(kind, P, M)
    needed: list[bool] = []
    for module in modules:
        module.register_forward_pre_hook(lambda _, given: needed.append(given[0].requires_grad))
    torch.manual_seed(1)
    loopback, schedules = loopback_of(modules, M)
    losses: list[torch.Tensor] = []
    for step in range(2):
        x, y = batch_of(kind, 2 * M, step)
        outputs = loopback.step(schedules, x.clone(), target=y, losses=losses)
    for index, (module, one) in enumerate(zip(modules, expected)):
        found = Trained(outputs=outputs if index == P - 1 else None).of(module)
        assert_same(found, one, all_losses=False)
    assert all(map(torch.equal, losses, expected[-1].losses[-M:])) and len(losses) == M
    assert len(needed) == 2 * P * M and not any(needed)  # nor is a gradient of an input made


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("kind", ["batch norm", "checkpointed"])
def test_each_stage_learns_the_same_in_another_order(kind: str, name: str) -> None:
    """Whatever the order, a stage takes its microbatches in turn; where forwards come first, it holds several."""
    plan = finish(reshaped(computations_only(build(name, P, M)), local=True))
    modules, expected = modules_of(kind, P), alone(kind, P, M, 1)
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, group=loopback.rank(i)) for i, module in enumerate(modules)]
    schedules = [bpipe.FromPlan(stage, plan, loss_fn=loss_of(i)) for i, stage in enumerate(stages)]
    x, y = batch_of(kind, 2 * M, 0)
    loopback.step(schedules, x.clone(), target=y)
    assert [schedule.stats["peak_slots"] for schedule in schedules] == list(plan.peak_slots)
    for module, one in zip(modules, expected):
        assert all(map(torch.equal, Trained().of(module).tensors, one.tensors))


def test_what_stages_cannot_run_together_yet_is_refused() -> None:
    """Such plans are proven and simulated."""

    def refused(plan: Plan, match: str) -> None:
        loopback, held = bpipe.Loopback(plan.num_ranks), plan.stages_of(0)
        skips = {f"skip{place}": skip for place, skip in enumerate(skips_of(plan.flow))}
        stages = [bpipe.PipelineStage(nn.Linear(2, 2), i, plan.num_stages, group=loopback.rank(0), skips=skips) for i in held]
        with pytest.raises(ConfigurationError, match=match):
            bpipe.FromPlan(stages, plan, loss_fn=F.mse_loss)

    refused(finish(reshaped(computations_only(build("zbv", 4, 4)), local=True)), "give each rank one")


@pytest.mark.parametrize("kind", KINDS)
def test_each_process_learns_as_its_block_does_alone(kind: str) -> None:
    """Over gloo, each rank with a target of its own, and the losses of its own stage."""
    steps, shift = 2, 1
    found_by_rank = run_ranks(as_rank, P, kind, P, M, steps, shift)
    for found, expected in zip(found_by_rank, alone(kind, P, M, steps, shift), strict=True):
        assert_same(found, expected)


def test_evaluation_runs_the_chain_and_each_stage_s_loss() -> None:
    modules = modules_of("checkpointed", 3)
    loopback, schedules = loopback_of(modules, 4)
    x, y = batch_of("checkpointed", 8)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        expected = modules[2](modules[1](modules[0](x)[0])[0])
    assert torch.allclose(loopback.eval(schedules, x), expected, atol=1e-6)
    assert torch.equal(loopback.eval(schedules, x, target=y, losses=losses), loopback.eval(schedules, x))
    assert torch.allclose(torch.stack(losses).mean(), loss_of(2)(expected, y)) and len(losses) == 4
    assert all(p.grad is None for module in modules for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_the_plan_s_and_those_that_are_alive(kind: str) -> None:
    """Measured equals predicted; what is saved is what is alive besides messages, the user's tensors and a rank's results."""
    modules = modules_of(kind, 3)
    loopback, schedules = loopback_of(modules, 4)
    live = LiveRanks(loopback, schedules, modules, collects=True)
    x, y = batch_of(kind, 8)
    for _ in range(2):
        counted = live.step(x, y)
    for rank, ((peak, stats), (least, most)) in enumerate(zip(counted, live.between())):
        is_last, found = rank == 0, schedules[rank].ledger.footprints[2 - rank, 0]
        # Of what is saved, the output is a message until the backward has run.
        under_way = found.sizes()["out"].kept * (not is_last)
        assert peak and least <= stats["peak_bytes"] - under_way <= most
        assert bool(found.sizes()["loss"].num_bytes) is not is_last
        assert stats["peak_slots"] == stats["predicted_peak_slots"] == 1
        assert stats["device_peak_bytes"] == stats["predicted_device_peak_bytes"]
    assert [stats["microbatches_unknown"] for _, stats in counted] == [0, 0, 0]


def test_balanced_counts_in_bytes_and_moves_nothing() -> None:
    modules = modules_of("checkpointed", 3)
    loopback, schedules = loopback_of(modules, 4)
    balanced = [bpipe.Balanced(schedule, budget="lowest") for schedule in schedules]
    x, y = batch_of("checkpointed", 8)
    for _ in range(3):
        loopback.step(balanced, x, target=y)
    plan = balanced[0].plan
    assert shape_of(plan).local and plan.sizes is not None and plan.sizes.stages[0]["loss"].num_bytes and not any(plan.served)
    assert [schedule.stats["device_peak_bytes"] for schedule in reversed(balanced)] == list(plan.device_peak_bytes)
    budget = max(plan.device_peak_bytes) - 1
    balanced = [bpipe.Balanced(one, budget=budget) for one in schedules_of(loopback, modules, 4)]
    with pytest.raises(BudgetError, match=str(max(plan.device_peak_bytes))):
        loopback.step(balanced, x, target=y)


# What is refused


class Tangled(nn.Module):
    """Changes in place what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu(x, inplace=True))


def test_modules_that_do_not_fit() -> None:
    x, y = torch.randn(4, 4), torch.randint(4, (4,))
    loopback, schedules = loopback_of([nn.Linear(4, 4), nn.Linear(4, 4)], 2)
    with pytest.raises(StageError, match=r"stage 0, microbatch 0: the module returned Tensor, .* give the stage bpipe\.LocalBlock"):
        loopback.step(schedules, x, target=y)
    loopback, schedules = loopback_of([bpipe.LocalBlock(nn.Linear(4, 4), Tangled()), nn.Linear(4, 4)], 2)
    with pytest.raises(StageError, match="head of a LocalBlock changed the block's output in place"):
        loopback.step(schedules, x, target=y)
    blocks = [bpipe.LocalBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
    with pytest.raises(ConfigurationError, match="stage 1 is the last one and has a LocalBlock"):
        loopback_of([*blocks], 2)


def without_target(rank: int) -> str:
    stage = bpipe.PipelineStage(modules_of("in place", 3)[rank], rank, 3, "cpu")
    schedule = bpipe.LocalLearning(stage, 2, loss_fn=F.cross_entropy)
    x, y = batch_of("in place", 4)
    with pytest.raises(BPipeError) as error:
        schedule.step(*(x,) * (rank == 0), target=None if rank == 1 else y)
    dist.barrier()
    return str(error.value)


def test_a_rank_without_a_target_stops_all() -> None:
    said = run_ranks(without_target, 3)
    assert all("stage 1 has a loss of its own but step() got no target: pass target=" in one for one in said), said


# Training


def train(rank: int, folder: str, how: str) -> list[torch.Tensor]:
    """Three steps whose optimizers do not wait for other ranks; saved, changed and loaded again; and a trace of one more."""
    module = modules_of("checkpointed", 3)[rank]
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    schedule = bpipe.LocalLearning(bpipe.PipelineStage(module, rank, 3, "cpu"), 4, loss_fn=F.cross_entropy)
    if how == "fill":
        schedule.fill = OptimizerSteps({rank: optimizer})
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch_of("checkpointed", 8, step)
        schedule.step(*(x,) * (rank == 0), target=y)
        if how == "loop":
            optimizer.step()
    before = [p.detach().clone() for p in module.parameters()]
    if how == "loop":
        dcp.save(bpipe.training_state(module, optimizer), checkpoint_id=folder)
        with torch.no_grad():
            for p in module.parameters():
                p.zero_()
        dcp.load(bpipe.training_state(module, optimizer), checkpoint_id=folder)
        with bpipe.trace(schedule, Path(folder) / "trace"):
            schedule.step(*(x,) * (rank == 0), target=y)
    assert all(map(torch.equal, before, module.parameters()))
    schedule.close()
    return before


def test_optimizers_step_a_stage_at_a_time_and_stages_are_saved_and_traced(tmp_path: Path) -> None:
    """Behind `step`, or as a fill job at its end: the same parameters."""
    looped, filled = (run_ranks(train, 3, str(tmp_path), how) for how in ("loop", "fill"))
    for one, other in zip(looped, filled, strict=True):
        assert one and all(map(torch.equal, one, other))
    (timeline,) = bpipe.load_trace(tmp_path / "trace")
    assert shape_of(timeline.plan).local
    assert [str(span.action) for span in timeline.computations(rank=2)][:3] == ["2F0", "2B0", "2F1"]


def sleeping(rank: int, num_stages: int, m: int, forward_s: float) -> list[tuple[float, float]]:
    """When each of three steps began and ended on this rank."""
    sleeper = Sleeper(forward_s, saved_bytes=1024)
    module = bpipe.LocalBlock(sleeper, nn.Identity()) if rank < num_stages - 1 else sleeper
    schedule = bpipe.LocalLearning(bpipe.PipelineStage(module, rank, num_stages, "cpu"), m, loss_fn=F.mse_loss)
    x, times = torch.ones(m, 8), []
    for _ in range(4):
        dist.barrier()
        began = time.monotonic()
        schedule.step(*(x,) * (rank == 0), target=x, return_outputs=False)
        times.append((began, time.monotonic()))
    schedule.close()
    return times[1:]


def test_a_step_takes_as_long_as_the_plan_says_and_early_ranks_are_done_early() -> None:
    p, m, forward_s = 3, 4, 0.1
    ranks: list[Any] = run_ranks(sleeping, p, p, m, forward_s)
    took = [statistics.median(end - begin for begin, end in times) / forward_s for times in ranks]
    assert 0.97 * (3 * m + p - 1) < took[-1] < 1.15 * (3 * m + p - 1), took  # ranks leave the barrier one after the other
    assert took[-1] - took[0] > 0.5 * (p - 1), took
