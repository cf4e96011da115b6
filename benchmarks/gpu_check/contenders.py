"""The schedules that are compared: plain 1F1B, and 1F1B balanced in every way that moves memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

import bpipe
from benchmarks.gpu_check.model import Size, loss_of
from bpipe.schedules import Destinations, Op

Make = Callable[..., bpipe.Schedule]

PLAIN, SLOTS, PARTS, FIRST = "1F1B", "balanced in slots", "balanced in parts", "GPipe whose first rank evicts"
NUM_PARTS = 4


def _balanced(**how: Any) -> Make:
    def make(stage: bpipe.PipelineStage, num_microbatches: int, **options: Any) -> bpipe.Schedule:
        return bpipe.Balanced(bpipe.OneFOneB(stage, num_microbatches, loss_fn=loss_of, **options), **how)

    return make


def _first_evicts(stage: bpipe.PipelineStage, num_microbatches: int, **options: Any) -> bpipe.Schedule:
    """Return GPipe that keeps one microbatch of the first rank on another one: 2 ranks of 1F1B have no time to evict."""
    slots = (num_microbatches - 1, *[None] * (stage.num_stages - 1))
    return bpipe.GPipe(stage, num_microbatches, loss_fn=loss_of, options=bpipe.Options(slots=slots), **options)


CONTENDERS: dict[str, Make] = {
    PLAIN: partial(bpipe.OneFOneB, loss_fn=loss_of),
    SLOTS: partial(bpipe.BalancedOneFOneB, loss_fn=loss_of),
    "balanced in bytes": _balanced(budget="lowest"),
    PARTS: _balanced(budget="lowest", options=bpipe.Options(parts=NUM_PARTS)),
    "evicted to the host": _balanced(budget="lowest", to=Destinations(host="only")),
    "recomputed": _balanced(budget=None, by="recompute"),
    FIRST: _first_evicts,
}


def moves(schedule: bpipe.Schedule) -> bool:
    """Return whether a schedule's plan moves microbatches, or recomputes them: if not, it shows nothing that 1F1B does not."""
    plan = schedule.plan
    return any(action.op in (Op.EVICT, Op.R) for actions in plan.actions for action in actions)


def schedule_of(name: str, stage: nn.Module, rank: int, size: Size, group: Any = None) -> bpipe.Schedule:
    """Make a contender on one rank, whose stage is where its parameters are."""
    device = next(stage.parameters()).device
    return CONTENDERS[name](bpipe.PipelineStage(stage, rank, size.num_ranks, device, group), size.num_microbatches)


def in_loopback(name: str, stages: Sequence[nn.Module], size: Size, loopback: bpipe.Loopback) -> list[bpipe.Schedule]:
    """Make a contender on all ranks of a loopback."""
    return [schedule_of(name, stage, rank, size, loopback.rank(rank)) for rank, stage in enumerate(stages)]
