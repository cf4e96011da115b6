"""Steps in a loop: shapes that change, uneven microbatches, eval in between, accumulation, shared stages, many forms of input."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.models import Block, mse, single_process
from tests.ranks import run_ranks

WIDTH, P, M = 32, 4, 8


def blocks() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Block(WIDTH, 4, 0.0) for _ in range(P)]


def loop_of(modules: list[nn.Module], schedule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB, **options: Any) -> Any:
    loopback = bpipe.Loopback(len(modules))
    stages = [bpipe.PipelineStage(module, i, len(modules), "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    return loopback, [schedule(stage, options.pop("m", M), **{"loss_fn": mse, **options}) for stage in stages]


def gradients(modules: list[nn.Module]) -> list[torch.Tensor]:
    return [p.grad.clone() for module in modules for p in module.parameters()]


def by_hand(modules: list[nn.Module], xs: list[torch.Tensor], ys: list[torch.Tensor], scale: float) -> list[torch.Tensor]:
    """Gradients of one process, microbatch by microbatch."""
    copies = copy.deepcopy(modules)
    for module in copies:
        module.zero_grad()
    for x, y in zip(xs, ys):
        (mse(nn.Sequential(*copies)(x), y) * scale).backward()
    return gradients(copies)


def data(sizes: list[int], tokens: int = 16) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(sum(sizes) + tokens)
    return tuple([torch.randn(size, tokens, WIDTH, generator=generator) for size in sizes] for _ in range(2))


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def steps_with_changing_shapes(modules: list[nn.Module], step: Any, mine: Any) -> None:
    """Train on batches of several shapes, in turns and each twice, uneven microbatches among them; compare every step."""
    even, shorter, uneven = data([2] * M), data([2] * M, tokens=8), data([1, 2, 3, 1, 2, 3, 1, 4])
    for xs, ys in (even, shorter, even, uneven, uneven, shorter):
        expected = by_hand(modules, xs, ys, 1 / M)
        for module in modules:
            module.zero_grad()
        if xs is uneven[0]:
            step(arg_mbs=[(x,) for x in xs], target_mbs=ys)
        else:
            step(torch.cat(xs), target=torch.cat(ys))
        assert same(mine(gradients(modules)), mine(expected))


def test_changing_shapes_in_a_loopback():
    modules = blocks()
    loopback, schedules = loop_of(modules)
    steps_with_changing_shapes(modules, lambda *args, **kwargs: loopback.step(schedules, *args, **kwargs), lambda grads: grads)
    assert schedules[0].stats["peak_slots"] == 3


def change_shapes(rank: int) -> None:
    modules = blocks()
    schedule = bpipe.BalancedOneFOneB(bpipe.PipelineStage(modules[rank], rank, P, "cpu"), M, loss_fn=mse)

    def step(*args: Any, **kwargs: Any) -> None:
        schedule.step(*args, **kwargs)
        for i, module in enumerate(modules):  # the others' parameters are not trained here
            for p in module.parameters():
                p.grad = p.grad if i == rank else torch.zeros_like(p)

    size = len(list(modules[0].parameters()))
    steps_with_changing_shapes(modules, step, lambda grads: grads[rank * size : (rank + 1) * size])


def test_changing_shapes_over_processes():
    run_ranks(change_shapes, P)


def test_two_steps_accumulate():
    modules = blocks()
    loopback, schedules = loop_of(modules)
    xs, ys = data([2] * M)
    loopback.step(schedules, torch.cat(xs), target=torch.cat(ys))
    once = gradients(modules)
    loopback.step(schedules, torch.cat(xs), target=torch.cat(ys))
    copies = blocks()
    for _ in range(2):
        for x, y in zip(xs, ys):
            (mse(nn.Sequential(*copies)(x), y) / M).backward()
    assert same(gradients(modules), gradients(copies))
    assert not same(gradients(modules), once)


def test_unscaled_gradients():
    modules = blocks()
    loopback, schedules = loop_of(modules, scale_grads=False)
    xs, ys = data([2] * M)
    expected = by_hand(modules, xs, ys, 1.0)
    loopback.step(schedules, torch.cat(xs), target=torch.cat(ys))
    assert same(gradients(modules), expected)


def test_an_input_that_needs_a_gradient_gets_the_parameters_scale():
    modules = blocks()
    loopback, schedules = loop_of(modules)
    xs, ys = data([2] * M)
    x, reference = (torch.cat(xs).requires_grad_() for _ in range(2))
    loopback.step(schedules, x, target=torch.cat(ys))
    for part, y in zip(reference.chunk(M), ys):
        (mse(nn.Sequential(*copy.deepcopy(modules))(part), y) / M).backward()
    assert torch.equal(x.grad, reference.grad)


def test_eval_in_between_changes_nothing():
    modules = blocks()
    loopback, schedules = loop_of(modules)
    xs, ys = data([2] * M)
    losses: list[torch.Tensor] = []
    with torch.no_grad():
        expected = torch.cat([nn.Sequential(*modules)(x) for x in xs])
    for _ in range(2):
        output = loopback.eval(schedules, torch.cat(xs), target=torch.cat(ys), losses=losses)
        assert torch.equal(output, expected)
        assert not output.requires_grad
        assert len(losses) == M
        assert torch.equal(loopback.eval(schedules, torch.cat(xs)), expected)  # a target is optional
        assert all(p.grad is None for module in modules for p in module.parameters())
        expected_gradients = by_hand(modules, xs, ys, 1 / M)
        loopback.step(schedules, torch.cat(xs), target=torch.cat(ys))
        assert same(gradients(modules), expected_gradients)
        for module in modules:
            module.zero_grad()


def test_several_schedules_share_stages():
    modules = blocks()
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    xs, ys = data([2] * M)
    for schedule, m in ((bpipe.OneFOneB, M), (bpipe.BalancedOneFOneB, M), (bpipe.GPipe, 2), (bpipe.BalancedOneFOneB, 4)):
        schedules = [schedule(stage, m, loss_fn=mse) for stage in stages]
        x, y = torch.cat(xs), torch.cat(ys)
        expected = by_hand(modules, list(x.chunk(m)), list(y.chunk(m)), 1 / m)
        for module in modules:
            module.zero_grad()
        loopback.step(schedules, x, target=y)
        assert same(gradients(modules), expected)


def test_without_a_loss_step_evaluates():
    modules = blocks()
    loopback, schedules = loop_of(modules, loss_fn=None)
    xs, _ = data([2] * M)
    assert loopback.step(schedules, torch.cat(xs)).shape == torch.cat(xs).shape
    assert all(p.grad is None for module in modules for p in module.parameters())


def test_outputs_that_nobody_asked_for_are_not_kept():
    loopback, schedules = loop_of(blocks())
    xs, ys = data([2] * M)
    assert loopback.step(schedules, torch.cat(xs), target=torch.cat(ys), return_outputs=False) is None


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, factor: torch.Tensor | None = None, *, power: int = 1) -> torch.Tensor:
        return torch.tanh(super().forward(x)) * (1.0 if factor is None else factor**power)


def test_keyword_arguments_reach_every_stage():
    torch.manual_seed(0)
    modules = [Scaled(WIDTH, WIDTH) for _ in range(P)]
    loopback, schedules = loop_of(modules)
    x, y, factor = torch.randn(2 * M, WIDTH), torch.randn(2 * M, WIDTH), torch.randn(2 * M, 1)
    losses: list[torch.Tensor] = []
    output = loopback.step(schedules, x, target=y, losses=losses, factor=factor, power=2)
    copies = copy.deepcopy(modules)
    for module in copies:
        module.zero_grad()
    expected = []
    for xi, yi, fi in zip(x.chunk(M), y.chunk(M), factor.chunk(M)):
        value = xi
        for module in copies:
            value = module(value, fi, power=2)
        (mse(value, yi) / M).backward()
        expected.append(value.detach())
    assert torch.equal(output, torch.cat(expected))
    assert same(gradients(modules), gradients(copies))


def test_loss_kwargs_are_passed_whole():
    seen = []

    def loss_fn(y: torch.Tensor, t: torch.Tensor, weight: float) -> torch.Tensor:
        seen.append(weight)
        return mse(y, t) * weight

    loopback, schedules = loop_of(blocks(), loss_fn=loss_fn)
    xs, ys = data([2] * M)
    loopback.step(schedules, torch.cat(xs), target=torch.cat(ys), loss_kwargs={"weight": 0.5})
    assert seen == [0.5] * M


def test_the_ledger_says_what_cannot_move_and_why():
    class Cached(nn.Linear):
        """Keeps a tensor that autograd saves too."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "cache"):
                self.cache = torch.ones(WIDTH)
            return super().forward(x) * self.cache

    loopback, schedules = loop_of([Cached(WIDTH, WIDTH) for _ in range(P)])
    x = torch.randn(2 * M, WIDTH)
    loopback.step(schedules, x, target=x)
    ledger = schedules[0].ledger
    (held,) = ledger.held
    assert held.shape == (WIDTH,)
    assert held.num_bytes == 4 * WIDTH == ledger.held_bytes == schedules[0].stats["held_bytes"]
    assert "outside the graph" in held.reason
    assert {h.reason for h in ledger.non_activations} == {"the step's batch"}
    assert {h.reason for h in schedules[1].ledger.non_activations} == {"a parameter"}
    assert schedules[0].stats["evicted_bytes"] == 0  # nothing else was saved on the first stage


def test_a_stage_s_module_may_be_replaced_before_the_first_step():
    modules = blocks()
    loopback = bpipe.Loopback(P)
    with torch.device("meta"):
        stages = [bpipe.PipelineStage(Block(WIDTH, 4, 0.0), i, P, "cpu", loopback.rank(i)) for i in range(P)]
    schedules = [bpipe.BalancedOneFOneB(stage, M, loss_fn=mse) for stage in stages]
    for stage, module in zip(stages, modules):
        stage.submod = module
    xs, ys = data([2] * M)
    expected = by_hand(modules, xs, ys, 1 / M)
    loopback.step(schedules, torch.cat(xs), target=torch.cat(ys))
    assert same(gradients(modules), expected)


def permuted(rank: int) -> list[torch.Tensor]:
    """Stages placed pair-adjacent: rank r holds another stage than r."""
    order = bpipe.pair_adjacent(4, 2)
    torch.manual_seed(0)
    modules = [nn.Sequential(Block(), Block()) for _ in range(4)]
    torch.manual_seed(1)
    stage = bpipe.PipelineStage(modules[order[rank]], order[rank], 4, "cpu")
    schedule = bpipe.BalancedOneFOneB(stage, 8, loss_fn=mse)
    from tests.models import batch_of

    for step in range(2):
        x, y = batch_of("transformer", 16, step)
        schedule.step(x, target=y)
    return [p.grad for p in modules[order[rank]].parameters()]


def test_ranks_may_hold_the_stages_in_any_order():
    results = run_ranks(permuted, 4)
    torch.set_num_threads(1)
    reference = single_process("transformer", 4, 8)
    for rank, stage in enumerate(bpipe.pair_adjacent(4, 2)):
        assert all(map(torch.equal, results[rank], reference.gradients[stage]))


@pytest.mark.parametrize("close", [True, False])
def test_groups_and_threads_are_given_back(close):
    assert run_ranks(many_pipelines, 2, close) == [True, True]


def many_pipelines(rank: int, close: bool) -> bool:
    import gc
    import threading

    def count() -> int:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("Threads"))

    def one() -> None:
        schedule = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(4, 4), rank, 2, "cpu"), 2, loss_fn=mse)
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
        if close:
            schedule.close()

    one()
    gc.collect()
    before = count(), threading.active_count()
    for _ in range(5):
        one()
    gc.collect()
    return count() <= before[0] + 1 and threading.active_count() == before[1]


def test_stats_are_plain_numbers_for_any_logger() -> None:
    loopback, schedules = loop_of(blocks())
    x = torch.randn(2 * M, 16, WIDTH)
    loopback.step(schedules, x, target=x)
    for schedule in schedules:
        assert all(type(name) is str and type(value) in (int, float) for name, value in schedule.stats.items())
        assert schedule.stats["step"] == 0
