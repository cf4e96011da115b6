"""Bad input ends in a clear error on every rank, before anything is sent wherever that can be known."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import AgreementError, BPipeError, BudgetError, ConfigurationError, PipelineBrokenError, StageError
from tests.models import Recurrent, mse
from tests.ranks import run_ranks

WIDTH = 8


def pipeline(p: int = 2, m: int = 2, last: nn.Module | None = None, **options: Any) -> tuple[bpipe.Loopback, list[bpipe.Schedule]]:
    loopback = bpipe.Loopback(p)
    modules = [nn.Linear(WIDTH, WIDTH) for _ in range(p - 1)] + [last or nn.Linear(WIDTH, WIDTH)]
    stages = [bpipe.PipelineStage(module, i, p, "cpu", loopback.rank(i)) for i, module in enumerate(modules)]
    return loopback, [bpipe.OneFOneB(stage, m, **{"loss_fn": mse, **options}) for stage in stages]


def test_construction_refuses_what_it_can():
    linear = nn.Linear(2, 2)
    for arguments, message in (
        ((linear, 4, 4, "cpu"), "stage_index=4: with 4 stages it is 0 to 3"),
        ((linear, -1, 4, "cpu"), "stage_index=-1"),
        ((linear, 0, 0, "cpu"), "num_stages=0"),
        (("linear", 0, 1, "cpu"), "needs an nn.Module, got str"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(message)):
            bpipe.PipelineStage(*arguments)
    with pytest.raises(ConfigurationError, match="not initialised"):
        bpipe.OneFOneB(bpipe.PipelineStage(linear, 0, 2, "cpu"), 2)
    stage = bpipe.PipelineStage(linear, 0, 4, "cpu", bpipe.Loopback(4).rank(0))
    with pytest.raises(ConfigurationError, match="num_microbatches=0"):
        bpipe.OneFOneB(stage, 0)
    with pytest.raises(BudgetError, match="smallest budget that works here is slots=3"):
        bpipe.BalancedOneFOneB(stage, 8, options=bpipe.Options(slots=2))
    with pytest.raises(ConfigurationError, match="num_stages=4 with 1 on each rank needs 4 ranks, but the group has 3"):
        bpipe.OneFOneB(bpipe.PipelineStage(linear, 0, 4, "cpu", bpipe.Loopback(3).rank(0)), 8)
    with pytest.raises(ConfigurationError, match="needs a PipelineStage, got Linear"):
        bpipe.OneFOneB(linear, 8)


@pytest.mark.parametrize("size", [1, 3])
def test_a_batch_that_does_not_divide(size):
    loopback, schedules = pipeline()
    with pytest.raises(ConfigurationError, match=r"does not divide into 2 microbatches.*drop_last=True.*arg_mbs"):
        loopback.step(schedules, torch.randn(size, WIDTH), target=torch.randn(size, WIDTH))
    x = torch.randn(4, WIDTH)
    assert loopback.step(schedules, x, target=x).shape == x.shape  # nothing was sent: the pipeline is whole


def test_a_missing_target():
    loopback, schedules = pipeline()
    with pytest.raises(ConfigurationError, match="got no target"):
        loopback.step(schedules, torch.randn(2, WIDTH))


def test_gradients_switched_off():
    loopback, schedules = pipeline()
    with torch.no_grad(), pytest.raises(ConfigurationError, match=r"call eval\(\) instead"):
        loopback.step(schedules, torch.randn(2, WIDTH), target=torch.randn(2, WIDTH))


@pytest.mark.parametrize(
    "loss_fn, message",
    [
        (lambda y, t: (y - t) ** 2, "a tensor of shape [1, 8]"),
        (lambda y, t: 3.0, "returned float"),
        (lambda y, t: mse(y, t).detach(), "needs no gradient"),
    ],
)
def test_a_loss_that_is_none(loss_fn, message):
    loopback, schedules = pipeline(loss_fn=loss_fn)
    x = torch.randn(2, WIDTH)
    with pytest.raises(StageError, match=re.escape(message)) as caught:
        loopback.step(schedules, x, target=x)
    assert "rank 1, stage 1, microbatch 0, action 1F0, step 0" in caught.value.__notes__[0]
    with pytest.raises(PipelineBrokenError, match="broke in step 0"):
        loopback.step(schedules, x, target=x)


@pytest.mark.parametrize(
    "value, message",
    [
        (lambda x: {"a": [x, {1, 2}]}, r"returned a builtins.set at output['a'][1]"),
        (lambda x: x.to_sparse(), "layout torch.sparse_coo"),
        (lambda x: torch.return_types.max((x, x)), "torch.return_types.max"),
    ],
)
def test_a_stage_that_returns_something_unsendable(value, message):
    class Odd(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return value(super().forward(x))

    loopback = bpipe.Loopback(2)
    modules = [Odd(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    schedules = [
        bpipe.OneFOneB(bpipe.PipelineStage(module, i, 2, "cpu", loopback.rank(i)), 2, mse) for i, module in enumerate(modules)
    ]
    with pytest.raises(StageError, match=re.escape(message)):
        loopback.step(schedules, torch.randn(2, WIDTH), target=torch.randn(2, WIDTH))


class GrowingOutput(nn.Linear):
    """Returns another shape at its third call, for inputs of the same shape."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = super().forward(x)
        return torch.cat([y, y]) if self.calls > 2 else y


def test_an_output_that_changes_shape_is_refused_by_the_sender():
    loopback = bpipe.Loopback(2)
    modules = [GrowingOutput(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    schedules = [
        bpipe.OneFOneB(bpipe.PipelineStage(module, i, 2, "cpu", loopback.rank(i)), 2, mse) for i, module in enumerate(modules)
    ]
    x = torch.randn(2, WIDTH)
    loopback.step(schedules, x, target=x)
    with pytest.raises(
        StageError, match=re.escape('agreed "T" of (float32[1, 8], requires grad), got "T" of (float32[2, 8], requires grad)')
    ):
        loopback.step(schedules, x, target=x)


class InPlace(nn.Linear):
    """Changes what it saved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(super().forward(x))
        z = y * y
        y.add_(1)
        return z


@pytest.mark.parametrize("schedule", [bpipe.OneFOneB, bpipe.BalancedOneFOneB])
def test_a_saved_tensor_modified_in_place(schedule):
    loopback = bpipe.Loopback(4)
    stages = [bpipe.PipelineStage(InPlace(WIDTH, WIDTH), i, 4, "cpu", loopback.rank(i)) for i in range(4)]
    schedules = [schedule(stage, 8, mse) for stage in stages]
    x = torch.randn(8, WIDTH)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace)"):
        loopback.step(schedules, x, target=x)


def test_misuse_is_named():
    loopback, schedules = pipeline()
    x = torch.randn(2, WIDTH)
    with pytest.raises(ConfigurationError, match=r"call loopback.step\(schedules"):
        schedules[0].step(x)
    with pytest.raises(ConfigurationError, match="1 schedules for 2 ranks"):
        loopback.step(schedules[:1], x, target=x)
    with pytest.raises(ConfigurationError, match="losses= must be a list, which bpipe fills in place"):
        loopback.step(schedules, x, target=x, losses=())
    with pytest.raises(ConfigurationError, match="arg_mbs must be a list with one entry for each of 2 microbatches, got 3 entries"):
        loopback.step(schedules, arg_mbs=[(x,)] * 3, target=x)
    with pytest.raises(ConfigurationError, match="arg_mbs and the whole batch were both given"):
        loopback.step(schedules, x, arg_mbs=[(x,)] * 2, target=x)
    schedules[0].close()
    with pytest.raises(PipelineBrokenError, match="was closed"):
        loopback.step(schedules, x, target=x)


# Over processes: what one rank knows, all ranks are told.


def disagree(rank: int, what: str) -> str:
    index, m, p = rank, 4, 2
    if what == "microbatches":
        m += rank
    if what == "duplicate stage":
        index = 0
    schedule: Any = bpipe.GPipe if what == "schedule" and rank else bpipe.OneFOneB
    module = Recurrent() if what == "module" else nn.Linear(WIDTH, WIDTH)
    pipeline = schedule(bpipe.PipelineStage(module, index, p, "cpu"), m, loss_fn=mse)
    size = 5 if what == "batch" and rank == 0 else 20
    x = torch.randn(size, WIDTH)
    target = None if what == "target" and rank == 1 else torch.randn(20, WIDTH)
    try:
        pipeline.eval(x) if what == "mode" and rank else pipeline.step(x, target=target)
    except BPipeError as error:
        text = f"{type(error).__name__}: {error}"
    else:
        text = "no error"
    if what in ("batch", "target"):  # refused before anything was sent: the next step is as good as ever
        x = torch.randn(20, WIDTH)
        pipeline.step(x, target=x)
    return text


@pytest.mark.parametrize(
    "what, messages",
    [
        ("microbatches", ["the number of microbatches: rank 0 has 4, rank 1 has 5"] * 2),
        ("schedule", ["the schedule: rank 0 has 1f1b, rank 1 has gpipe"] * 2),
        ("mode", ["train or eval: rank 0 has train, rank 1 has eval"] * 2),
        ("duplicate stage", ["stage 0 is on two ranks, 0 and 1"] * 2),
        (
            "batch",
            ["ConfigurationError: args[0] of shape [5, 8]", "AgreementError: rank 0 cannot run this step: ConfigurationError"],
        ),
        (
            "target",
            ["AgreementError: rank 1 cannot run this step: ConfigurationError", "ConfigurationError: the last stage has a loss_fn"],
        ),
    ],
)
def test_disagreement_is_refused_on_every_rank(what, messages):
    for text, message in zip(run_ranks(disagree, 2, what), messages, strict=True):
        assert message in text


def missing(rank: int) -> str:
    pipeline = bpipe.OneFOneB(bpipe.PipelineStage(nn.Linear(WIDTH, WIDTH), [0, 1, 1][rank], 3, "cpu"), 3, loss_fn=mse)
    with pytest.raises(AgreementError) as caught:
        pipeline.step(torch.randn(3, WIDTH), target=torch.randn(3, WIDTH))
    return str(caught.value)


def test_a_missing_stage():
    assert set(run_ranks(missing, 3)) == {"stage 1 is on two ranks, 1 and 2: give each its own stage_index"}
