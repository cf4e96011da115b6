"""Optimizers that step while other ranks are busy: the parameters are those of a loop that steps behind the pipeline's step."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import bpipe
from bpipe.errors import ConfigurationError
from bpipe.fill import OptimizerSteps
from tests.models import held_by
from tests.ranks import run_ranks
from tests.sleepers import Sleeper

P, M, STEPS, WIDTH = 2, 4, 8, 16
RULES: dict[str, Callable[..., Any]] = {"1f1b": bpipe.OneFOneB, "interleaved": bpipe.Interleaved1F1B, "zbv": bpipe.ZBV}


def stages_of(rank: int, rule: str) -> list[bpipe.PipelineStage]:
    num_stages = P * (1 if rule == "1f1b" else 2)
    torch.manual_seed(0)
    seconds = [0.01 if i == 1 else 0.003 for i in range(num_stages)]  # rank 0 waits for stage 1 once its later stage is done
    modules = [nn.Sequential(nn.Linear(WIDTH, 64), Sleeper(s, 100), nn.Linear(64, WIDTH)) for s in seconds]
    return [bpipe.PipelineStage(modules[i], i, num_stages, "cpu") for i in held_by(RULES[rule], P, num_stages)[rank]]


def trained(rank: int, rule: str, is_filled: bool) -> tuple[list[torch.Tensor], float]:
    """The parameters after some steps, and the seconds of optimizers that a wait had room for."""
    stages = stages_of(rank, rule)
    optimizers = {
        stage.stage_index: [torch.optim.AdamW(layer.parameters(), lr=0.01) for layer in stage.submod]
        for stage in stages
    }
    schedule = RULES[rule](stages, M, loss_fn=nn.functional.mse_loss)
    if is_filled:
        schedule.fill = OptimizerSteps(optimizers)
    used = 0.0
    for step in range(STEPS):
        x = torch.randn(M, WIDTH, generator=torch.Generator().manual_seed(step))
        schedule.step(x, target=x)
        for of_stage in optimizers.values():
            for optimizer in of_stage:
                if not is_filled:
                    optimizer.step()
                optimizer.zero_grad()
        used += schedule.stats.get("fill_used_s", 0.0)
    schedule.close()
    return [p.detach() for stage in stages for p in stage.submod.parameters()], used


@pytest.mark.parametrize("rule", RULES)
def test_parameters_are_those_of_a_plain_loop_to_the_bit(rule: str) -> None:
    found = run_ranks(trained, P, rule, True)
    for (parameters, _), (expected, _) in zip(found, run_ranks(trained, P, rule, False)):
        assert all(map(torch.equal, parameters, expected))
    if rule == "interleaved":  # elsewhere no wait is left in a step once a stage is done
        assert sum(used for _, used in found) > 0


def refused(rank: int, which: str) -> None:
    (stage,) = stages_of(rank, "1f1b")
    schedule = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss)
    parameters = list(stage.submod.parameters())
    optimizers = {
        "another stage": {7: torch.optim.SGD(parameters, lr=1)},
        "missing": {rank: torch.optim.SGD(parameters[1:], lr=1)},
        "in common": {rank: torch.optim.SGD(parameters, lr=1), 5: torch.optim.SGD(parameters[:1], lr=1)},
    }[which]
    expected = {
        "another stage": f"optimizers of stages [7] were given, and the rank has [{rank}]",
        "missing": f"1 parameters of stage {rank} are in none of its optimizers",
        "in common": f"stages {rank} and 5 have a parameter in common",
    }[which]
    with pytest.raises(ConfigurationError, match=re.escape(expected)):
        schedule.fill = OptimizerSteps(optimizers)
    assert schedule.fill is None


@pytest.mark.parametrize("which", ["another stage", "missing", "in common"])
def test_what_cannot_be_right_is_refused(which: str) -> None:
    run_ranks(refused, P, which)
