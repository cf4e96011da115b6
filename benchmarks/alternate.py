"""Steps of several contenders in turns, in the same processes: seconds, CPU seconds and peak bytes of each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.intervals import Interval, ratios

FEWEST_ROUNDS, MOST_ROUNDS = 7, 101

Step = Callable[[], object]


class Taken(NamedTuple):
    """What some steps took on one rank, round by round: seconds from a common start, and CPU seconds of all its threads."""

    seconds: list[float]
    cpu_s: list[float]

    def add(self, of_step: tuple[float, float]) -> None:
        """Add a step's."""
        for of_all, one in zip(self, of_step):
            of_all.append(one)


def in_turns(contenders: Mapping[str, Step], *, seconds: float, fewest_rounds: int = FEWEST_ROUNDS) -> dict[str, Taken]:
    """Run the contenders' steps in turns, in the other order every other round, for about so many seconds. Collective."""
    taken = {name: Taken([], []) for name in contenders}
    num_rounds = max(_num_rounds(contenders, seconds), fewest_rounds)
    for turn in range(num_rounds):
        for name in list(contenders)[:: 1 if turn % 2 == 0 else -1]:
            taken[name].add(timed(contenders[name]))
    return taken


def timed(step: Step) -> tuple[float, float]:
    """Seconds and CPU seconds of a step that all ranks begin together. Collective."""
    _meet()
    began, cpu_began = time.perf_counter(), time.process_time()
    step()
    took = time.perf_counter() - began
    _meet()
    return took, time.process_time() - cpu_began


def _meet() -> None:
    """Wait for all ranks, on the host also where the group has devices."""
    dist.all_reduce(torch.zeros(1))


def _num_rounds(contenders: Mapping[str, Step], seconds: float) -> int:
    """As many as all ranks can run in the time, as rank 0 measures them once."""
    began = time.perf_counter()
    for step in contenders.values():
        timed(step)
    number = torch.tensor([seconds / (time.perf_counter() - began)])
    dist.broadcast(number, 0)
    return min(int(number), MOST_ROUNDS) | 1


class Turns:
    """What the steps of contenders took, as each rank measured them: a step lasts until its slowest rank is done."""

    def __init__(self, of_ranks: Iterable[Mapping[str, Taken]]) -> None:
        self._of_ranks = list(of_ranks)

    def seconds(self, name: str) -> list[float]:
        """The seconds of a contender's steps."""
        return [max(of_step) for of_step in zip(*(taken[name].seconds for taken in self._of_ranks))]

    def cpu_s(self, name: str) -> list[float]:
        """The CPU seconds of a contender's steps, of all ranks."""
        return [sum(of_step) for of_step in zip(*(taken[name].cpu_s for taken in self._of_ranks))]

    def time(self, name: str, over: str) -> Interval:
        """How long a contender's steps are, over another one's in the same rounds."""
        return ratios(self.seconds(name), self.seconds(over))

    def cpu(self, name: str, over: str) -> Interval:
        """How many CPU seconds a contender's steps take, over another one's."""
        return ratios(self.cpu_s(name), self.cpu_s(over))


def steps_of(schedules: Mapping[str, Any], batch: torch.Tensor, *modules: nn.Module) -> dict[str, Step]:
    """Steps of schedules on one batch, which leave no gradients in the modules; two of each have run: first ones take longer."""

    def step(schedule: Any) -> None:
        schedule.step(batch, target=batch, return_outputs=False)
        for module in modules:
            module.zero_grad()

    steps: dict[str, Step] = {name: partial(step, schedule) for name, schedule in schedules.items()}
    for one in [*steps.values()] * 2:
        one()
    return steps


def peak_bytes(make: Callable[[], Step]) -> int:
    """The most bytes of tensors alive in a second step, with all that was made since before the schedule was. Collective.

    What other threads allocate is not seen; bpipe's only allocate buffers for remote activations, which its stats tell.

    Args:
        make: makes the schedule, and returns its step, which leaves no gradients.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler tells when it starts and stops
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        step = make()
        step()
        with torch.profiler.record_function("second step"):
            step()
    assert seen.profiler is not None
    events: Any = seen.profiler.kineto_results.events()
    ((start, end),) = [(e.start_ns(), e.end_ns()) for e in events if e.name() == "second step"]
    live = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        if start <= event.start_ns() <= end:
            peak = max(peak, live)
    return peak
