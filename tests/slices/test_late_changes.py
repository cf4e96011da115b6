"""Random numbers and layers that slices cannot follow: refused when they show, in the first step or in a later one."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bpipe
from bpipe import Loopback, PipelineStage, Seq1F1B
from bpipe.errors import BPipeError, ConfigurationError, StageError
from tests.slices.models import WIDTH, Stage, batch_of
from tests.slices.test_any_loss import LENGTH, WORDS, M, modules, stages_in, sum_of, words
from tests.slices.test_losses import cross_entropy
from tests.slices.test_run import taken

pytestmark = pytest.mark.usefixtures("one_thread")


class Pipeline:
    """Two stages in a loopback, three slices."""

    def __init__(self, loss: Callable[..., Any], parts: list[nn.Module] | None = None, **options: Any) -> None:
        self.modules, self.loopback = modules() if parts is None else parts, Loopback(2)
        self.stages = stages_in(self.loopback, self.modules)
        self.schedules = [Seq1F1B(stage, M, loss_fn=loss, slices=3, options=bpipe.Options(**options)) for stage in self.stages]

    def step(self, target: Any) -> None:
        x, _ = batch_of(M)
        self.loopback.step(self.schedules, x, target=target, return_outputs=False)


OF_THE_MODULE = torch.Generator().manual_seed(0)


class Drawing(nn.Module):
    """A stage that begins to draw random numbers in its third step."""

    def __init__(self, draw: Callable[[Drawing], Any]) -> None:
        super().__init__()
        self.stage, self.draw, self.step = Stage("attention").double(), draw, 0
        self.own, self.several = np.random.default_rng(0), {"mine": random.Random(0)}
        self.holder = SimpleNamespace(several=[{"mine": np.random.default_rng(0)}])

    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        if self.step == 3:
            x = x * float(self.draw(self))
        output: tuple[torch.Tensor, Any] = self.stage(x, past)
        return output


DRAWS: dict[str, Callable[[Drawing], Any]] = {
    "torch": lambda module: torch.rand(()),
    "python": lambda module: random.random(),
    "numpy": lambda module: np.random.rand(),
    "a generator of the module": lambda module: module.own.random(),
    "a generator in a dict": lambda module: module.several["mine"].random(),
    "a generator deep inside": lambda module: module.holder.several[0]["mine"].random(),
    "a bernoulli in place": lambda module: torch.empty(()).bernoulli_(0.5),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.usefixtures("no_other_threads")
def test_random_numbers_that_are_drawn_late(name: str) -> None:
    drawing = Drawing(DRAWS[name])
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(3):
        pipeline.step(words())
    drawing.step = 3
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


def test_a_generator_that_a_module_has_got_since() -> None:
    """What an earlier step has found counts no longer."""
    drawing = Drawing(lambda module: module.own.random())
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(3):
        pipeline.step(words())
    drawing.step, drawing.own = 3, np.random.default_rng(1)
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


class WithGlobal(Drawing):
    def forward(self, x: torch.Tensor, past: tuple[Any, ...] = ()) -> tuple[torch.Tensor, Any]:
        if self.step == 3:
            x = x * torch.rand((), generator=OF_THE_MODULE, dtype=x.dtype)
        output: tuple[torch.Tensor, Any] = self.stage(x, past)
        return output


def test_a_generator_beside_the_class_is_found_late() -> None:
    drawing = WithGlobal(DRAWS["torch"])
    pipeline = Pipeline(cross_entropy, [drawing, modules()[1]])
    for drawing.step in range(4):
        if drawing.step < 3:
            pipeline.step(words())
    with pytest.raises(StageError, match="drew random numbers in its forward"):
        pipeline.step(words())


@pytest.mark.parametrize("kind", ["a closure", "numpy", "python"])
@pytest.mark.usefixtures("no_other_threads")
def test_a_loss_of_slices_that_draws_late(kind: str) -> None:
    generator, number = torch.Generator().manual_seed(0), [0]
    draws = {"a closure": lambda: torch.rand((), generator=generator), "numpy": np.random.rand, "python": random.random}

    def loss(logits: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        late = number[0] == 3
        drawn = (torch.rand((), generator=generator) if kind == "a closure" else draws[kind]()) if late else 1.0
        total, count = sum_of(logits, target)
        return total * float(drawn), count

    pipeline = Pipeline(loss, loss_of_slices=True)
    for number[0] in range(3):
        pipeline.step(words())
    number[0] = 3
    with pytest.raises(StageError, match="drew random numbers"):
        pipeline.step(words())


def swap_norm(stage: PipelineStage) -> None:
    stage.submod.stage.norm = nn.BatchNorm1d(WIDTH)


def put_in_front(stage: PipelineStage) -> None:
    stage.submod.head = nn.Sequential(nn.InstanceNorm1d(LENGTH), stage.submod.head)


def replace_all(stage: PipelineStage) -> None:
    stage.submod = nn.Sequential(nn.Linear(WIDTH, WORDS))


def groups(stage: PipelineStage) -> None:
    stage.submod.add_module("extra", nn.GroupNorm(2, WIDTH))


def synchronised(stage: PipelineStage) -> None:
    stage.submod.head.register_module("norm", nn.SyncBatchNorm(WORDS))


def forward_of_its_own(stage: PipelineStage) -> None:
    stage.submod.forward = lambda x: (x, None)  # type: ignore[method-assign]


@pytest.mark.parametrize("change", [swap_norm, put_in_front, replace_all, groups, synchronised, forward_of_its_own])
def test_a_layer_that_mixes_positions_is_refused_when_it_is_put_in(change: Callable[[PipelineStage], None]) -> None:
    """Before anything is sent, in the step behind the change; without it, the next step would be exact."""
    pipeline = Pipeline(cross_entropy)
    pipeline.step(words())
    before = taken(pipeline.modules)
    change(pipeline.stages[1])
    with pytest.raises(ConfigurationError, match="does not take slices"):
        pipeline.step(words())
    assert all(one.grad is None for module in pipeline.modules for one in module.parameters()) and before
    assert issubclass(ConfigurationError, BPipeError)
