"""Stages that sleep for a device's time and hand on much: their messages take so long that they show in a step."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from bpipe.device.huge_pages import prefer_huge_pages


def filled(width: int, like: torch.Tensor) -> torch.Tensor:
    """Return [1, width] in memory that is there: faults of small pages would take several copies' time."""
    made = like.new_empty(1, width)
    prefer_huge_pages(made)
    return made.fill_(1.0)


class _Take(torch.autograd.Function):
    """Takes its time both ways, and makes outputs and gradients of any width meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, seconds: tuple[float, float], width: int) -> torch.Tensor:
        start, ctx.backward_s, ctx.width = time.perf_counter(), seconds[1], x.shape[1]
        output = filled(width, x)
        time.sleep(max(0.0, seconds[0] - (time.perf_counter() - start)))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        start = time.perf_counter()
        given = filled(ctx.width, gradient)
        time.sleep(max(0.0, ctx.backward_s - (time.perf_counter() - start)))
        return given, gradient[0, :1].clone(), None, None


class Wide(nn.Module):
    """A stage that takes its time and hands on much.

    Args:
        forward_s: seconds of a forward; a backward takes twice as long.
        width: of its output, [1, width].
    """

    def __init__(self, forward_s: float, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._seconds, self._width = (forward_s, 2 * forward_s), width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Take.apply(x, self.scale, self._seconds, self._width)
