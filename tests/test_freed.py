"""A step that a module of the user's ends early leaves nothing behind: no circle and no record keeps its tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.storages import StorageCount

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, WIDTH = 4, 4, 8
SKIPS = {"made": (0, 2, 3)}


class BrokenError(ArithmeticError):
    """What a stage raises."""


class Stage(nn.Module):
    """A layer that can be called in every way; it breaks in one microbatch, forward or backward."""

    def __init__(self, index: int, kind: str) -> None:
        super().__init__()
        self.index, self.kind, self.layer = index, kind, nn.Linear(WIDTH, WIDTH)
        self.breaks_at, self.in_backward, self.calls = -1, False, 0

    def forward(self, x: torch.Tensor, past: Any = (), made: torch.Tensor | None = None) -> Any:
        y = torch.tanh(self.layer(x if made is None else x + made)) + sum(kept.mean() for kept in past)
        if self.calls == self.breaks_at:
            if not self.in_backward:
                raise BrokenError
            y.register_hook(broken)
        self.calls += 1
        output: Any = (y, {"made": torch.tanh(y)}) if self.kind == "skips" and self.index == 0 else y
        if self.kind == "slices":
            return output, torch.sin(y)
        return (output, y.mean(0)) if self.kind == "local" and self.index < P - 1 else output


def broken(gradient: torch.Tensor) -> None:
    raise BrokenError


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target.mean(0)).pow(2).mean() if output.ndim == 1 else nn.functional.mse_loss(output, target)


KINDS: dict[str, Callable[..., bpipe.Schedule]] = {
    "evictions": lambda stages: bpipe.BalancedOneFOneB(stages, M, loss_fn=loss),
    "halves": lambda stages: bpipe.ZBH1(stages, M, loss_fn=loss),
    "recomputation": lambda stages: bpipe.Balanced(bpipe.OneFOneB(stages, M, loss_fn=loss), by="recompute"),
    "skips": lambda stages: bpipe.OneFOneB(stages, M, loss_fn=loss),
    "slices": lambda stages: bpipe.Seq1F1B(stages, M, loss_fn=loss, slices=2),
    "local": lambda stages: bpipe.LocalLearning(stages, M, loss_fn=loss),
}


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_leaves_no_tensor_of_the_step(kind: str, in_backward: bool) -> None:
    torch.manual_seed(0)
    modules, loopback = [Stage(index, kind) for index in range(P)], bpipe.Loopback(P)
    skips = SKIPS if kind == "skips" else {}
    schedules = [
        KINDS[kind](bpipe.PipelineStage(module, i, P, "cpu", loopback.rank(i), skips=skips)) for i, module in enumerate(modules)
    ]
    x = torch.randn(2 * M, 4, WIDTH) if kind == "slices" else torch.randn(2 * M, WIDTH)
    count = StorageCount()
    for step in range(2):
        modules[1].calls, modules[1].in_backward = 0, in_backward
        modules[1].breaks_at = 2 if step else -1
        with without_collector(), count.mode():
            try:
                loopback.step(schedules, x, target=x, return_outputs=False)
            except BrokenError:
                assert step
                for schedule in schedules:
                    schedule.close()  # until then the pipeline keeps the error, to say why it is broken
            else:
                assert not step
        buffers = sum(schedule.stats["remote_buffer_bytes"] for schedule in schedules if not step)
        users = [one for module in modules for p in module.parameters() for one in (p, p.grad) if one is not None]
        assert count.live_bytes(without=[x, *users]) == buffers
