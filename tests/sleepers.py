"""Stages that sleep for a device's time, so that 2 cores can stand for p devices; what they save and send is real."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from bpipe.device.huge_pages import prefer_huge_pages


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways and saves some bytes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward_s: float, backward_s: float, saved_bytes: int, is_written: bool) -> torch.Tensor:
        start, ctx.backward_s = time.perf_counter(), backward_s
        saved = x.new_empty(saved_bytes // x.element_size() + 1)
        if is_written:
            prefer_huge_pages(saved)  # a device has its memory already: faults of small pages would take seven copies' time
        saved[slice(None) if is_written else -1] = 1.0  # fresh pages cost more than their transfer
        ctx.save_for_backward(saved)
        _sleep(x, forward_s - (time.perf_counter() - start))
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        (saved,) = ctx.saved_tensors  # which may take its own time: a checkpoint runs forward here
        _sleep(gradient, ctx.backward_s)
        return gradient * saved[-1], None, None, None, None


def _sleep(tensor: torch.Tensor, seconds: float) -> None:
    """Take a device's time: with a fake tensor, no device does anything."""
    if type(tensor) is torch.Tensor and seconds > 0:
        time.sleep(seconds)


class Sleeper(nn.Module):
    """A stage of a device that takes its time; it need not in steps that nobody times.

    Args:
        forward_s: seconds of a forward.
        saved_bytes: of a microbatch.
        is_written: whether all of these bytes are written, in a forward's time; otherwise most of them have no memory yet.
    """

    def __init__(self, forward_s: float, saved_bytes: int, *, is_written: bool = False) -> None:
        super().__init__()
        self.scale, self.sleeps = nn.Parameter(torch.ones(1)), True
        self._forward_s, self._saved_bytes, self._is_written = forward_s, saved_bytes, is_written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward_s = self._forward_s * self.sleeps
        return _Sleep.apply(x * self.scale, forward_s, 2 * forward_s, self._saved_bytes, self._is_written)


class SlicedSleeper(nn.Module):
    """A stage that takes sequences in slices, each of which reads what all earlier ones have left.

    Args:
        sleeper: what runs for each slice, in the time of a slice.
    """

    def __init__(self, sleeper: Sleeper) -> None:
        super().__init__()
        self.sleeper = sleeper

    def forward(self, x: torch.Tensor, past: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.sleeper.scale * x.mean(1, keepdim=True)
        return self.sleeper(sum(past, start=x)), state
