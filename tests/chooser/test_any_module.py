"""Whatever plan is chosen, gradients are those of the named schedule to the bit: with skips, several stages a rank, any module."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.schedules import build
from tests.models import batch_of, modules_of, mse
from tests.skips.models import KINDS, gradients_by_itself, model_of

pytestmark = pytest.mark.usefixtures("one_thread")

RANKS, M = 2, 4
OTHER = {"1f1b": "gpipe", "zbv": "v_min", "interleaved_1f1b": "breadth_first"}  # of the same placement, to be chosen
OWN = ["transformer", "conv", "lstm", "views", "autocast", "tied", "nested", "pair", "frozen"]  # kinds of tests.models
DRAWING = ("transformer", "frozen")  # of these, those with dropout


def trained(
    modules: list[nn.Module], start: str, how: str, batch: dict[str, Any], skips: Any = None, keeps_order: bool = False
) -> list[torch.Tensor | None]:
    """The gradients of a step of a plan that was chosen, or of the named schedule."""
    plan = build(start, len(modules), M, num_ranks=RANKS, skips=(skips or {}).values())
    loopback = bpipe.Loopback(RANKS)
    owned = [deepcopy(module) for module in modules]
    schedules = []
    for rank in range(RANKS):
        stages = [
            bpipe.PipelineStage(owned[i], i, len(modules), "cpu", loopback.rank(rank), skips=skips) for i in plan.stages_of(rank)
        ]
        if how == "chosen":
            schedules.append(
                bpipe.auto(stages, M, batch["loss_fn"], start=start, schedules=[OTHER[start]], options=bpipe.Options(effort=0))
            )
        else:
            schedules.append(bpipe.FromPlan(stages, plan, batch["loss_fn"]))
    for _ in range(3):
        for module in owned:
            module.zero_grad()
        loopback.step(schedules, batch["x"], target=batch["target"], return_outputs=False, **batch.get("kwargs", {}))
    if how == "chosen":
        assert schedules[0].plan.name == (start if keeps_order else OTHER[start])
    return [parameter.grad for module in owned for parameter in module.parameters()]


def seeded(*how: Any) -> list[torch.Tensor | None]:
    torch.manual_seed(1)
    return trained(*how)


def check(modules: list[nn.Module], start: str, batch: dict[str, Any], *how: Any) -> list[torch.Tensor | None]:
    chosen, plain = (seeded(modules, start, which, batch, *how) for which in ("chosen", "plain"))
    for one, other in zip(chosen, plain):
        assert (one is None and other is None) or torch.equal(one, other)
    return chosen


@pytest.mark.parametrize("start", ["1f1b", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", KINDS)
def test_models_with_skips(kind: str, start: str) -> None:
    model = model_of(kind, RANKS if start == "1f1b" else 2 * RANKS, 2 * M)
    batch = {"x": model.x, "target": model.target, "kwargs": model.kwargs, "loss_fn": nn.functional.mse_loss}
    found = check(model.stages, start, batch, model.skips)
    for one, other in zip(found, gradients_by_itself(model, M)):
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("start", ["1f1b", "zbv", "interleaved_1f1b"])
@pytest.mark.parametrize("kind", OWN)
def test_any_module(kind: str, start: str) -> None:
    """Among them some whose results depend on the order of a rank's stages, because they draw random numbers."""
    x, target = batch_of(kind, 2 * M)
    several, batch = start != "1f1b", {"x": x, "target": target, "loss_fn": mse}
    check(modules_of(kind, 2 * RANKS if several else RANKS), start, batch, None, several and kind in DRAWING)
