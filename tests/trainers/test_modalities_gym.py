"""Modalities 0.5.0's own gym, a small trainer: with its import changed it trains as with torch's own schedules."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch

if find_spec("modalities") is None:
    pytest.skip("modalities is not installed here: make test-trainers", allow_module_level=True)

STEPS, NUM_PARAMETERS = 4, 101
BITS = {"rtol": 0.0, "atol": 0.0}
# The norm that clips the gradients is added over other ranks; and key biases have none but rounding, which AdamW enlarges.
ROUNDING = {"rtol": 1e-3, "atol": 2e-4}
LAYERS_PER_STAGE = {"1F1B": 4, "GPipe": 4, "Interleaved1F1B": 2, "ZBVZeroBubble": 2}


@pytest.mark.parametrize(
    ("schedule", "reference", "tolerance"),
    [
        ("1F1B", "1F1B", BITS),
        ("GPipe", "GPipe", BITS),
        ("Interleaved1F1B", "Interleaved1F1B", BITS),
        ("ZBVZeroBubble", "1F1B", ROUNDING),  # in torch, an evaluation under ZBV fails: "can't steal_bwd_input"
    ],
)
def test_the_gym_with_its_import_changed(
    in_ranks: Callable[..., list[Any]], schedule: str, reference: str, tolerance: dict[str, float]
) -> None:
    def trained(name: str, way: str) -> dict[str, Any]:
        how = {"schedule": name, "layers_per_stage": LAYERS_PER_STAGE[name], "way": way}
        ranks = in_ranks("tests.trainers.gym.train", 2, STEPS, **how)
        parameters = {name: value for rank in ranks for name, value in rank["parameters"].items()}
        return {"losses": ranks[0]["losses"], "parameters": parameters, "classes": {rank["class"] for rank in ranks}}

    found, expected = trained(schedule, "import"), trained(reference, "torch")
    assert all(name.startswith("bpipe.") for name in found["classes"])
    assert len(found["losses"]) == STEPS + STEPS // 2  # of training and of evaluation
    assert len(found["parameters"]) == NUM_PARAMETERS
    for what in ("losses", "parameters"):
        torch.testing.assert_close(found[what], expected[what], **tolerance)
