"""A rank of torch's "fake" process group, and of a pipeline of equal stages over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import bpipe
from bpipe.schedules import rules
from bpipe.schedules.rule import Placement
from tests.models import directions_of, held_by, mse

RANKS, M, WIDTH = 8, 8, 8
STAGES_PER_RANK = {Placement.ONE: 1, Placement.TWO_VS: 4}
CLASSES = {rule.runs_as: STAGES_PER_RANK.get(rule.placement, 2) for rule in rules() if rule.runs_as}  # by name of the class
EXAMPLE = torch.empty(2, WIDTH, device="meta")


@contextmanager
def fake_group(rank: int, size: int = RANKS) -> Iterator[None]:
    """Let this process be a rank of a default group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def module_of(stage: int) -> nn.Module:
    torch.manual_seed(stage)
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))


def stages_on(
    rank: int, schedule: type[bpipe.Schedule], group: Any = None, *, ranks: int = RANKS, **options: Any
) -> list[bpipe.PipelineStage]:
    """The stages of one rank."""
    num_stages = ranks * CLASSES[schedule.__name__]
    options |= {"directions": directions_of(schedule), "group": group}
    depth = num_stages // directions_of(schedule)  # twins start with the same weights
    held = held_by(schedule, ranks, num_stages)[rank]
    return [bpipe.PipelineStage(module_of(i % depth), i, num_stages, "cpu", **options) for i in held]


def step_of(schedule: bpipe.Schedule, stages: Sequence[bpipe.PipelineStage]) -> Any:
    """A training step with a batch for the first stage and a target for the last one."""
    batch = torch.ones(2 * M, WIDTH)
    args = (batch,) if any(stage.is_first for stage in stages) else ()
    return schedule.step(*args, **({"target": batch} if any(stage.is_last for stage in stages) else {}))


def make(schedule: type[bpipe.Schedule], stages: Sequence[bpipe.PipelineStage], m: int = M) -> bpipe.Schedule:
    return schedule(list(stages) if len(stages) > 1 else stages[0], m, loss_fn=mse)
