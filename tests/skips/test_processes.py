"""Skips over processes joined by gloo."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from tests.ranks import run_ranks
from tests.skips.models import KINDS, gradients_by_itself, model_of
from tests.skips.test_equality import assert_close

M = 8


def in_bytes(*args: Any, **kwargs: Any) -> bpipe.Schedule:
    return bpipe.Balanced(bpipe.OneFOneB(*args, **kwargs), budget="lowest")


CLASSES: dict[str, tuple[Any, int]] = {
    "1f1b": (bpipe.OneFOneB, 1),
    "balanced": (bpipe.BalancedOneFOneB, 1),
    "in bytes": (in_bytes, 1),
    "zbv": (bpipe.ZBV, 2),
}


def on_rank(rank: int, p: int, kind: str, name: str) -> dict[int, list[torch.Tensor | None]]:
    """The gradients of two steps, by stage."""
    cls, v = CLASSES[name]
    model, num_stages = model_of(kind, p * v, 2 * M), p * v
    held = [rank] if v == 1 else [rank, num_stages - 1 - rank]
    stages = [bpipe.PipelineStage(model.stages[i], i, num_stages, "cpu", skips=model.skips) for i in held]
    schedule = cls(stages if v > 1 else stages[0], M, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        schedule.step(model.x, target=model.target, return_outputs=False, **model.kwargs)
    if name == "balanced" and rank == 0 and p == 4:
        assert schedule.stats["evicted_bytes"] > 0
    if name == "in bytes":
        assert schedule.stats["device_peak_bytes"] == schedule.stats["predicted_device_peak_bytes"]
    return {i: [parameter.grad for parameter in model.stages[i].parameters()] for i in held}


CASES = list(product((2, 4), KINDS, CLASSES))


@pytest.mark.parametrize(("p", "kind", "name"), CASES)
def test_processes_train_as_a_single_one(p: int, kind: str, name: str) -> None:
    model = model_of(kind, p * CLASSES[name][1], 2 * M)
    gradients_by_itself(model, M)
    expected = gradients_by_itself(model, M)  # added up over two steps
    found = {stage: gradients for of_rank in run_ranks(on_rank, p, p, kind, name) for stage, gradients in of_rank.items()}
    assert_close([gradient for stage in sorted(found) for gradient in found[stage]], expected)
