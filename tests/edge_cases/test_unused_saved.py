"""What is saved for a result that nobody uses may be changed in place: torch asks only in the backward, and so do evictions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M, pipeline

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH, WIDE = 8, 24_000  # of one row: 96 KB, which move from where they lie
EVICTING = ("balanced_1f1b", "bytes", "parts", "zb_h2")
T = torch.Tensor


class Stage(nn.Module):
    """Returns its block's output, and one that no loss depends on."""

    def __init__(self, unused: Callable[[nn.Module, T], Any]) -> None:
        super().__init__()
        self.one, self.other, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), unused

    def forward(self, x: T, *rest: Any) -> Any:
        return x + torch.tanh(self.one(x)), self.unused(self, x)


def an_output(stage: Any, x: T) -> T:
    return stage.other(x).exp().add_(1)


def a_view_of_it(stage: Any, x: T) -> T:
    result = stage.other(x).exp()
    result[:, 1:].zero_()
    return result


def a_large_one(stage: Any, x: T) -> T:
    return (stage.other(x).sum() + torch.zeros(WIDE)).sigmoid().mul_(3).add_(1)


def an_operand(stage: Any, x: T) -> T:
    """Saved for two products, of which one is used: after the change it is saved again."""
    factor = stage.other(x).detach()
    product = stage.other(x) * factor
    factor.add_(1)
    return product


def one_of_the_stage_before(stage: Any, x: T) -> T:
    """The whole of what is saved for the unused output, after a checkpointed region made it."""
    result = checkpoint(stage.other, x, use_reentrant=False).exp()
    return result.add_(result.detach())


def within_the_stage(stage: Any, x: T) -> Any:
    """Alive by the graph alone, and read without one."""
    result = stage.other(x).tanh()
    result.mul_(0.5)
    return {"read": float(result.numel()), "unused": [result, result.detach()]}


UNUSED = [an_output, a_view_of_it, a_large_one, an_operand, one_of_the_stage_before, within_the_stage]


def batch(step: int) -> Batch:
    x, y = torch.randn(2, M, 3, WIDTH, generator=torch.Generator().manual_seed(step))
    return Batch((x,), y)


def loss_of_first(output: Any, target: T) -> T:
    return F.mse_loss(output[0], target)


@pytest.mark.parametrize("unused", UNUSED)
def test_what_is_changed_and_unused_is_no_error(unused: Callable[..., Any]) -> None:
    case = Case(lambda: [Stage(unused) for _ in range(NUM_STAGES)], batch, loss_of_first)
    case.check(tuple(SCHEDULES) if unused is an_output else EVICTING)


def test_what_is_changed_and_used_is_an_error() -> None:
    def loss_of_both(output: Any, target: T) -> T:
        return F.mse_loss(output[0] + output[1], target)

    for name in SCHEDULES:
        loopback, schedules = pipeline(SCHEDULES[name], [Stage(an_output) for _ in range(NUM_STAGES)], loss_of_both)
        with pytest.raises(RuntimeError, match="modified"):
            loopback.step(schedules, *batch(0).args, target=batch(0).target)
