"""Stages that sleep for a device's time and hand on much, and slow links: transfers take so long that they show in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from bpipe.comm.transport.ring import Ring
from bpipe.device.huge_pages import prefer_huge_pages
from bpipe.memory.shared_buffers import PeerMemory
from bpipe.plan.action import PartKey


def slow_links(bytes_per_s: float) -> None:
    """Make what this process sends through shared memory take longer, for good: 2 cores cannot copy for 4 devices at once.

    Each transfer sleeps for its bytes, in the thread that then copies them.
    """
    push = Ring.push

    def push_slowly(ring: Ring, parts: Iterable[memoryview]) -> bool:
        body = list(parts)
        time.sleep(sum(map(len, body)) / bytes_per_s)
        return push(ring, body)

    def slowly(copy: Callable[[PeerMemory, PartKey, Sequence[torch.Tensor]], None]) -> Any:
        def copy_slowly(memory: PeerMemory, remote: PartKey, messages: Sequence[torch.Tensor]) -> None:
            time.sleep(sum(message.nbytes for message in messages) / bytes_per_s)
            copy(memory, remote, messages)

        return copy_slowly

    Ring.push = push_slowly  # type: ignore[method-assign]
    PeerMemory._copy_in, PeerMemory._copy_out = slowly(PeerMemory._copy_in), slowly(PeerMemory._copy_out)  # type: ignore[method-assign]


def filled(width: int, like: torch.Tensor) -> torch.Tensor:
    """Return [1, width] in memory that is there: faults of small pages would take several copies' time. A gradient of 1 that has
    come from nowhere would be taken for an auxiliary loss.
    """
    made = like.new_empty(1, width)
    prefer_huge_pages(made)
    return made.fill_(0.5)


class _Take(torch.autograd.Function):
    """Takes its time both ways, and makes outputs and gradients of any width meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor, seconds: tuple[float, float], width: int, saved: int) -> Any:
        start, ctx.backward_s, ctx.width = time.perf_counter(), seconds[1], x.shape[1]
        output = filled(width, x)
        ctx.save_for_backward(filled(saved, x))
        time.sleep(max(0.0, seconds[0] - (time.perf_counter() - start)))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        start, (saved,) = time.perf_counter(), ctx.saved_tensors
        given = filled(ctx.width, gradient)
        time.sleep(max(0.0, ctx.backward_s - (time.perf_counter() - start)))
        return given, gradient[0, :1] * saved[0, :1], None, None, None


class Wide(nn.Module):
    """A stage that takes its time and hands on much.

    Args:
        forward_s: seconds of a forward; a backward takes twice as long.
        width: of its output, [1, width].
        saved: of what it saves, likewise.
    """

    def __init__(self, forward_s: float, width: int, saved: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self._seconds, self._width, self._saved = (forward_s, 2 * forward_s), width, saved

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Take.apply(x, self.scale, self._seconds, self._width, self._saved)
