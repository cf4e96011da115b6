"""A schedule class balanced, to be used like a schedule class; and pipelines of it in a loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

import bpipe
from tests.models import directions_of, held_by

RARE = {one.name for one in fields(bpipe.Options)}


def nested(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a schedule or a planner, with those that `bpipe.Options` has in `options`."""
    rare = {name: value for name, value in arguments.items() if name in RARE}
    others = {name: value for name, value in arguments.items() if name not in RARE}
    return others | ({"options": bpipe.Options(**rare)} if rare else {})


@dataclass(frozen=True)
class Over:
    """`Balanced` over a schedule class."""

    schedule: type[bpipe.Schedule]
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rule(self) -> str:
        return self.schedule.rule

    def __call__(self, stages: Any, m: int, **options: Any) -> bpipe.Balanced:
        return bpipe.Balanced(self.schedule(stages, m, **options), **nested(self.options))


def pipeline(
    schedule: Any,
    modules: Sequence[nn.Module],
    m: int,
    loss_fn: Callable[..., Any],
    num_ranks: int | None = None,
    device: str = "cpu",
) -> tuple[bpipe.Loopback, list[Any]]:
    """A loopback and a schedule for each of its ranks."""
    loopback = bpipe.Loopback(num_ranks or len(modules))
    stages = [
        [
            bpipe.PipelineStage(modules[i], i, len(modules), device, loopback.rank(rank), directions=directions_of(schedule))
            for i in held
        ]
        for rank, held in enumerate(held_by(schedule, loopback.num_ranks, len(modules)))
    ]
    return loopback, [schedule(of_rank, m, loss_fn=loss_fn) for of_rank in stages]
