"""Stages: what is taken, what is refused, and that nothing is touched."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage as TorchStage

import bpipe
from bpipe import PipelineStage
from bpipe.errors import ConfigurationError
from tests.ranks import run_ranks


def test_arguments_are_those_of_torch() -> None:
    module, group = nn.Linear(2, 2), object()
    stage = PipelineStage(module, 1, 3, torch.device("cpu"), group)
    assert (stage.submod, stage.stage_index, stage.num_stages, stage.device, stage.group) == (
        module,
        1,
        3,
        torch.device("cpu"),
        group,
    )
    named = PipelineStage(submodule=module, stage_index=1, num_stages=3, device="cpu", group=group)
    given = [{name: value for name, value in vars(one).items() if name != "_makeups"} for one in (named, stage)]
    assert given[0] == given[1]
    assert PipelineStage(module, 0, 1).group is None
    assert repr(stage) == "PipelineStage(Linear, 1 of 3, cpu)"


@pytest.mark.parametrize(
    ("index", "size", "ends"), [(0, 1, (True, True)), (0, 3, (True, False)), (1, 3, (False, False)), (2, 3, (False, True))]
)
def test_first_and_last(index: int, size: int, ends: tuple[bool, bool]) -> None:
    stage = PipelineStage(nn.Identity(), index, size)
    assert (stage.is_first, stage.is_last) == ends


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((lambda x: x, 0, 1), "a stage needs an nn.Module, got function"),
        ((nn.Linear, 0, 1), "a stage needs an nn.Module, got type"),
        ((nn.Identity(), 0, 0), "num_stages=0: give a whole number of at least 1"),
        ((nn.Identity(), 0, 2.0), "num_stages=2.0"),
        ((nn.Identity(), 2, 2), "stage_index=2: with 2 stages it is 0 to 1"),
        ((nn.Identity(), -1, 2), "stage_index=-1"),
        ((nn.Identity(), "0", 2), "stage_index='0'"),
        ((nn.Identity(), None, 2), "stage_index=None"),
        ((nn.Linear(2, 2, device="meta"), 0, 1), "on the meta device: give device=, where the stage will run"),
    ],
)
def test_what_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        PipelineStage(*arguments)
    assert message in str(raised.value)
    assert isinstance(raised.value, ValueError)


def test_device_follows_the_parameters() -> None:
    assert PipelineStage(nn.Linear(2, 2), 0, 1).device == torch.device("cpu")
    assert PipelineStage(nn.Identity(), 0, 1).device == torch.device("cpu")
    assert PipelineStage(nn.Linear(2, 2, device="meta"), 0, 1, "cpu").device == torch.device("cpu")


def single(module: nn.Module) -> tuple[bpipe.Schedule, PipelineStage]:
    stage = PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    return bpipe.OneFOneB(stage, 2, loss_fn=nn.functional.mse_loss), stage


def test_construction_neither_runs_nor_touches_the_module() -> None:
    class Untouched(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise AssertionError("ran")

    module = Untouched(2, 2).eval()
    before = {name: (tensor, tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()}
    schedule, stage = single(module)
    assert stage.submod is module and not module.training
    assert {name: (tensor, tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()} == before
    assert not module._forward_hooks and not module._forward_pre_hooks
    schedule.close()


def test_meta_module_is_initialised_later() -> None:
    schedule, stage = single(nn.Linear(2, 2, device="meta"))
    stage.submod.to_empty(device="cpu")
    with torch.no_grad():
        stage.submod.weight.copy_(torch.eye(2))
        stage.submod.bias.zero_()
    x = torch.randn(4, 2)
    assert torch.equal(schedule.step(x, target=x), x)
    assert stage.submod.weight.grad is not None


def test_module_may_be_replaced_before_the_first_step() -> None:
    schedule, stage = single(nn.Linear(2, 2))
    first, stage.submod = stage.submod, nn.Linear(2, 2)
    x = torch.randn(4, 2)
    schedule.step(x, target=x)
    assert first.weight.grad is None
    assert stage.submod.weight.grad is not None


def test_several_schedules_share_a_stage() -> None:
    stage = PipelineStage(nn.Linear(2, 2), 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    x = torch.randn(12, 2)
    gradients = []
    for m in (2, 3):
        bpipe.OneFOneB(stage, m, loss_fn=nn.functional.mse_loss).step(x, target=x)
        gradients.append(stage.submod.weight.grad.clone())
    torch.testing.assert_close(gradients[1], 2 * gradients[0])  # another order of sums


# Stages of others


def test_our_own_stage_is_taken_as_it_is() -> None:
    stage = PipelineStage(nn.Identity(), 0, 1)
    assert PipelineStage.adopt(stage) is stage


@pytest.mark.parametrize("other", [nn.Linear(2, 2), None, SimpleNamespace(submod=nn.Identity(), stage_index=0)])
def test_what_is_no_stage(other: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^a schedule needs a PipelineStage, got {type(other).__qualname__}$"):
        PipelineStage.adopt(other)


def runs_torch_stage(rank: int) -> tuple[bool, ...]:
    module, x = nn.Linear(2, 2), torch.ones(4, 2)
    theirs = TorchStage(module, 0, 1, torch.device("cpu"))
    ours = PipelineStage.adopt(theirs)
    schedule = bpipe.OneFOneB(theirs, 2, loss_fn=nn.functional.mse_loss)
    is_equal = torch.equal(schedule.step(x, target=x), module(x))
    theirs.submod = nn.Identity()
    names = ("submod", "stage_index", "num_stages", "device", "group")
    is_alike = all(getattr(ours, name) == getattr(theirs, name) for name in names)
    return (is_alike, is_equal, module.weight.grad is not None)


def test_a_stage_of_torch_runs() -> None:
    assert run_ranks(runs_torch_stage, 1) == [(True, True, True)]


def test_what_a_module_replaces_is_not_kept() -> None:
    """Between construction and the first step, where fully_shard comes, and between steps."""
    module = nn.Linear(4, 4)
    stage = PipelineStage(module, 0, 1, "cpu", bpipe.Loopback(1).rank(0))
    schedule = bpipe.OneFOneB(stage, 2, loss_fn=nn.functional.mse_loss)
    for _ in range(2):
        replaced = weakref.ref(module.weight)
        module.weight = nn.Parameter(torch.ones(4, 4))
        assert replaced() is None
        schedule.step(torch.ones(2, 4), target=torch.ones(2, 4))
