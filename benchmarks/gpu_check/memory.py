"""Compare what bpipe says that a device holds with torch's allocator, and measure what evictions give back to it."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch

import bpipe
from benchmarks.gpu_check.contenders import SLOTS, in_loopback
from benchmarks.gpu_check.model import Size, batch_of, loss_of, stage_of
from benchmarks.gpu_check.verdict import Verdict, judged
from benchmarks.one_gpu import Account
from bpipe.schedules import Destinations

STEPS = 3  # before the one that is looked at: it allocates nothing for the first time
TOLERANCE = 0.02  # of bpipe's figure
BESIDE = 256 * 2**20  # bytes that libraries such as cuBLAS keep for themselves, a workspace for each stream
SMALL = 2**14  # bytes, where all is small
PEAK = (
    f"The allocator's peak is what `stats['device_peak_bytes']` says, to {TOLERANCE:.0%}, and on top of that at most what one "
    "microbatch's operations need for a moment, which bpipe does not count."
)
FREED = "The memory of evicted tensors is free for other tensors at once, by the allocator's own count."


class Seen(NamedTuple):
    """The bytes of one rank, according to bpipe and to the allocator."""

    said_bytes: int  # `device_peak_bytes`
    allocated_bytes: int  # the allocator's peak in a step, without what others have
    moment_bytes: int  # what one microbatch's operations need for a moment beside what they save, measured by itself
    rounded_bytes: int  # the part of the allocator's peak that was not asked for: it rounds each tensor up
    beside_bytes: int  # what is allocated between steps and is neither bpipe's nor the model's
    unused_bytes: int  # the allocator's peak of reserved bytes minus its peak of allocated bytes: fragments

    def problems(self, name: str) -> list[str]:
        """Return what is wrong, if anything is."""
        slack = TOLERANCE * self.said_bytes + SMALL
        found = []
        if self.allocated_bytes < self.said_bytes - slack:
            found.append(f"{name}: bpipe says {self.said_bytes} bytes, and the allocator's peak was only {self.allocated_bytes}")
        if self.allocated_bytes > self.said_bytes + self.moment_bytes + self.rounded_bytes + slack:
            found.append(
                f"{name}: the allocator's peak was {self.allocated_bytes} bytes, over the {self.said_bytes} that bpipe says and "
                f"the {self.moment_bytes} that operations need for a moment"
            )
        if not -slack <= self.beside_bytes <= BESIDE:
            found.append(f"{name}: between steps {self.beside_bytes} bytes more are allocated than bpipe counts")
        return found


def check(size: Size, device: torch.device) -> list[Verdict]:
    """Check the memory of one rank by itself, plain and balanced, and what an eviction frees."""
    moments = moments_of(size, device)
    found = {name: of_one_rank(size, device, moments, how) for name, how in WAYS.items()}
    problems = [problem for name, seen in found.items() for problem in seen.problems(name)]
    numbers = {f"{key}, {name}": value for name, seen in found.items() for key, value in seen._asdict().items()}
    return [judged("memory: stats and the allocator, one rank", PEAK, problems, numbers), freeing(size, device)]


WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "GPipe": None,
    "evicted to the host": {"budget": "lowest", "to": Destinations(host="only")},
    "recomputed": {"budget": "lowest", "by": "recompute"},
}


class Moments(NamedTuple):
    """The bytes that one microbatch's operations need for a moment, measured by itself."""

    saving_bytes: int  # of a forward and its backward, beside what the forward saves
    forward_bytes: int  # of a forward that saves nothing, as the first one of a microbatch that is recomputed

    def of(self, how: Mapping[str, Any] | None) -> int:
        """Return the bytes that a step needs: `saving_bytes`, or the larger of it and `forward_bytes` if it recomputes."""
        recomputes = how is not None and how.get("by") == "recompute"
        return max(self.saving_bytes, self.forward_bytes) if recomputes else self.saving_bytes


def moments_of(size: Size, device: torch.device) -> Moments:
    """Run one microbatch of one stage, and measure what its operations need."""
    stage = stage_of(size, 0, device)
    x = batch_of(size, 0, device)[: size.sequences].requires_grad_()
    for _ in range(2):  # the first one loads libraries
        x.grad = None
        before = _reset(device)
        loss = loss_of(stage(x), x.detach())
        saved = torch.cuda.memory_allocated(device) - before
        loss.backward()
        torch.cuda.synchronize(device)
        saving = torch.cuda.max_memory_allocated(device) - before - saved
        del loss
        x.grad, before = None, _reset(device)
        with torch.no_grad():
            stage(x)
        torch.cuda.synchronize(device)
        forward = torch.cuda.max_memory_allocated(device) - before
    return Moments(max(0, saving), forward)


def _reset(device: torch.device) -> int:
    """Reset the peak, and return the bytes that are allocated now."""
    allocated = outside_bytes(device)
    torch.cuda.reset_peak_memory_stats(device)
    return allocated


def outside_bytes(device: torch.device) -> int:
    """Return the bytes allocated by now, after Python's collector has run: what waits for it may be freed at any later moment."""
    gc.collect()
    torch.cuda.synchronize(device)
    return int(torch.cuda.memory_allocated(device))


def of_one_rank(size: Size, device: torch.device, moments: Moments, how: Mapping[str, Any] | None) -> Seen:
    """Train one stage by itself under GPipe, which keeps all its microbatches unless they are balanced away."""
    outside = outside_bytes(device)
    stage = stage_of(size, 0, device)
    schedule: bpipe.Schedule = bpipe.GPipe(
        bpipe.PipelineStage(stage, 0, 1, device, bpipe.Loopback(1).rank(0)), size.num_microbatches, loss_fn=loss_of
    )
    if how is not None:
        schedule = bpipe.Balanced(schedule, **how)
    batch = batch_of(size, 0, device)
    for _ in range(STEPS):
        schedule.step(batch, target=batch, return_outputs=False)
    seen = look(schedule, batch, outside, moments.of(how))
    schedule.close()
    return seen


def look(schedule: bpipe.Schedule, batch: torch.Tensor, outside: int, moment: int) -> Seen:
    """Run a step of this rank, wait for the device, and read the allocator's statistics of the step."""
    device = batch.device
    between = _reset(device)
    schedule.step(batch, target=batch, return_outputs=False)
    torch.cuda.synchronize(device)
    peak, reserved = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    stats = schedule.stats
    others = outside + batch.nbytes
    beside = between - others - stats["static_bytes"] - stats["remote_buffer_bytes"] - stats["shared_message_bytes"]
    return Seen(
        said_bytes=int(stats["device_peak_bytes"]),
        allocated_bytes=int(peak - others - stats["shared_message_bytes"] - max(0, beside)),
        moment_bytes=moment,
        rounded_bytes=int(peak - torch.cuda.memory_stats(device).get("requested_bytes.all.peak", peak)),
        beside_bytes=int(beside),
        unused_bytes=int(reserved - peak),
    )


def freeing(size: Size, device: torch.device) -> Verdict:
    """Train in a loopback, and measure what rank 0's evictions give back."""
    loopback, stages = bpipe.Loopback(size.num_ranks), [stage_of(size, i, device) for i in range(size.num_ranks)]
    schedules, batch = in_loopback(SLOTS, stages, size, loopback), batch_of(size, 0, device)
    account = Account(partial(torch.cuda.memory_allocated, device))
    for observer in (None, account):
        schedules[0].session.observer = observer
        loopback.step(schedules, batch, target=batch, return_outputs=False)
    evicted, freed = int(schedules[0].stats["evicted_bytes"]), account.freed_bytes
    for schedule in schedules:
        schedule.close()
    problems = ["nothing was evicted, so that nothing was tested"] * (not evicted)
    if freed < evicted:
        problems.append(f"evictions moved {evicted} bytes, and gave back only {freed}")
    return judged("memory: what evictions free", FREED, problems, {"evicted_bytes": evicted, "freed_bytes": freed})
