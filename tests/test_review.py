"""Inputs that once ended wrong: each of these was found by a reader, not by a test."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError, SavedTensorError, StageError
from tests.models import mse
from tests.ranks import run_ranks

WIDTH, P, M = 8, 4, 8


def pipeline(modules: list[nn.Module], schedule: type[bpipe.Schedule] = bpipe.BalancedOneFOneB, **options: Any) -> Any:
    loopback = bpipe.Loopback(len(modules))
    stages = [bpipe.PipelineStage(module, i, len(modules), "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    return loopback, [schedule(stage, M, **{"loss_fn": mse, **options}) for stage in stages]


class Counting(nn.Linear):
    """Returns a buffer that it goes on changing."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        return super().forward(x), self.count


class Adding(nn.Linear):
    def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + count


@pytest.mark.parametrize("schedule", [bpipe.GPipe, bpipe.OneFOneB])
def test_an_output_that_the_stage_goes_on_changing(schedule):
    torch.manual_seed(0)
    modules = [Counting(), Adding(WIDTH, WIDTH)]
    loopback, schedules = pipeline(modules, schedule)
    x = torch.randn(M, WIDTH)
    output = loopback.eval(schedules, x)
    with torch.no_grad():
        expected = [modules[1](nn.Linear.forward(modules[0], xi), torch.tensor([i + 1.0])) for i, xi in enumerate(x.split(1))]
    assert torch.equal(output, torch.cat(expected))


class Peeking(nn.Linear):
    """Keeps a saved tensor that it got back from the graph."""

    kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().forward(x))
        self.kept = y.grad_fn._saved_result
        return y * y


def test_a_saved_tensor_that_the_user_took_from_the_graph_stays():
    loopback, schedules = pipeline([Peeking(WIDTH, WIDTH) for _ in range(P)])
    x = torch.randn(M, WIDTH)
    for _ in range(2):
        loopback.step(schedules, x, target=x)
        assert schedules[0].session.context.stages[0].submod.kept.abs().sum() > 0


def test_one_rank_without_a_group_draws_the_global_random_numbers():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(module, 0, 1, "cpu"), 2, loss_fn=mse)
    x = torch.ones(4, WIDTH)
    outputs = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed)
        outputs.append(schedule.step(x, target=x))
    assert torch.equal(outputs[0], outputs[2])
    assert not torch.equal(outputs[0], outputs[1])


def crossed(rank: int) -> str:
    pipelines = [bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), rank, 2, "cpu"), 2, loss_fn=mse) for _ in range(2)]
    try:
        pipelines[rank].step(torch.ones(2, 2), target=torch.ones(2, 2))
    except bpipe.errors.AgreementError as error:
        return str(error)
    return "no error"


def test_two_pipelines_stepped_in_crossed_order():
    message = "the ranks disagree on which of the group's pipelines this is: rank 0 has 1, rank 1 has 2"
    assert all(text.startswith(message) for text in run_ranks(crossed, 2))


def only_looked_at(rank: int) -> bool:
    stage = bpipe.PipelineStage(nn.Linear(2, 2), rank, 2, "cpu")
    if rank == 0:
        assert bpipe.BalancedOneFOneB(stage, 2).plan.peak_slots == (2, 1)
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=mse)
    schedule.step(torch.ones(2, 2), target=torch.ones(2, 2))
    return True


def test_a_schedule_that_one_rank_made_only_to_look_at():
    assert run_ranks(only_looked_at, 2) == [True, True]


def test_eval_in_inference_mode():
    loopback, schedules = pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    x = torch.randn(M, WIDTH)
    with torch.inference_mode():
        output = loopback.eval(schedules, x)
    assert torch.equal(output, loopback.eval(schedules, x))
    loopback.step(schedules, x, target=x)


def test_a_device_may_be_named_with_its_index():
    loopback = bpipe.Loopback(P)
    stages = [bpipe.PipelineStage(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), i, P, "cpu:0", loopback.rank(i)) for i in range(P)]
    schedules = [bpipe.BalancedOneFOneB(stage, M, loss_fn=mse) for stage in stages]
    loopback.step(schedules, torch.ones(M, 4), target=torch.ones(M, 4))
    assert schedules[0].stats["evicted_bytes"] > 0


def test_closing_leaves_the_user_s_error_whole():
    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("no")

    schedule = bpipe.OneFOneB(bpipe.PipelineStage(Failing(4, 4), 0, 1, "cpu"), 2, loss_fn=mse)
    with pytest.raises(ValueError, match="no") as caught, contextlib.closing(schedule):
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
    assert caught.traceback[-1].name == "forward"


def test_microbatches_that_are_no_tuples():
    loopback, schedules = pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    x = list(torch.randn(M, 1, WIDTH))
    with pytest.raises(ConfigurationError, match=r"arg_mbs needs one tuple for each microbatch.*got Tensor"):
        loopback.step(schedules, arg_mbs=x, target_mbs=x)


def test_an_input_with_a_graph():
    loopback, schedules = pipeline([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
    x = torch.randn(M, WIDTH, requires_grad=True)
    with pytest.raises(ConfigurationError, match="is part of an autograd graph"):
        loopback.step(schedules, x * 2, target=x.detach())


class Named(nn.Linear):
    def forward(self, x: torch.Tensor, *, args: int = 0, is_training: int = 0) -> torch.Tensor:
        return super().forward(x) * (args + is_training)


def test_keyword_arguments_named_like_ours():
    loopback, schedules = pipeline([Named(WIDTH, WIDTH) for _ in range(2)])
    x = torch.randn(M, WIDTH)
    assert loopback.step(schedules, x, target=x, args=1, is_training=2).shape == x.shape


class Modal(nn.Linear):
    """Returns one thing more while it trains."""

    def forward(self, x: Any) -> Any:
        y = super().forward(x["y"] if isinstance(x, dict) else x)
        return {"y": y, "more": y * 2} if self.training else {"y": y}


def test_modes_and_frozen_parameters_may_change_between_steps():
    modules = [Modal(WIDTH, WIDTH) for _ in range(3)] + [nn.Sequential(Modal(WIDTH, WIDTH), Unwrapped())]
    loopback, schedules = pipeline(modules)
    x = torch.randn(M, WIDTH)

    def step(change: Any) -> None:
        for module in modules:
            change(module)
        with torch.no_grad():
            expected = torch.cat([nn.Sequential(*modules)(xi) for xi in x.split(1)])
        assert torch.equal(loopback.step(schedules, x, target=x), expected)

    changes = [lambda module: module.eval(), lambda module: module.train(), lambda module: modules[0].requires_grad_(False)]
    for change in (lambda module: None, *changes, lambda module: module.requires_grad_(True)):
        step(change)
    with torch.autocast("cpu", torch.bfloat16):
        loopback.step(schedules, x, target=x)


class Unwrapped(nn.Module):
    def forward(self, x: Any) -> torch.Tensor:
        return x["y"]


class Running(nn.Linear):
    """Replaces its buffer in each forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().forward(x))
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return torch.tanh(y)


def test_a_replaced_buffer_does_not_lend_its_address_to_an_activation():
    loopback, schedules = pipeline([Running() for _ in range(P)])
    x = torch.randn(4 * M, WIDTH)
    for _ in range(3):
        loopback.step(schedules, x, target=x)
    stats = schedules[0].stats
    assert stats["peak_bytes"] == stats["predicted_peak_bytes"] == 3 * 2 * 4 * WIDTH * 4  # two activations of four rows each
    assert stats["evicted_bytes"] == 3 * 2 * 4 * WIDTH * 4


def test_a_loss_that_is_a_view_does_not_keep_its_base():
    loopback, schedules = pipeline(
        [nn.Linear(WIDTH, WIDTH) for _ in range(2)], loss_fn=lambda y, t: ((y - t) ** 2).cumsum(0)[-1, -1]
    )
    x, losses = torch.randn(4 * M, WIDTH), []
    loopback.step(schedules, x, target=x, losses=losses)
    assert all(loss.untyped_storage().nbytes() == 4 for loss in losses)


def test_what_a_failed_step_held_is_free_after_close():
    import gc
    import weakref

    class Failing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            seen.append(weakref.ref(y))
            raise ValueError("no")

    seen: list[Any] = []
    loopback, schedules = pipeline([nn.Linear(WIDTH, WIDTH), Failing(WIDTH, WIDTH)])
    x = torch.randn(M, WIDTH)
    with pytest.raises(ValueError, match="no"):
        loopback.step(schedules, x, target=x)
    for schedule in schedules:
        schedule.close()
    gc.collect()
    assert seen[0]() is None


def test_changing_what_was_sent_is_refused():
    kept: list[torch.Tensor] = []

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kept:
                kept[-1].detach().add_(1)
            kept.append(super().forward(x))
            return kept[-1]

    loopback, schedules = pipeline([Late(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)], bpipe.GPipe)
    x = torch.randn(M, WIDTH)
    with pytest.raises((StageError, SavedTensorError), match="modified in place"):
        loopback.step(schedules, x, target=x)


def test_more_kinds_of_microbatches_than_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was measured first is in flight again, beside a new one."""
    monkeypatch.setattr(bpipe.engine.remembered, "REMEMBERED_KINDS", 8)
    loopback = bpipe.Loopback(2)
    stages = [bpipe.PipelineStage(nn.Linear(4, 4), rank, 2, "cpu", loopback.rank(rank)) for rank in range(2)]
    schedules = [bpipe.ZBH1(stage, 2, loss_fn=mse) for stage in stages]
    for lengths in [(n, n + 1) for n in range(1, 9, 2)] + [(1, 9), (10, 11), (12, 2)]:
        rows = [torch.ones(1, length, 4) for length in lengths]
        loopback.step(schedules, arg_mbs=[(row,) for row in rows], target_mbs=rows, return_outputs=False)
    assert len(schedules[0].session.context.memory.kinds) <= 8 + 2


class Nested(nn.Linear):
    """Raises an error of bpipe's own in a step, as a pipeline inside a stage may."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise bpipe.errors.AgreementError("of another pipeline")
        return super().forward(x)


def nested(rank: int) -> tuple[str, str]:
    schedule = bpipe.OneFOneB(
        bpipe.PipelineStage((Nested if rank else nn.Linear)(2, 2), rank, 2, "cpu"),
        2,
        loss_fn=mse,
        options=bpipe.Options(timeout_s=20),
    )
    x, told = torch.ones(2, 2), []
    schedule.step(x, target=x)
    for _ in range(2):
        try:
            schedule.step(x, target=x)
        except bpipe.errors.BPipeError as error:
            told.append(type(error).__name__)
    return tuple(told)


def test_an_error_of_bpipe_s_in_the_user_s_code_breaks_like_any_other():
    assert run_ranks(nested, 2) == [("RankFailedError", "PipelineBrokenError"), ("AgreementError", "PipelineBrokenError")]


def ends_in_a_fork(rank: int) -> tuple[int, float]:
    """A child that a rank forks ends normally: the parent's pipeline goes on."""
    schedule = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), rank, 2, "cpu"), 2, loss_fn=mse)
    x = torch.ones(2, 2)
    schedule.step(x, target=x)
    child = os.fork()
    if not child:
        schedule.close()
        del schedule
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    schedule.step(x, target=x)
    return status, float(schedule.stats["step_s"] > 0)


def test_a_forked_child_has_no_part_in_the_pipeline():
    assert run_ranks(ends_in_a_fork, 2) == [(0, 1.0)] * 2


def drifts(rank: int) -> list[str]:
    """One rank has made a schedule that the other has not, and keeps it: refused, until both build again."""

    def schedule_of() -> bpipe.Schedule:
        return bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(2, 2), rank, 2, "cpu"), 2, loss_fn=mse)

    kept, told = [schedule_of() for _ in range(rank)], []
    x = torch.ones(2, 2)
    for _ in range(2):
        schedule = schedule_of()
        try:
            schedule.step(x, target=x)
            told.append("exact")
        except bpipe.errors.AgreementError:
            told.append("refused")
        schedule.close()
    assert len(kept) == rank
    return told


def test_ranks_that_have_made_other_numbers_of_pipelines_find_together_again():
    assert run_ranks(drifts, 2) == [["refused", "exact"]] * 2
