"""The work of one of several processes, each with its own GPU: gradients, memory, waits and step times, plain and balanced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.alternate import in_turns
from benchmarks.gpu import seconds_of
from benchmarks.gpu_check.contenders import FIRST, PARTS, PLAIN, SLOTS, moves, schedule_of
from benchmarks.gpu_check.equality import SEED, STEPS, Difference, by_itself, compare
from benchmarks.gpu_check.memory import Moments, Seen, look, moments_of, outside_bytes
from benchmarks.gpu_check.model import Size, batch_of, gradients_of, stage_of

FEWEST_ROUNDS = 5
EVICTIONS = ("wait_evict_s", "wait_load_s")
MESSAGES = ("wait_forward_s", "wait_backward_s", "wait_send_s")
FEWEST_TO_BALANCE = 4  # ranks: of fewer, none has room for another one's microbatches


class OfRank(NamedTuple):
    """What one rank found; the first three by contender."""

    differences: dict[str, Difference]
    moved: dict[str, bool]
    memory: dict[str, Seen]
    steps: dict[str, list[dict[str, float | None]]]  # of the two that are timed: each step's seconds, and those of its waits
    forward_s: float
    evicted_bytes: float  # of a microbatch


def balanced_of(num_ranks: int) -> list[str]:
    """Return the contenders that evict; the first of them is timed."""
    return [SLOTS, PARTS] if num_ranks >= FEWEST_TO_BALANCE else [FIRST]


def size_of(size: Size, num_ranks: int) -> Size:
    """Return the size of the same model over another number of ranks, with twice as many microbatches as ranks."""
    return replace(size, num_ranks=num_ranks, num_microbatches=2 * num_ranks)


def as_rank(rank: int, size: Size, device: torch.device) -> OfRank:
    """Do one rank's part, and return what `judge` takes from each. Collective over the default group, of the CPU and the device."""
    names = [PLAIN, *balanced_of(size.num_ranks)]
    expected = by_itself(size, device, [rank])[: -size.num_microbatches]  # but for the losses
    differences, moved = {}, {}
    for name in names:
        gradients, moved[name] = trained(rank, size, name, device)
        differences[name] = compare(gradients, expected)
    del expected, gradients
    moments, memory = moments_of(size, device), {}
    for name in names:
        memory[name] = measured(rank, size, name, device, moments)
    return OfRank(differences, moved, memory, *timed(rank, size, device))


def trained(rank: int, size: Size, name: str, device: torch.device) -> tuple[list[torch.Tensor], bool]:
    """Train for some steps, and return the gradients of this rank's stage and whether anything moved."""
    stage = stage_of(size, rank, device)
    schedule = schedule_of(name, stage, rank, size)
    torch.cuda.manual_seed(SEED)
    for step in range(STEPS):
        x = batch_of(size, step, device)
        schedule.step(x, target=x, return_outputs=False)
    moved = moves(schedule)
    torch.cuda.synchronize(device)
    schedule.close()
    return gradients_of(stage), moved


def measured(rank: int, size: Size, name: str, device: torch.device, moments: Moments) -> Seen:
    """Measure what this rank holds, according to bpipe and to the allocator."""
    outside = outside_bytes(device)
    stage, batch = stage_of(size, rank, device), batch_of(size, 0, device)
    schedule = schedule_of(name, stage, rank, size)
    for _ in range(STEPS):
        schedule.step(batch, target=batch, return_outputs=False)
    seen = look(schedule, batch, outside, moments.saving_bytes)
    schedule.close()
    return seen


def timed(rank: int, size: Size, device: torch.device) -> tuple[dict[str, list[dict[str, float | None]]], float, float]:
    """Time steps of plain and of balanced 1F1B in turns, and what the device waited for in each."""
    stage, batch, names = stage_of(size, rank, device), batch_of(size, 0, device), (PLAIN, balanced_of(size.num_ranks)[0])
    schedules = {name: schedule_of(name, stage, rank, size) for name in names}
    stats: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}

    def step(name: str) -> None:
        schedules[name].step(batch, target=batch, return_outputs=False)
        torch.cuda.synchronize(device)
        stats[name].append(dict(schedules[name].stats))

    steps = {name: partial(step, name) for name in names}
    for one in [*steps.values()] * STEPS:
        one()
    taken = in_turns(steps, seconds=size.seconds, fewest_rounds=FEWEST_ROUNDS)
    balanced = schedules[names[1]]
    evicted, num_evicted = balanced.stats["evicted_bytes"], len(balanced.plan.evicted(rank))
    for schedule in schedules.values():
        schedule.close()
    waits = {name: _with_waits(taken[name].seconds, stats[name]) for name in names}
    forward_s = seconds_of(lambda: stage(batch[: size.sequences]))
    return waits, forward_s, evicted / num_evicted if num_evicted else 0.0


def _with_waits(seconds: Sequence[float], stats: Sequence[Mapping[str, float]]) -> list[dict[str, float | None]]:
    """Return the seconds of the last steps and of their waits, which a host may learn only in a later step, or never (None)."""
    waits = {one["wait_step"]: one for one in stats}
    found = [(took, waits.get(one["step"])) for took, one in zip(seconds, stats[-len(seconds) :], strict=True)]
    return [{"step_s": took, "evictions_s": _sum(own, EVICTIONS), "messages_s": _sum(own, MESSAGES)} for took, own in found]


def _sum(waits: Mapping[str, float] | None, keys: Sequence[str]) -> float | None:
    return None if waits is None else sum(waits[key] for key in keys)
