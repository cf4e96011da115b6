"""Twins that compute different things: refused, or warned of where only the user can know."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bpipe
from bpipe.errors import AgreementError, ConfigurationError
from bpipe.flow.shaping import shaped
from bpipe.memory.makeup import Makeups
from bpipe.model.stage import ModuleSnapshot
from bpipe.schedules import finish
from bpipe.schedules.any_flow import computations_for
from bpipe.twins.exchange import kinds_of

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, WIDTH = 2, 2, 4
mse = nn.functional.mse_loss


class Block(nn.Module):
    """With an activation as a module and one as a function, dropout, a norm, and a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.act: Any = nn.GELU()
        self.function: Any = nn.functional.silu
        self.drop = nn.Dropout(0.0)
        self.factor = 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.drop(self.function(self.norm(self.act(self.linear(x))))) * self.factor
        return output


class Pipeline:
    """Two ranks of Chimera in a loopback: four stages, of which 0 and 2, and 1 and 3, are twins."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        blocks, self.loopback = [Block() for _ in range(P)], bpipe.Loopback(P)
        self.modules = {stage: deepcopy(blocks[stage % P]) for stage in range(2 * P)}
        held = [[0, 3], [1, 2]]
        self.schedules = [
            bpipe.Chimera(
                [bpipe.PipelineStage(self.modules[s], s, 2 * P, "cpu", self.loopback.rank(rank), directions=2) for s in held[rank]],
                M,
                mse,
            )
            for rank in range(P)
        ]

    def step(self) -> None:
        x = torch.randn(2 * M, WIDTH, generator=torch.Generator().manual_seed(1))
        self.loopback.step(self.schedules, x, target=x)

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for module in self.modules.values() for parameter in module.parameters()]


def softer(x: torch.Tensor, beta: float) -> torch.Tensor:
    return nn.functional.softplus(x, beta)


def put(name: str, value: Any) -> Callable[[Block], Any]:
    return lambda block: setattr(block, name, value)


UNLIKE: dict[str, Callable[[Block], Any]] = {
    "another activation": put("act", nn.ReLU()),
    "another function": put("function", nn.functional.relu),
    "another lambda": put("function", lambda x: x * 2.0),
    "a partial function": put("function", partial(softer, beta=2.0)),
    "another rate of dropout": lambda block: setattr(block.drop, "p", 0.5),
    "a mode": lambda block: block.eval(),
    "a mode of one layer": lambda block: block.drop.eval(),
    "a setting of a norm": lambda block: setattr(block.norm, "eps", 1e-2),
    "a forward of its own": lambda block: setattr(block, "forward", lambda x: block.linear(x)),
    "one layer more": put("act", nn.Sequential(nn.GELU(), nn.Identity())),
    "a layer less": put("drop", nn.Identity()),
}
PERHAPS: dict[str, Callable[[Block], Any]] = {
    "an attribute of the user's": put("factor", 2.0),
    "a hook of a forward": lambda block: block.act.register_forward_hook(lambda *args: None),
    "a hook before it": lambda block: block.register_forward_pre_hook(lambda *args: None),
    "a hook of a backward": lambda block: block.norm.register_full_backward_hook(lambda *args: None),
    "a hook of a gradient": lambda block: block.linear.weight.register_hook(lambda gradient: gradient),
    "a hook of a gradient that was added": lambda block: block.linear.bias.register_post_accumulate_grad_hook(lambda one: None),
}


@pytest.mark.parametrize("is_late", [False, True], ids=["at first", "after a step"])
@pytest.mark.parametrize("name", UNLIKE)
def test_twins_that_compute_something_else_are_refused(name: str, is_late: bool) -> None:
    """In the step in which they differ, before any gradient is added."""
    pipeline = Pipeline()
    if is_late:
        pipeline.step()
    before = deepcopy(pipeline.gradients())
    UNLIKE[name](pipeline.modules[2])
    with pytest.raises(AgreementError, match=r"stages 0 and 2 are twins, but their modules differ \(on ranks 0 and 1\)"):
        pipeline.step()
    after = pipeline.gradients()
    assert all(one is other or (one is not None and torch.equal(one, other)) for one, other in zip(after, before))


@pytest.mark.parametrize("name", UNLIKE)
def test_twins_that_were_both_changed_train(name: str, caplog: pytest.LogCaptureFixture) -> None:
    pipeline = Pipeline()
    for stage in (0, 2):
        UNLIKE[name](pipeline.modules[stage])
    pipeline.step()
    assert not caplog.records and any(one is not None for one in pipeline.gradients())


@pytest.mark.parametrize("is_unlike", [False, True], ids=["alike", "another inside"])
def test_twins_under_ddp_on_different_gpus(is_unlike: bool) -> None:
    """Each has its own rank's GPU among DDP's settings; of what is inside they must not differ."""
    pipeline = Pipeline()
    if is_unlike:
        UNLIKE["another rate of dropout"](pipeline.modules[2])
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        wrapped = {stage: nn.parallel.DistributedDataParallel(module) for stage, module in pipeline.modules.items()}
    finally:
        dist.destroy_process_group()
    for stage, one in wrapped.items():
        one.device_ids, one.output_device = [stage], stage  # as on GPUs
    parts = {stage: ModuleSnapshot.of(one, Makeups()) for stage, one in wrapped.items()}
    kinds, settings = kinds_of(parts)
    assert (kinds[0] == kinds[2]) is not is_unlike and settings[0] == settings[2]


@pytest.mark.parametrize("name", PERHAPS)
def test_what_only_the_user_can_judge_is_warned_of_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A hook may only look, as a profiler's on one rank, and an attribute may be a name."""
    caplog.set_level(logging.WARNING, logger="bpipe")
    pipeline = Pipeline()
    PERHAPS[name](pipeline.modules[2])
    pipeline.step()
    pipeline.step()
    (record,) = caplog.records
    assert "stages 0 and 2 are twins, on ranks 0 and 1, and have other attributes, buffers or hooks" in record.getMessage()


def step_on_one_rank(twin_of: Callable[[nn.Module], nn.Module], module: nn.Module) -> None:
    """A step in which a stage and its twin are on one rank."""
    flow = shaped(shaped(None, "chain", (0,), 2), "alternatives", (0, 0), ((0,), (1,)), True)
    plan, loopback = finish(computations_for(flow)), bpipe.Loopback(1)
    both = enumerate([module, twin_of(module)])
    held = [bpipe.PipelineStage(one, stage, 2, "cpu", loopback.rank(0), directions=2) for stage, one in both]
    x = torch.randn(4, WIDTH)
    loopback.step([bpipe.FromPlan(held, plan, mse)], x, target=x)


def test_twins_on_one_rank_are_one_module() -> None:
    """Nothing adds up what copies would learn, each from half of the microbatches."""
    module = Block()
    with pytest.raises(ConfigurationError, match="twins on one rank, and have weights of their own"):
        step_on_one_rank(deepcopy, module)
    step_on_one_rank(lambda one: one, module)
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_is_frozen_may_be_copied_on_one_rank() -> None:
    class Adapted(nn.Module):
        def __init__(self, base: nn.Module, adapter: nn.Module) -> None:
            super().__init__()
            self.base, self.adapter = base.requires_grad_(False), adapter

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.adapter(x)  # type: ignore[no-any-return]

    module = Adapted(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    step_on_one_rank(lambda one: Adapted(deepcopy(module.base), module.adapter), module)
    assert module.adapter.weight.grad is not None
