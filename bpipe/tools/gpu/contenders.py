"""The schedules that are compared: plain 1F1B, and 1F1B balanced in every way that moves memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import bpipe
from bpipe.schedules import Destinations, Op
from bpipe.tools.gpu.model import loss_of

__all__: list[str] = []

Make = Callable[..., bpipe.Schedule]

PLAIN, SLOTS, PARTS = "1F1B", "balanced in slots", "balanced in parts"
NUM_PARTS = 4


def _balanced(**how: Any) -> Make:
    def make(stage: bpipe.PipelineStage, num_microbatches: int, **options: Any) -> bpipe.Schedule:
        return bpipe.Balanced(bpipe.OneFOneB(stage, num_microbatches, loss_fn=loss_of, **options), **how)

    return make


CONTENDERS: dict[str, Make] = {
    PLAIN: partial(bpipe.OneFOneB, loss_fn=loss_of),
    SLOTS: partial(bpipe.BalancedOneFOneB, loss_fn=loss_of),
    "balanced in bytes": _balanced(budget="lowest"),
    PARTS: _balanced(budget="lowest", parts=NUM_PARTS, inside=True),
    "evicted to the host": _balanced(budget="lowest", to=Destinations(host="only")),
    "recomputed": _balanced(budget=None, by="recompute"),
}


def moves(schedule: bpipe.Schedule) -> bool:
    """Return whether a schedule's plan moves microbatches, or recomputes them: if not, it shows nothing that 1F1B does not."""
    plan = schedule.plan
    return any(action.op in (Op.EVICT, Op.R) for actions in plan.actions for action in actions)
