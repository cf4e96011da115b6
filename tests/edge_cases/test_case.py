"""The harness itself: a plain case passes under every schedule, and one that differs by a bit fails."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.edge_cases.case import NUM_STAGES, SCHEDULES, Batch, Case, M
from tests.models import Block, batch_of

pytestmark = pytest.mark.usefixtures("one_thread")


def batch(step: int) -> Batch:
    x, y = batch_of("quiet", M, step)
    return Batch((x,), y)


def test_blocks_equal_a_single_process_under_every_schedule():
    Case(lambda: [Block(dropout=0.0) for _ in range(NUM_STAGES)], batch, F.mse_loss).check()


class Counting(nn.Module):
    """Scales by the number of forwards that all stages of the process have run: not the same on a rank as in one process."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block(dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.count += 1
        return self.inner(x) * (1 + Counting.count % 7)


def test_a_case_that_differs_is_noticed():
    with pytest.raises(AssertionError):
        Case(lambda: [Counting() for _ in range(NUM_STAGES)], batch, F.mse_loss).check(["gpipe"])


def test_all_schedules_of_the_promise_are_here():
    assert len(SCHEDULES) == 12
