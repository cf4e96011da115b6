"""Schedules of slices at run time: one slice is the whole microbatch, of any module."""

from __future__ import annotations

import pytest
import torch

import bpipe
from tests.models import batch_of, modules_of, mse, single_process

P, M = 4, 8


def stages_in(loopback: bpipe.Loopback) -> tuple[list[bpipe.PipelineStage], list[torch.nn.Module]]:
    modules = modules_of("quiet", P)
    return [bpipe.PipelineStage(one, r, P, "cpu", loopback.rank(r)) for r, one in enumerate(modules)], modules


@pytest.mark.parametrize("schedule", [bpipe.Seq1F1B, bpipe.TeraPipe])
@pytest.mark.parametrize("is_balanced", [False, True])
def test_one_slice_runs_as_the_whole_microbatch(schedule: type[bpipe.Schedule], is_balanced: bool) -> None:
    loopback = bpipe.Loopback(P)
    stages, modules = stages_in(loopback)
    schedules = [schedule(stage, M, loss_fn=mse) for stage in stages]
    if is_balanced:
        schedules = [bpipe.Balanced(one) for one in schedules]
    x, y = batch_of("quiet", 2 * M, 0)
    loopback.step(schedules, x, target=y)
    for module, gradients in zip(modules, single_process("quiet", P, M, steps=1).gradients, strict=True):
        assert all(map(torch.equal, [p.grad for p in module.parameters()], gradients))
