"""Mixed precision: a single process's gradients to the bit, cast copies of weights that stay, and peaks as predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.models import TOKENS, WIDTH, Block, Result, as_rank, batch_of, held_by, modules_of, mse
from tests.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

P, M = 4, 8
Modules = Sequence[nn.Module]
Precision = Callable[[], AbstractContextManager[Any]]
AUTOCAST: dict[str, Precision] = {
    "bfloat16": partial(torch.autocast, "cpu", torch.bfloat16),
    "float16": partial(torch.autocast, "cpu", torch.float16),
    "bfloat16 without a cache": partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False),
}
ONE_STAGE = {
    "1f1b": bpipe.OneFOneB,
    "balanced": bpipe.BalancedOneFOneB,
    "halves": bpipe.ZBH2,
    "halves evicted": partial(bpipe.ZBH2, options=bpipe.Options(slots=(6, 7, 7, 8))),
    "in bytes": lambda *args, **options: bpipe.Balanced(bpipe.OneFOneB(*args, **options), budget="lowest"),
    "in parts": lambda *args, **options: bpipe.Balanced(
        bpipe.OneFOneB(*args, **options), budget="lowest", options=bpipe.Options(parts=4)
    ),
}
TWO_STAGES = [bpipe.Interleaved1F1B, bpipe.BreadthFirst, bpipe.ZBV]


def alone(modules: Modules, precision: Precision, steps: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """A single process under one context of autocast a step, as around `schedule.step`; the losses of the last step."""
    for step in range(steps):
        x, target = batch_of("quiet", 2 * M, step)
        losses = []
        with precision():
            for xi, yi in zip(x.to(dtype).chunk(M), target.chunk(M)):
                loss = mse(nn.Sequential(*modules)(xi), yi)
                (loss / M).backward()
                losses.append(loss.detach())
    return losses


def in_loopback(modules: Modules, schedules_of: Any, precision: Precision, steps: int, *, dtype: torch.dtype) -> Any:
    """The same over four ranks: losses and schedules."""
    loopback, num_stages = bpipe.Loopback(P), len(modules)
    held = held_by(schedules_of, P, num_stages) if num_stages > P else [[rank] for rank in range(P)]
    schedules = [
        schedules_of([bpipe.PipelineStage(modules[i], i, num_stages, "cpu", loopback.rank(rank)) for i in of_rank], M, loss_fn=mse)
        for rank, of_rank in enumerate(held)
    ]
    losses: list[torch.Tensor] = []
    for step in range(steps):
        x, target = batch_of("quiet", 2 * M, step)
        with precision():
            loopback.step(schedules, x.to(dtype), target=target, losses=losses)
        assert all(schedule.stats["peak_bytes"] == schedule.stats["predicted_peak_bytes"] for schedule in schedules)
    return losses, schedules


def check(
    make: Callable[[], Modules], schedules_of: Any, precision: Precision = nullcontext, dtype: torch.dtype = torch.float32
) -> Any:
    """Two steps, which add their gradients up, and the schedules that made them."""
    expected, modules = make(), make()
    losses_alone = alone(expected, precision, 2, dtype=dtype)
    losses, schedules = in_loopback(modules, schedules_of, precision, 2, dtype=dtype)
    assert all(map(torch.equal, losses, losses_alone)) and len(losses) == M
    for ours, theirs in zip(modules, expected, strict=True):
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters(), strict=True))
    return schedules


@pytest.mark.parametrize(
    "precision, name",
    [*(("bfloat16", name) for name in ONE_STAGE), ("float16", "balanced"), ("bfloat16 without a cache", "balanced")],
)
def test_autocast_around_a_step(precision: str, name: str) -> None:
    """The copies of weights that autocast keeps belong to all microbatches: none of them moves."""
    schedules = check(lambda: modules_of("quiet", P), ONE_STAGE[name], AUTOCAST[precision])
    copied_bytes = sum(2 * p.numel() for p in modules_of("quiet", 1)[0].parameters() if p.dim() == 2)
    assert all(schedule.stats["held_bytes"] == ("without" not in precision) * copied_bytes for schedule in schedules)
    assert bool(schedules[0].stats["evicted_bytes"]) == (name not in ("1f1b", "halves"))


@pytest.mark.parametrize("schedule", TWO_STAGES, ids=lambda schedule: schedule.rule)
def test_autocast_around_a_step_of_two_stages_a_rank(schedule: type[bpipe.Schedule]) -> None:
    check(lambda: modules_of("quiet", 2 * P), schedule, AUTOCAST["bfloat16"])


def in_processes(rank: int) -> list[Result]:
    with torch.autocast("cpu", torch.bfloat16):
        return [as_rank(rank, "quiet", P, M, schedule, 1, {}) for schedule in (bpipe.BalancedOneFOneB, bpipe.ZBH1)]


def test_autocast_around_a_step_in_processes() -> None:
    expected = modules_of("quiet", P)
    losses = alone(expected, AUTOCAST["bfloat16"], 1, dtype=torch.float32)
    for result in (one for of_rank in run_ranks(in_processes, P) for one in of_rank):
        gradients = [p.grad for p in expected[result.stages[0]].parameters()]
        assert all(map(torch.equal, result.gradients[0], gradients))
        assert not result.losses or all(map(torch.equal, result.losses, losses))


def halved(make: Callable[[int], nn.Module]) -> Modules:
    torch.manual_seed(0)
    return [make(stage).bfloat16() for stage in range(P)]


@pytest.mark.parametrize("name", ONE_STAGE)
def test_pure_bfloat16(name: str) -> None:
    schedules = check(lambda: halved(lambda _: Block(dropout=0.0)), ONE_STAGE[name], dtype=torch.bfloat16)
    assert bool(schedules[0].stats["evicted_bytes"]) == (name not in ("1f1b", "halves"))


class _Multiply(torch.autograd.Function):
    """A product that keeps its input in eight bits, and the scale of each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
        small = (x / scale).to(torch.float8_e4m3fn)
        ctx.save_for_backward(small, scale, weight)
        return (small.float() * scale) @ weight.T

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        small, scale, weight = ctx.saved_tensors
        rows = gradient.to(torch.float8_e5m2).float().flatten(0, 1)
        return gradient @ weight, rows.T @ (small.float() * scale).flatten(0, 1)


class Float8(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = _Multiply.apply(x, weight)
        return x


def eights() -> Modules:
    torch.manual_seed(0)
    return [Float8() for _ in range(P)]


@pytest.mark.parametrize("name", ONE_STAGE)
def test_storages_of_eight_bits_move(name: str) -> None:
    """And nothing else is left to move: three inputs a microbatch, and the scales of their rows."""
    schedules = check(eights, ONE_STAGE[name])
    if name == "balanced":
        a_microbatch = 3 * 2 * TOKENS * (WIDTH + 4)
        assert schedules[0].stats["evicted_bytes"] % a_microbatch == 0 and schedules[0].stats["evicted_bytes"] > 0
        assert schedules[0].stats["peak_bytes"] == 3 * a_microbatch
