"""torchtitan 0.3.0's own trainer under bpipe trains as under torch's own schedules: to the bit where the order is the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed here: make test-trainers", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)
STEPS, NUM_PARAMETERS = 4, 45
Train = Callable[..., dict[str, Any]]
Found = dict[str, Any]
UNCLIPPED = {"training.max_norm": 1e9}  # the sum of all squares is rounded as stages lie on ranks
BITS = {"rtol": 0.0, "atol": 0.0}


@pytest.fixture(scope="module")
def train(in_ranks: Callable[..., list[Any]], workplace: Path) -> Train:
    """Train in ranks, once for the same arguments but for checkpoints, and return what all ranks found together."""
    known: dict[str, Found] = {}

    def trained(num_ranks: int = 4, steps: int = STEPS, **how: Any) -> Found:
        key = repr((num_ranks, steps, sorted(how.items())))
        if key not in known or "checkpoints" in how:
            known[key] = _together(in_ranks("tests.trainers.titan.train", num_ranks, workplace, steps, **how))
        return known[key]

    return trained


def _together(ranks: list[Found]) -> Found:
    """Return the losses of a rank that has the last stage, and the parameters of all."""
    last = next(rank for rank in ranks if rank["losses"][0] != -1.0)
    parameters = {name: value for rank in ranks for name, value in rank["parameters"].items()}
    return {**last, "parameters": parameters, "classes": {rank["class"] for rank in ranks}}


def check_same(found: Found, reference: Found) -> None:
    """Compare the losses, those of validation, and all parameters."""
    assert all(name.startswith("bpipe.") for name in found["classes"])
    assert len(reference["losses"]) == STEPS and len(reference["validation"]) == 3
    assert len(found["parameters"]) == len(reference["parameters"]) == NUM_PARAMETERS
    assert found["losses"][-1] < found["losses"][0] - 0.5, "nothing was learned"
    for what in ("losses", "validation", "parameters"):
        torch.testing.assert_close(found[what], reference[what], **BITS)


@pytest.mark.parametrize(
    ("schedule", "options", "reference"),
    [
        ("OneFOneB", {}, "1F1B"),
        ("BalancedOneFOneB", {}, "1F1B"),
        ("OneFOneB", {"balanced": {"budget": "lowest"}}, "1F1B"),
        ("OneFOneB", {"balanced": {"budget": "auto"}}, "1F1B"),
        ("OneFOneB", {"auto": {}}, "1F1B"),
        ("Interleaved1F1B", {}, "Interleaved1F1B"),
    ],
)
def test_pipelining_fn_gives_the_bits_of_torch(train: Train, schedule: str, options: dict[str, Any], reference: str) -> None:
    check_same(train(degree=4, way="function", schedule=schedule, options=options), train(degree=4, schedule=reference))


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe", "Interleaved1F1B"])
def test_torchtitans_pipeline_code_with_its_import_changed(train: Train, schedule: str) -> None:
    check_same(train(degree=4, way="import", schedule=schedule), train(degree=4, schedule=schedule))


@pytest.mark.parametrize("schedule", ["LoopedBFS", "InterleavedZeroBubble"])
def test_schedules_that_round_otherwise_in_torch(train: Train, schedule: str) -> None:
    """bpipe adds gradients in one order. In float32, torch's LoopedBFS is up to 2e-7 away after two steps, the other 1e-3."""
    check_same(train(degree=4, way="import", schedule=schedule), train(degree=4, schedule="Interleaved1F1B"))


def test_zbv_with_the_selective_checkpoints_that_torch_refuses(train: Train) -> None:
    """torch's ends with "Trying to backward an extra time"."""
    how: dict[str, Any] = {"degree": 4, "way": "function", "schedule": "ZBV"}
    check_same(train(**how), train(**how, changes={"activation_checkpoint": None}))


def test_a_model_of_transformers_in_torchtitans_backend_for_them(train: Train, workplace: Path) -> None:
    """bpipe goes on from torch's checkpoint.

    Bits cannot be compared: in that backend torch's own schedule does not repeat a run to the bit, nor go on so.
    """
    saved = workplace / "outputs" / "checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    how: dict[str, Any] = {"num_ranks": 2, "degree": 2, "model": "transformers", "checkpoints": True, "changes": UNCLIPPED}
    whole = train(**how)
    shutil.rmtree(saved / f"step-{STEPS}")
    rest = train(**how, way="import")
    assert all(name.startswith("bpipe.") for name in rest["classes"]) and len(rest["parameters"]) == 25
    assert rest["losses"] == pytest.approx(whole["losses"][2:], rel=0.02) and rest["losses"][-1] < whole["losses"][0] - 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"way": "function", "schedule": "BalancedOneFOneB"}, {"way": "function", "schedule": "BalancedOneFOneB"}),
        (
            {"way": "function", "schedule": "OneFOneB", "options": {"balanced": {"budget": "auto"}}},
            {"way": "function", "schedule": "OneFOneB", "options": {"balanced": {"budget": "auto"}}},
        ),
        ({"way": "import"}, {}),
        ({}, {"way": "import", "schedule": "ZBVZeroBubble"}),
        ({}, {"way": "import", "schedule": "DualPipeV"}),
    ],
    ids=["balanced", "in bytes", "bpipe, then torch", "torch, then ZBV", "torch, then DualPipeV"],
)
def test_a_training_goes_on_from_its_checkpoint(
    train: Train, workplace: Path, first: dict[str, Any], second: dict[str, Any]
) -> None:
    saved = workplace / "outputs" / "checkpoint"
    shutil.rmtree(saved, ignore_errors=True)
    whole = train(degree=4, **first, checkpoints=True, changes=UNCLIPPED)
    shutil.rmtree(saved / f"step-{STEPS}")  # as if it had been stopped after the second step
    rest = train(degree=4, **second, checkpoints=True, changes=UNCLIPPED)
    assert len(rest["losses"]) == STEPS - 2 and rest["losses"] == whole["losses"][2:]
    torch.testing.assert_close(rest["parameters"], whole["parameters"], **BITS)
    check_same({**whole, "classes": set()}, train(degree=4, changes=UNCLIPPED))
