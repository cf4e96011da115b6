"""Gradients that are there between the steps of two directions count only in steps that set them aside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import bpipe
from tests.test_two_directions import alone, assert_twins, batch, mse, optimizer_of, stages_on

pytestmark = pytest.mark.usefixtures("one_thread")

P, M, STEPS = 2, 4, 3


class Pipeline:
    """A schedule of two directions in a loopback, within a budget that has no room for gradients of earlier steps."""

    def __init__(self, cls: type[bpipe.Schedule], budget: tuple[int | None, ...] | None) -> None:
        self.loopback = bpipe.Loopback(P)
        stages = [stages_on(cls, P, rank, self.loopback.rank(rank)) for rank in range(P)]
        self.schedules = [bpipe.Balanced(cls(of_rank, M, mse), budget=budget) for of_rank in stages]
        self.stages = [one for of_rank in stages for one in of_rank]
        self.optimizer = optimizer_of([one.submod for one in self.stages])
        self.num_steps = 0

    def step(self) -> None:
        x, y = batch(M, 10 * self.num_steps)
        self.loopback.step(self.schedules, x, target=y, return_outputs=False)
        self.num_steps += 1

    def eval(self, m: int = M, seed: int = 5) -> None:
        x, y = batch(m, seed)
        self.loopback.eval(self.schedules, x, target=y, losses=[])

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def after_the_update(pipeline: Pipeline) -> None:
    pipeline.optimizer.step()
    pipeline.eval()
    pipeline.optimizer.zero_grad()


def before_the_update(pipeline: Pipeline) -> None:
    pipeline.eval()
    pipeline.update()


def several(pipeline: Pipeline) -> None:
    for seed in range(3):
        pipeline.eval(seed=seed)
    pipeline.update()


def of_another_batch(pipeline: Pipeline) -> None:
    pipeline.eval(2 * M)
    pipeline.update()


def in_eval_mode(pipeline: Pipeline) -> None:
    for stage in pipeline.stages:
        stage.submod.eval()
    pipeline.eval()
    for stage in pipeline.stages:
        stage.submod.train()
    pipeline.update()


def with_gradients_of_zeros(pipeline: Pipeline) -> None:
    """An evaluation sees gradients that the user then takes away by hand."""
    pipeline.optimizer.step()
    pipeline.optimizer.zero_grad(set_to_none=False)
    pipeline.eval()
    for stage in pipeline.stages:
        for parameter in stage.submod.parameters():
            parameter.grad = None


def that_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(bpipe.errors.ConfigurationError):
        pipeline.loopback.eval(pipeline.schedules, torch.zeros(M + 1, 6, dtype=torch.float64))
    pipeline.update()


WAYS = [after_the_update, before_the_update, several, of_another_batch, in_eval_mode, with_gradients_of_zeros, that_is_refused]


@pytest.mark.parametrize("cls", [bpipe.BitPipe, bpipe.Chimera])
@pytest.mark.parametrize("way", WAYS)
def test_an_evaluation_between_a_step_and_the_next_takes_no_room(
    cls: type[bpipe.Schedule], way: Callable[[Pipeline], None]
) -> None:
    """A budget without room for gradients of earlier steps is kept, and training is a single process's."""
    usual = Pipeline(cls, None)
    for _ in range(STEPS):
        usual.step()
        usual.update()
    budget = tuple(int(schedule.stats["device_peak_bytes"]) for schedule in usual.schedules)
    pipeline = Pipeline(cls, budget)
    for _ in range(STEPS):
        pipeline.step()
        way(pipeline)
    for schedule, most in zip(pipeline.schedules, budget):
        assert schedule.stats["device_peak_bytes"] <= schedule.stats["predicted_device_peak_bytes"] <= most
    _, expected = alone(cls, P, M, STEPS)
    assert_twins({one.stage_index: one.submod.state_dict() for one in pipeline.stages}, expected)
