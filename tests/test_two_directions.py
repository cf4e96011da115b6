"""Schedules of two directions: twins train as one, to the gradients of a single process, and errors name what is wrong."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import bpipe
from bpipe.errors import AgreementError, BudgetError, ConfigurationError, StageError
from bpipe.schedules import Destinations, Op, build, rules
from tests.ranks import RankError, run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 6
RULES = {rule.name: rule for rule in rules() if rule.placement.directions == 2}
CLASSES: list[type[bpipe.Schedule]] = [bpipe.BitPipe, bpipe.BitPipeReordered, bpipe.BitPipeZB, bpipe.Chimera]
mse = nn.functional.mse_loss


class Block(nn.Module):
    """A residual block, one of whose weights is frozen, and one of which only large inputs use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.rare = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.scale * self.down(torch.tanh(self.up(x)))
        return x * self.rare if x.mean() > 1 else x


def blocks_of(cls: type[bpipe.Schedule], p: int) -> list[nn.Module]:
    """The stages of one direction."""
    torch.manual_seed(0)
    return [Block().double() for _ in range(p * RULES[cls.rule].default_stages_per_rank // 2)]


def held(cls: type[bpipe.Schedule], p: int) -> list[list[int]]:
    v = RULES[cls.rule].default_stages_per_rank
    ranks = RULES[cls.rule].placement.stage_ranks(p, v)
    return [[stage for stage, owner in enumerate(ranks) if owner == rank] for rank in range(p)]


def stages_on(cls: type[bpipe.Schedule], p: int, rank: int, group: Any = None) -> list[bpipe.PipelineStage]:
    blocks = blocks_of(cls, p)
    depth = len(blocks)
    return [
        bpipe.PipelineStage(deepcopy(blocks[stage % depth]), stage, 2 * depth, "cpu", group, directions=2)
        for stage in held(cls, p)[rank]
    ]


def batch(m: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Every other microbatch uses the rare weights, so that one direction has gradients of them and the other has none."""
    torch.manual_seed(seed)
    x, y = torch.randn(2 * m, WIDTH, dtype=torch.float64), torch.randn(2 * m, WIDTH, dtype=torch.float64)
    x.view(m, 2, WIDTH)[::2] += 4.0
    return x, y


def optimizer_of(modules: list[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW((p for module in modules for p in module.parameters() if p.requires_grad), lr=0.01)


def alone(cls: type[bpipe.Schedule], p: int, m: int, steps: int, accumulated: int = 1) -> tuple[list[Any], list[Any]]:
    """A single process: the losses of all steps, and the weights at the end."""
    blocks = blocks_of(cls, p)
    optimizer, losses = optimizer_of(blocks), []
    for step in range(steps):
        for part in range(accumulated):
            for x, y in zip(*(whole.chunk(m) for whole in batch(m, 10 * step + part))):
                loss = mse(nn.Sequential(*blocks)(x), y)
                (loss / m).backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, [block.state_dict() for block in blocks]


def trained(
    stages: list[bpipe.PipelineStage], step: Any, m: int, steps: int, accumulated: int
) -> tuple[list[float], dict[int, Any]]:
    optimizer, found = optimizer_of([one.submod for one in stages]), []
    for number in range(steps):
        for part in range(accumulated):
            losses: list[torch.Tensor] = []
            x, y = batch(m, 10 * number + part)
            step(x, target=y, losses=losses, return_outputs=False)
            found += [loss.item() for loss in losses]
        optimizer.step()
        optimizer.zero_grad()
    return found, {one.stage_index: one.submod.state_dict() for one in stages}


def assert_twins(weights: dict[int, Any], expected: list[Any]) -> None:
    depth = len(expected)
    assert len(weights) == 2 * depth
    for stage, state in enumerate(expected):
        for name, value in state.items():
            assert torch.equal(weights[stage][name], weights[stage + depth][name]), (stage, name)
            assert torch.allclose(weights[stage][name], value, rtol=0, atol=1e-12), (stage, name)


def in_loopback(cls: type[bpipe.Schedule], p: int, m: int, make: Any = None, **how: int) -> None:
    loopback = bpipe.Loopback(p)
    stages = [stages_on(cls, p, rank, loopback.rank(rank)) for rank in range(p)]
    schedules = [(make or cls)(of_rank, m, mse) for of_rank in stages]
    steps, accumulated = how.get("steps", 10), how.get("accumulated", 1)
    everything = [one for of_rank in stages for one in of_rank]
    found, weights = trained(everything, partial(loopback.step, schedules), m, steps, accumulated)
    losses, expected = alone(cls, p, m, steps, accumulated)
    assert found == pytest.approx(losses, abs=1e-12)
    assert_twins(weights, expected)
    for schedule in schedules:  # a prediction counts the larger microbatches, which use the rare weights
        assert 0 < schedule.stats["peak_bytes"] <= schedule.stats["predicted_peak_bytes"]
        assert schedule.stats["device_peak_bytes"] <= schedule.stats["predicted_device_peak_bytes"]


@pytest.mark.parametrize("p", [2, 8])
@pytest.mark.parametrize("cls", CLASSES)
def test_twins_stay_equal_and_train_as_a_single_process(cls: type[bpipe.Schedule], p: int) -> None:
    in_loopback(cls, p, 2 * p)


@pytest.mark.parametrize("cls", CLASSES)
def test_steps_accumulate(cls: type[bpipe.Schedule]) -> None:
    """What both twins have from earlier steps is not added up again."""
    in_loopback(cls, 4, 4, steps=3, accumulated=3)


def balanced(cls: type[bpipe.Schedule], **how: Any) -> Any:
    return lambda stages, m, loss_fn: bpipe.Balanced(cls(stages, m, loss_fn), **how)


HOW: dict[str, dict[str, Any]] = {
    "whole": {},
    "recomputed": {"by": "recompute"},
    "in parts, to the host": {"options": bpipe.Options(parts=2), "to": Destinations(host="last")},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("cls", CLASSES)
def test_balanced(cls: type[bpipe.Schedule], how: str) -> None:
    in_loopback(cls, 4, 8, balanced(cls, budget="lowest", **HOW[how]), steps=3)


def test_evictions_in_slots() -> None:
    slots = max(build("bitpipe_reordered", 16, 8, num_ranks=4).peak_slots) - 2
    make = partial(bpipe.BitPipeReordered, options=bpipe.Options(slots=(slots, None, None, slots)))
    in_loopback(bpipe.BitPipeReordered, 4, 8, make, steps=3)


def over_gloo(rank: int, cls: type[bpipe.Schedule], p: int, m: int, steps: int, budget: str | None) -> Any:
    stages = stages_on(cls, p, rank)
    schedule: Any = cls(stages, m, mse)
    if budget is not None:
        schedule = bpipe.Balanced(schedule, budget)
    result = trained(stages, schedule.step, m, steps, 1)
    return *result, dict(schedule.stats), len(schedule.plan.evicted(rank))


@pytest.mark.parametrize(("cls", "budget"), [(bpipe.BitPipe, None), (bpipe.BitPipeZB, None), (bpipe.Chimera, "lowest")])
def test_processes(cls: type[bpipe.Schedule], budget: str | None) -> None:
    p, m, steps = 4, 8, 10
    ranks = run_ranks(over_gloo, p, cls, p, m, steps, budget)
    losses, expected = alone(cls, p, m, steps)
    assert_twins({stage: state for _, states, *_ in ranks for stage, state in states.items()}, expected)
    even, odd = ([loss for i, loss in enumerate(losses) if i % 2 == way] for way in (0, 1))
    ends = [found for found, *_ in ranks if found]
    assert sorted(map(sorted, ends)) == [pytest.approx(sorted(one), abs=1e-12) for one in sorted((sorted(even), sorted(odd)))]
    for _, _, stats, _ in ranks:
        assert stats["device_peak_bytes"] <= stats["predicted_device_peak_bytes"]


@pytest.mark.parametrize("budget", [None, "lowest"])
@pytest.mark.parametrize("cls", CLASSES)
def test_memory_is_as_predicted(cls: type[bpipe.Schedule], budget: str | None) -> None:
    """To the byte, with the gradients that twins send, and those of earlier steps that wait meanwhile."""
    loopback, m = bpipe.Loopback(4), 8
    stages = [stages_on(cls, 4, rank, loopback.rank(rank)) for rank in range(4)]
    schedules: list[Any] = [cls(of_rank, m, mse) for of_rank in stages]
    if budget is not None:
        schedules = [bpipe.Balanced(schedule, budget) for schedule in schedules]
    torch.manual_seed(3)
    x, y = torch.randn(2, 2 * m, WIDTH, dtype=torch.float64)
    peaks = []
    for _ in range(3):  # gradients accumulate
        loopback.step(schedules, x / 9, target=y, return_outputs=False)
        peaks.append([schedule.stats["device_peak_bytes"] for schedule in schedules])
        for schedule in schedules:
            assert schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"] > 0
            assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
    gradients = [sum(p.grad.nbytes for one in of for p in one.submod.parameters() if p.grad is not None) for of in stages]
    assert [after - before for before, after in zip(peaks[1], peaks[2])] == [0] * 4
    if budget is None:
        assert [after - before for before, after in zip(peaks[0], peaks[1])] == gradients


def test_gradients_that_accumulate_are_within_the_budget_or_refused() -> None:
    """They are known before the step that sets them aside, as states of optimizers are."""
    loopback, m = bpipe.Loopback(2), 4
    stages = [stages_on(bpipe.BitPipe, 2, rank, loopback.rank(rank)) for rank in range(2)]
    plain = [bpipe.BitPipe(of_rank, m, mse) for of_rank in stages]
    x, y = batch(m)
    loopback.step(plain, x, target=y)
    budget = int(max(schedule.stats["device_peak_bytes"] for schedule in plain))
    for of_rank in stages:
        for one in of_rank:
            one.submod.zero_grad()
    schedules = [bpipe.Balanced(bpipe.BitPipe(of_rank, m, mse), budget) for of_rank in stages]
    loopback.step(schedules, x, target=y)
    with pytest.raises(BudgetError):
        loopback.step(schedules, x, target=y)


def sharded(rank: int, m: int) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    replica = mesh["dp"].get_local_rank()
    stages = stages_on(bpipe.BitPipe, 2, mesh["pp"].get_local_rank(), mesh["pp"])
    for stage in stages:
        fully_shard(stage.submod, mesh=mesh["dp"])
    schedule = bpipe.BitPipe(stages, m, mse)
    optimizer, weights = optimizer_of([one.submod for one in stages]), {}
    for step in range(3):
        x, y = batch(2 * m, step)
        of_replica = slice(2 * m * replica, 2 * m * (replica + 1))
        schedule.step(x[of_replica], target=y[of_replica], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()
    for one in stages:
        weights[one.stage_index] = {name: value.full_tensor() for name, value in one.submod.state_dict().items()}
    return weights


def test_sharded_twins() -> None:
    """Each rank exchanges its shards, when FSDP2 has reduced them."""
    m, blocks = 4, blocks_of(bpipe.BitPipe, 2)
    optimizer = optimizer_of(blocks)
    for step in range(3):
        for x, y in zip(*(whole.chunk(2 * m) for whole in batch(2 * m, step))):
            (mse(nn.Sequential(*blocks)(x), y) / (2 * m)).backward()
        for block in blocks:
            for parameter in block.parameters():  # FSDP2 gives a gradient of zeros where a parameter was not used
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(sharded, 4, m)
    weights = {stage: state for of_rank in ranks for stage, state in of_rank.items()}
    assert_twins(weights, [block.state_dict() for block in blocks])


def clipped(rank: int, p: int, m: int, folder: str) -> Any:
    stages = stages_on(bpipe.BitPipe, p, rank)
    schedule = bpipe.BitPipe(stages, m, mse)
    modules = {one.stage_index: one.submod for one in stages}
    optimizer = optimizer_of(list(modules.values()))
    norms = []
    for step in range(3):
        x, y = batch(m, step)
        schedule.step(x, target=y, return_outputs=False)
        norms.append(bpipe.clip_grad_norm_({s: module.parameters() for s, module in modules.items()}, 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    named = [nn.ModuleDict({str(stage % (2 * p)): module}) for stage, module in modules.items()]
    dcp.save(bpipe.training_state(named, optimizer), checkpoint_id=folder)
    saved = {stage: deepcopy(module.state_dict()) for stage, module in modules.items()}
    for module in modules.values():
        for parameter in module.parameters():
            parameter.data.zero_()
    dcp.load(bpipe.training_state(named, optimizer), checkpoint_id=folder)
    now = {stage: module.state_dict() for stage, module in modules.items()}
    is_back = all(torch.equal(saved[stage][name], value) for stage, state in now.items() for name, value in state.items())
    return norms, saved, is_back


def test_clipping_counts_twins_once_and_checkpoints_have_one_of_each(tmp_path: Any) -> None:
    p, m, blocks = 2, 4, blocks_of(bpipe.BitPipe, 2)
    optimizer, norms = optimizer_of(blocks), []
    for step in range(3):
        for x, y in zip(*(whole.chunk(m) for whole in batch(m, step))):
            (mse(nn.Sequential(*blocks)(x), y) / m).backward()
        norms.append(nn.utils.clip_grad_norm_([p for block in blocks for p in block.parameters()], 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
    ranks = run_ranks(clipped, p, p, m, str(tmp_path))
    for found, _, is_back in ranks:
        assert found == pytest.approx(norms, rel=1e-12) and is_back
    assert_twins({stage: state for _, states, _ in ranks for stage, state in states.items()}, [b.state_dict() for b in blocks])


def test_evaluation_gives_every_microbatch_once() -> None:
    loopback, m = bpipe.Loopback(4), 8
    schedules = [bpipe.BitPipe(stages_on(bpipe.BitPipe, 4, rank, loopback.rank(rank)), m, mse) for rank in range(4)]
    x, y = batch(m)
    losses: list[torch.Tensor] = []
    found = loopback.eval(schedules, x, target=y, losses=losses)
    with torch.no_grad():
        expected = torch.cat([nn.Sequential(*blocks_of(bpipe.BitPipe, 4))(part) for part in x.chunk(m)])
    assert torch.allclose(found, expected, atol=1e-12) and len(losses) == m


def different(rank: int) -> None:
    stages = stages_on(bpipe.Chimera, 2, rank)
    if rank == 1:
        with torch.no_grad():
            next(stages[0].submod.parameters()).view(-1)[3] += 1e-12
    x, y = batch(2)
    bpipe.Chimera(stages, 2, mse).step(x, target=y)


def test_twins_that_begin_differently_are_refused_on_all_ranks() -> None:
    for error in run_ranks(different, 2, expect_errors=True):
        assert isinstance(error, AgreementError)
        assert "stages 1 and 3 are twins, but their weights differ (on ranks 1 and 0)" in str(error)


def frozen_later(rank: int) -> None:
    stages = stages_on(bpipe.Chimera, 2, rank)
    schedule, (x, y) = bpipe.Chimera(stages, 2, mse), batch(2)
    schedule.step(x, target=y)
    stages[0].submod.up.weight.requires_grad_(rank == 1)
    schedule.step(x, target=y)


def test_twins_of_which_one_is_frozen_are_refused_on_all_ranks() -> None:
    for error in run_ranks(frozen_later, 2, expect_errors=True):
        assert isinstance(error, AgreementError) and "freeze the same of them" in str(error)


class Tied(nn.Module):
    """The first or the last stage of a model that has one weight twice."""

    def __init__(self, weight: nn.Parameter, *, is_last: bool) -> None:
        super().__init__()
        self.weight, self.is_last = weight, is_last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) @ self.weight.T if self.is_last else torch.tanh(x @ self.weight)


def tied_stages(rank: int, *, shares: bool = True) -> list[bpipe.PipelineStage]:
    """Chimera's on two ranks: each holds a first or last stage, and the twin of the other one, which share a weight."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
    other = weight if shares else nn.Parameter(weight.detach().clone())
    of_stage = {rank: Tied(weight, is_last=rank == 1), 3 - rank: Tied(other, is_last=rank == 0)}
    return [bpipe.PipelineStage(module, stage, 4, "cpu", directions=2) for stage, module in of_stage.items()]


def tied(rank: int) -> Any:
    stages, (x, y) = tied_stages(rank), batch(4)
    bpipe.Chimera(stages, 4, mse).step(x, target=y)
    norm = bpipe.clip_grad_norm_({one.stage_index: one.submod.parameters() for one in stages}, float("inf"))
    return stages[0].submod.weight.grad, norm


def test_a_weight_that_both_stages_of_a_rank_share_is_exchanged_and_counted_once() -> None:
    stages, (x, y) = tied_stages(0), batch(4)
    for xi, yi in zip(x.chunk(4), y.chunk(4)):
        (mse(torch.tanh(torch.tanh(xi @ stages[0].submod.weight)) @ stages[0].submod.weight.T, yi) / 4).backward()
    expected = stages[0].submod.weight.grad
    for gradient, norm in run_ranks(tied, 2):
        assert torch.allclose(gradient, expected, rtol=0, atol=1e-12)
        assert norm.item() == pytest.approx(expected.norm().item(), rel=1e-12)


def unequally_tied(rank: int) -> None:
    x, y = batch(4)
    bpipe.Chimera(tied_stages(rank, shares=rank == 0), 4, mse).step(x, target=y)


def test_twins_of_which_one_shares_a_weight_are_refused() -> None:
    for error in run_ranks(unequally_tied, 2, expect_errors=True):
        assert isinstance(error, AgreementError) and "are twins" in str(error)


def replaced(rank: int) -> None:
    stages, (x, y) = stages_on(bpipe.Chimera, 2, rank), batch(4)
    schedule = bpipe.Chimera(stages, 4, mse)
    schedule.step(x, target=y)
    torch.manual_seed(rank)
    stages[0].submod = Block().double()
    schedule.step(x, target=y)
    schedule.step(x, target=y)


def test_twins_whose_modules_are_replaced_by_different_ones_are_refused_in_the_next_step() -> None:
    for error in run_ranks(replaced, 2, expect_errors=True):
        assert isinstance(error, AgreementError) and "are twins, but their weights differ" in str(error)


def test_lazy_modules_are_refused() -> None:
    loopback = bpipe.Loopback(2)
    ranks = [
        [bpipe.PipelineStage(nn.LazyLinear(4), s, 4, "cpu", loopback.rank(r), directions=2) for s in (r, 3 - r)] for r in (0, 1)
    ]
    schedules = [bpipe.Chimera(of_rank, 2, mse) for of_rank in ranks]
    with pytest.raises(ConfigurationError, match="lazy module, whose weights its twin cannot have"):
        loopback.step(schedules, torch.zeros(2, 4), target=torch.zeros(2, 4))


def test_wrong_directions_are_refused() -> None:
    loopback = bpipe.Loopback(2)
    one_way = [bpipe.PipelineStage(Block(), stage, 4, "cpu", loopback.rank(0)) for stage in (0, 3)]
    with pytest.raises(ConfigurationError, match=r"chimera has 2 directions.*made for 1: give PipelineStage\(directions=2\)"):
        bpipe.Chimera(one_way, 2, mse)
    both = [bpipe.PipelineStage(Block(), stage, 4, "cpu", loopback.rank(0), directions=2) for stage in (0, 3)]
    with pytest.raises(ConfigurationError, match=r"zbv has 1 direction, and its stages were made for 2"):
        bpipe.ZBV(both, 2, mse)
    with pytest.raises(ConfigurationError, match=r"puts stages \[0, 3\] on one rank"):
        bpipe.Chimera([bpipe.PipelineStage(Block(), s, 4, "cpu", loopback.rank(0), directions=2) for s in (0, 1)], 2, mse)
    for directions, num_stages in ((3, 3), (2, 3), (0, 4)):
        with pytest.raises(ConfigurationError, match="directions="):
            bpipe.PipelineStage(Block(), 0, num_stages, "cpu", directions=directions)


def test_a_sparse_gradient_is_refused() -> None:
    loopback = bpipe.Loopback(2)

    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x)

    def module(stage: int) -> nn.Module:
        torch.manual_seed(stage % 2)
        return nn.Linear(WIDTH, WIDTH) if stage % 2 else Embedding()

    ranks = [[bpipe.PipelineStage(module(s), s, 4, "cpu", loopback.rank(r), directions=2) for s in (r, 3 - r)] for r in range(2)]
    schedules = [bpipe.Chimera(of_rank, 2, mse) for of_rank in ranks]
    with pytest.raises(StageError, match="sparse"):
        loopback.step(schedules, torch.zeros(2, dtype=torch.long), target=torch.zeros(2, WIDTH))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_gradients_of_earlier_steps_survive_a_failure(where: str) -> None:
    """They are back where they were when a step fails, in whatever place."""
    loopback = bpipe.Loopback(2)
    stages = [stages_on(bpipe.BitPipe, 2, rank, loopback.rank(rank)) for rank in range(2)]
    schedules = [bpipe.BitPipe(of_rank, 2, mse) for of_rank in stages]
    x, y = batch(2)
    loopback.step(schedules, x, target=y)
    before = {id(p): p.grad.clone() for of in stages for one in of for p in one.submod.parameters() if p.grad is not None}

    def failing(*_: Any) -> None:
        raise RuntimeError("no more")

    if where == "forward":
        stages[0][1].submod.register_forward_pre_hook(failing)
    else:  # the first stage's backward is the last of the step: others have been exchanged
        stages[0][0].submod.register_full_backward_pre_hook(failing)
    with pytest.raises(RuntimeError, match="no more"):
        loopback.step(schedules, x, target=y)
    for of_rank in stages:
        for one in of_rank:
            for p in one.submod.parameters():
                assert id(p) not in before or torch.equal(p.grad, before[id(p)])


def killed(rank: int) -> None:
    import os
    import signal

    stages = stages_on(bpipe.BitPipe, 2, rank)
    schedule = bpipe.BitPipe(stages, 4, mse, options=bpipe.Options(timeout_s=20.0))
    x, y = batch(4)
    schedule.step(x, target=y)
    if rank == 1:

        def stop(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        stages[-1].submod.register_full_backward_hook(stop)
    schedule.step(x, target=y)


def test_a_twin_that_dies_ends_the_step() -> None:
    with pytest.raises(RankError, match="RankLostError"):
        run_ranks(killed, 2)


def test_a_trace_has_the_exchanges() -> None:
    loopback = bpipe.Loopback(2)
    stages = [stages_on(bpipe.BitPipe, 2, rank, loopback.rank(rank)) for rank in range(2)]
    schedules = [bpipe.BitPipe(of_rank, 2, mse) for of_rank in stages]
    x, y = batch(2)
    with bpipe.trace(schedules) as traced:
        loopback.step(schedules, x, target=y)
    timeline = traced.gather()[0]
    for rank in range(2):
        spans = [span for span in timeline.spans(rank) if span.action.op is Op.REDUCE_GRAD]
        assert len(spans) == 4 and all(span.end_s >= span.begin_s for span in spans)


def test_what_cuts_models_by_itself_refuses_two_directions() -> None:
    from bpipe.torchtitan import pipelining_fn

    with pytest.raises(ConfigurationError, match="BitPipe holds every stage twice"):
        pipelining_fn(bpipe.BitPipe)
    layers = bpipe.measure_layers(nn.Sequential(*(nn.Linear(4, 4) for _ in range(8))), torch.zeros(2, 4))
    with pytest.raises(ConfigurationError, match="bitpipe holds every stage twice"):
        bpipe.choose_stages(layers, 8, 4, schedule="bitpipe")
