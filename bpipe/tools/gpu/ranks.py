"""The work of one of several processes, each with its own GPU: gradients, memory, waits and step times, plain and balanced."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import bpipe
from bpipe.tools.gpu.contenders import CONTENDERS, PARTS, PLAIN, SLOTS, moves
from bpipe.tools.gpu.equality import SEED, STEPS, by_itself, compare
from bpipe.tools.gpu.memory import Moments, look, moments_of, outside_bytes
from bpipe.tools.gpu.model import Size, batch_of, gradients_of, stage_of

__all__: list[str] = []

FEWEST_ROUNDS, MOST_ROUNDS = 5, 51
EVICTIONS = ("wait_evict_s", "wait_load_s")
MESSAGES = ("wait_forward_s", "wait_backward_s", "wait_send_s")
FEWEST_FOR_SLOTS = 4  # ranks: with fewer, whole microbatches cannot be balanced


def balanced_of(num_ranks: int) -> list[str]:
    """Return the contenders that are balanced; the first of them is timed."""
    return [SLOTS, PARTS] if num_ranks >= FEWEST_FOR_SLOTS else [PARTS]


def size_of(size: Size, num_ranks: int) -> Size:
    """Return the size of the same model over another number of ranks, with twice as many microbatches as ranks."""
    return replace(size, num_ranks=num_ranks, num_microbatches=2 * num_ranks)


def as_rank(rank: int, size: Size, device: torch.device) -> dict[str, Any]:
    """Do one rank's part, and return what `judge` takes from each. Collective over the default group, of the CPU and the device."""
    names = [PLAIN, *balanced_of(size.num_ranks)]
    expected = by_itself(size, device, [rank])[: -size.num_microbatches]  # but for the losses
    differences, moved = {}, {}
    for name in names:
        gradients, moved[name] = trained(rank, size, name, device)
        differences[name] = compare(gradients, expected)._asdict()
    del expected, gradients
    moments, memory = moments_of(size, device), {}
    for name in names:
        memory[name] = measured(rank, size, name, device, moments)
    return {"rank": rank, "differences": differences, "moved": moved, "memory": memory, "timed": timed(rank, size, device)}


def trained(rank: int, size: Size, name: str, device: torch.device) -> tuple[list[torch.Tensor], bool]:
    """Train for some steps, and return the gradients of this rank's stage and whether anything moved."""
    stage = stage_of(size, rank, device)
    schedule = CONTENDERS[name](bpipe.PipelineStage(stage, rank, size.num_ranks, device), size.num_microbatches)
    torch.cuda.manual_seed(SEED)
    for step in range(STEPS):
        x = batch_of(size, step, device)
        schedule.step(x, target=x, return_outputs=False)
    moved = moves(schedule)
    torch.cuda.synchronize(device)
    schedule.close()
    return gradients_of(stage), moved


def measured(rank: int, size: Size, name: str, device: torch.device, moments: Moments) -> dict[str, int]:
    """Measure what this rank holds, according to bpipe and to the allocator."""
    outside = outside_bytes(device)
    stage, batch = stage_of(size, rank, device), batch_of(size, 0, device)
    schedule = CONTENDERS[name](bpipe.PipelineStage(stage, rank, size.num_ranks, device), size.num_microbatches)
    for _ in range(STEPS):
        schedule.step(batch, target=batch, return_outputs=False)
    seen = look(schedule, batch, outside, moments.saving_bytes + (moments.part_bytes if name == PARTS else 0))
    schedule.close()
    return seen._asdict()


def timed(rank: int, size: Size, device: torch.device) -> dict[str, Any]:
    """Time steps of plain and of balanced 1F1B in turns, and what the device waited for in each."""
    stage, batch, names = stage_of(size, rank, device), batch_of(size, 0, device), (PLAIN, balanced_of(size.num_ranks)[0])
    place = bpipe.PipelineStage(stage, rank, size.num_ranks, device)
    schedules = {name: CONTENDERS[name](place, size.num_microbatches) for name in names}
    for schedule in [*schedules.values()] * STEPS:
        one_step(schedule, batch)
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for turn in range(_num_rounds(list(schedules.values()), batch, size.seconds)):
        for name in names if turn % 2 == 0 else names[::-1]:
            steps[name].append(one_step(schedules[name], batch))
    balanced = schedules[names[1]]
    evicted, num_evicted = balanced.stats["evicted_bytes"], len(balanced.plan.evicted(rank))
    for schedule in schedules.values():
        schedule.close()
    return {
        "steps": {name: _with_waits(of_name) for name, of_name in steps.items()},
        "forward_s": forward_s(stage, batch[: size.sequences]),
        "evicted_bytes": evicted / num_evicted if num_evicted else 0.0,
    }


def one_step(schedule: bpipe.Schedule, batch: torch.Tensor) -> dict[str, float]:
    """Run a step; return the seconds from when all ranks begin until this one's device is done, with the step's numbers."""
    dist.all_reduce(torch.zeros(1))
    began = time.perf_counter()
    schedule.step(batch, target=batch, return_outputs=False)
    torch.cuda.synchronize(batch.device)
    return {"step_took_s": time.perf_counter() - began, **schedule.stats}


def _num_rounds(schedules: Sequence[bpipe.Schedule], batch: torch.Tensor, seconds: float) -> int:
    """Return how many rounds all ranks can run in the time, as rank 0 measures one; at least FEWEST_ROUNDS, at most MOST_ROUNDS."""
    took = sum(one_step(schedule, batch)["step_took_s"] for schedule in schedules)
    number = torch.tensor([seconds / took])
    dist.broadcast(number, 0)
    return min(max(int(number), FEWEST_ROUNDS), MOST_ROUNDS)


def _with_waits(steps: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
    """Return the seconds of each step and of its waits, which a host may learn only in a later step, or never (None)."""
    took = {step["step"]: step["step_took_s"] for step in steps}
    waits = {step["wait_step"]: step for step in steps}
    return [
        {"step_s": seconds, "evictions_s": _sum(waits.get(number), EVICTIONS), "messages_s": _sum(waits.get(number), MESSAGES)}
        for number, seconds in took.items()
    ]


def _sum(waits: Mapping[str, float] | None, keys: Sequence[str]) -> float | None:
    return None if waits is None else sum(waits[key] for key in keys)


def forward_s(stage: torch.nn.Module, x: torch.Tensor, repeats: int = 10) -> float:
    """Return the seconds that a forward of one microbatch takes on the device, by the device's own clock."""
    stage(x)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        stage(x)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / repeats
