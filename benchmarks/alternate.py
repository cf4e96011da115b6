"""Steps of several contenders in turns, in the same processes: seconds, CPU seconds and peak bytes of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

FEWEST_ROUNDS, MOST_ROUNDS = 7, 101

Step = Callable[[], object]


class Taken(NamedTuple):
    """What some steps took on one rank, round by round: seconds from a common start, and CPU seconds of all its threads."""

    seconds: list[float]
    cpu_s: list[float]


def in_turns(contenders: Mapping[str, Step], *, seconds: float, fewest_rounds: int = FEWEST_ROUNDS) -> dict[str, Taken]:
    """Run the contenders' steps in turns, in the other order every other round, for about so many seconds. Collective."""
    taken = {name: Taken([], []) for name in contenders}
    num_rounds = max(_num_rounds(contenders, seconds), fewest_rounds)
    for turn in range(num_rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            for of_all, of_step in zip(taken[name], timed(contenders[name])):
                of_all.append(of_step)
    return taken


def timed(step: Step) -> tuple[float, float]:
    """Seconds and CPU seconds of a step that all ranks begin together. Collective."""
    dist.barrier()
    began, cpu_began = time.perf_counter(), time.process_time()
    step()
    took = time.perf_counter() - began
    dist.barrier()
    return took, time.process_time() - cpu_began


def _num_rounds(contenders: Mapping[str, Step], seconds: float) -> int:
    """As many as all ranks can run in the time, as rank 0 measures them once."""
    began = time.perf_counter()
    for step in contenders.values():
        timed(step)
    number = torch.tensor([seconds / (time.perf_counter() - began)])
    dist.broadcast(number, 0)
    return min(int(number), MOST_ROUNDS) | 1


def step_seconds(of_ranks: Sequence[Taken]) -> list[float]:
    """A step lasts until its slowest rank is done."""
    return [max(of_step) for of_step in zip(*(taken.seconds for taken in of_ranks))]


def step_cpu_s(of_ranks: Sequence[Taken]) -> list[float]:
    """The CPU seconds of all ranks."""
    return [sum(of_step) for of_step in zip(*(taken.cpu_s for taken in of_ranks))]


def peak_bytes(make: Callable[[], Step], forget: Callable[[], object]) -> int:
    """The most bytes of tensors alive in a second step, with all that was made since before the schedule was. Collective.

    What other threads allocate is not seen; bpipe's only allocate buffers for remote activations, which its stats tell.

    Args:
        make: makes the schedule, and returns its step.
        forget: drops gradients, after each step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step = make()
        step()
        forget()
        with torch.profiler.record_function("second step"):
            step()
        forget()
    assert seen.profiler is not None
    events: Any = seen.profiler.kineto_results.events()
    ((start, end),) = [(e.start_ns(), e.end_ns()) for e in events if e.name() == "second step"]
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if start <= event.start_ns() <= end:
            peak = max(peak, live)
    return peak
