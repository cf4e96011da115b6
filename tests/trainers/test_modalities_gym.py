"""Modalities 0.5.0's own gym, a small trainer: with its import changed it trains as with torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(find_spec("modalities") is None, reason="modalities is not installed here: make test-trainers")

STEPS, NUM_PARAMETERS = 4, 101
ROUNDING = {"rtol": 1e-3, "atol": 1e-4}  # gradients that are added in another order, and four steps of AdamW


@pytest.mark.parametrize(
    ("schedule", "layers_per_stage", "tolerance"),
    [
        ("1F1B", 4, {"rtol": 0.0, "atol": 0.0}),
        ("GPipe", 4, {"rtol": 0.0, "atol": 0.0}),
        ("Interleaved1F1B", 2, {"rtol": 0.0, "atol": 0.0}),
        ("ZBVZeroBubble", 2, ROUNDING),
    ],
)
def test_the_gym_with_its_import_changed(
    in_ranks: Callable[..., list[Any]], schedule: str, layers_per_stage: int, tolerance: dict[str, float]
) -> None:
    how = {"schedule": schedule, "layers_per_stage": layers_per_stage}
    expected = in_ranks("tests.trainers.gym.train", 2, STEPS, **how)
    found = in_ranks("tests.trainers.gym.train", 2, STEPS, **how, way="import")
    assert all(rank["class"].startswith("bpipe.") for rank in found)
    assert sum(len(rank["parameters"]) for rank in found) == NUM_PARAMETERS
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours["losses"]) == STEPS + STEPS // 2  # of training and of evaluation
        torch.testing.assert_close(ours["losses"], theirs["losses"], **tolerance)
        torch.testing.assert_close(ours["parameters"], theirs["parameters"], **tolerance)
