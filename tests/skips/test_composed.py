"""Skips of stages under FSDP2, DTensors as skips, and skips under autocast and checkpointing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bpipe
from bpipe.schedules import build
from tests.ranks import run_ranks
from tests.skips.models import WIDTH, by_itself, gradients_by_itself, model_of
from tests.skips.test_equality import assert_close, gradients_of, schedules_of

M = 4


def sharded_rank(rank: int, kind: str, balances: bool) -> dict[int, list[torch.Tensor | None]]:
    """The gradients of a rank's stages, of which two replicas have a half of the batch each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "rank"))
    replica, own = mesh.get_local_rank("replica"), mesh.get_local_rank("rank")
    model = model_of(kind, 4, 4 * M)
    held = {stage: fully_shard(model.stages[stage], mesh=mesh["replica"]) for stage in (own, 3 - own)}
    stages = [bpipe.PipelineStage(module, i, 4, "cpu", mesh.get_group("rank"), skips=model.skips) for i, module in held.items()]
    schedule: bpipe.Schedule = bpipe.ZBV(stages, M, loss_fn=nn.functional.mse_loss)
    if balances:
        schedule = bpipe.Balanced(schedule, budget="lowest")
    x, target = (whole.chunk(2)[replica] for whole in (model.x, model.target))
    kwargs = {name: whole.chunk(2)[replica] for name, whole in model.kwargs.items()}
    for _ in range(2):
        for module in held.values():
            module.zero_grad()
        schedule.step(x, target=target, return_outputs=False, **kwargs)
    return {i: [None if p.grad is None else p.grad.full_tensor() for p in module.parameters()] for i, module in held.items()}


@pytest.mark.parametrize(("kind", "balances"), [("residuals", False), ("unet", True)])
def test_stages_under_fsdp(kind: str, balances: bool) -> None:
    model = model_of(kind, 4, 4 * M)
    expected = gradients_by_itself(model, 1)
    found = {stage: gradients for of_rank in run_ranks(sharded_rank, 4, kind, balances) for stage, gradients in of_rank.items()}
    assert_close([gradient for stage in sorted(found) for gradient in found[stage]], expected)


class Columns(nn.Module):
    """Makes a DTensor of which each tensor rank has some channels, and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        inside = self.up(x).tanh()
        return self.down(inside), {"inside": inside}


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x)


class Rows(nn.Module):
    """Uses the shards that the first stage made."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, inside: torch.Tensor) -> torch.Tensor:
        return x + self.down(inside * 2)


def chain() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Columns().double(), Between().double(), Rows().double()]


SKIPS = {"inside": (0, 2)}


def tensor_parallel_rank(rank: int) -> tuple[int, dict[str, torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("pp", "tp"))
    own, tensor = mesh.get_local_rank("pp"), mesh["tp"]
    whole: Any = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    plans: list[Any] = [whole, {}, {"down": RowwiseParallel()}]
    module = parallelize_module(chain()[own], tensor, plans[own])
    stage = bpipe.PipelineStage(
        module, own, 3, "cpu", mesh.get_group("pp"), skips=SKIPS, get_mesh=lambda names, layout: mesh[names]
    )
    schedule = bpipe.OneFOneB(stage, M, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(1)
    x, target = torch.randn(2, 2 * M, WIDTH, dtype=torch.float64)
    schedule.step(x, target=target, return_outputs=False)
    gradients = {}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        gradients[name] = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
    return own, gradients


def test_shards_are_handed_on() -> None:
    stages = chain()
    torch.manual_seed(1)
    x, target = torch.randn(2, 2 * M, WIDTH, dtype=torch.float64)
    nn.functional.mse_loss(by_itself(stages, SKIPS, x, {}), target).backward()
    for own, gradients in run_ranks(tensor_parallel_rank, 6):
        for name, parameter in stages[own].named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12)


class Checkpointed(nn.Module):
    """Runs a stage under activation checkpointing, and hands its skips on."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.stage, *args, use_reentrant=False, **kwargs)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("rule", "slots"), [("1f1b", None), ("1f1b", 3), ("zb_h1", None)])
def test_checkpointed_stages(rule: str, slots: int | None) -> None:
    model = model_of("residuals", 4, 2 * M)
    expected = gradients_by_itself(model, M)
    for stage in model.stages:
        stage.zero_grad()
    checkpointed = model._replace(stages=[Checkpointed(stage) for stage in model.stages])
    plan = build(rule, 4, M, slots=slots, skips=model.skips.values())
    loopback, schedules = schedules_of(checkpointed, plan)
    loopback.step(schedules, model.x, target=model.target, return_outputs=False)
    assert_close(gradients_of(schedules), expected)


@pytest.mark.usefixtures("one_thread")
def test_autocast() -> None:
    """Values are handed on in half precision, as in a single process."""
    model = model_of("residuals", 4, 2 * M)
    model = model._replace(stages=[stage.float() for stage in model.stages], x=model.x.float(), target=model.target.float())
    plan = build("interleaved_1f1b", 4, M, num_ranks=2, skips=model.skips.values())
    loopback, schedules = schedules_of(model, plan)
    with torch.autocast("cpu", torch.bfloat16):
        loopback.step(schedules, model.x, target=model.target, return_outputs=False)
        expected = gradients_by_itself(model, M)
    for one, other in zip(gradients_of(schedules), expected, strict=True):
        if one is None or other is None:  # the first stage attends to nothing
            assert one is other
            continue
        torch.testing.assert_close(one, other, rtol=0.02, atol=0.02 * float(other.abs().max()))
