"""What work on a GPU takes, by its own clock."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch

REPEATS, CALLS = 7, 10


def is_on_gpu(device: torch.device | str) -> bool:
    return torch.device(device).type == "cuda"


def finish(device: torch.device | str) -> None:
    """Wait for the GPU, if that is the device."""
    if is_on_gpu(device):
        torch.cuda.synchronize(device)


def event_mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def device_us(call: Callable[[], object], device: torch.device | str) -> float | None:
    """Microseconds that a call takes of the GPU when it follows another; None without a GPU."""
    call()
    finish(device)
    return 1e6 * seconds_of(call) if is_on_gpu(device) else None


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds that a call takes of the current GPU when it follows another: the median of some, by events."""
    taken = []
    for _ in range(REPEATS):
        begin = event_mark()
        for _ in range(CALLS):
            call()
        end = event_mark()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1000 / CALLS)
    return median(taken)
