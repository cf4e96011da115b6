"""Check several GPUs with a process for each, over NCCL, and judge their numbers together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu import seconds_of
from benchmarks.gpu_check.contenders import PLAIN
from benchmarks.gpu_check.memory import TOLERANCE
from benchmarks.gpu_check.model import Size, make_deterministic
from benchmarks.gpu_check.ranks import FEWEST_TO_BALANCE, OfRank, as_rank, balanced_of, size_of
from benchmarks.gpu_check.verdict import Verdict, judged, not_applicable
from bpipe.plan.amounts import show_bytes
from bpipe.tools.quantities import show_seconds
from tests.ranks import run_ranks

NUMBERS = (8, 4, 2)  # of ranks: the largest that fits is taken
TIMEOUT_S = 60.0
MOST_EXPOSED, MOST_OVER_PLAIN = 0.02, 1.05
TITLE = "over NCCL"
EQUAL = "With a process and a GPU for each rank, training over NCCL gives the gradients of a plain loop on one GPU, to the bit."
HELD = (
    f"On every rank `stats['device_peak_bytes']` is the allocator's peak, to {TOLERANCE:.0%} and what operations need for a "
    "moment. Balancing lowers the fullest rank."
)
EXPOSED = f"Evictions are hidden behind computation: no rank's device stands still for them for over {MOST_EXPOSED:.0%} of a step."
AS_FAST = f"A balanced step takes at most {MOST_OVER_PLAIN} of the plain one's time: the median of steps in turns."


def check(size: Size, num_gpus: int) -> list[Verdict]:
    """Start the ranks, and judge what they found."""
    num_ranks = next((number for number in NUMBERS if number <= num_gpus), None)
    if num_ranks is None:
        return [not_applicable(f"ranks {TITLE}", "one GPU: NCCL refuses two ranks on one, so that this takes two, four or eight")]
    if not (dist.is_available() and dist.is_nccl_available()):
        return [not_applicable(f"ranks {TITLE}", "this torch was built without NCCL")]
    size = size_of(size, num_ranks)
    found = on_ranks(size)
    return judge(found, size, link_bytes_per_s(num_ranks))


def on_ranks(size: Size) -> list[OfRank]:
    """Run `as_rank` in a process for each GPU; if one of them raises, raise with its traceback."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return run_ranks(_rank, size.num_ranks, size, store.port, timeout_s=600.0)


def _rank(rank: int, size: Size, port: int) -> OfRank:
    """Leave the helper's group for one that has the GPU too: all ranks are on this machine, and use its loopback interface."""
    make_deterministic()
    torch.cuda.set_device(rank)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=store, rank=rank, world_size=size.num_ranks, timeout=timedelta(seconds=TIMEOUT_S)
    )
    found = as_rank(rank, size, torch.device("cuda", rank))
    dist.all_reduce(torch.zeros(1))  # none leaves while another one may still need it
    return found


def link_bytes_per_s(num_ranks: int, num_bytes: int = 2**28) -> float:
    """Return the bytes per second of a copy by itself from the first GPU to the last one, because these are a pair."""
    first, last = torch.device("cuda", 0), torch.device("cuda", num_ranks - 1)
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for device in (first, last))
    with torch.cuda.device(first):
        return num_bytes / seconds_of(lambda: target.copy_(source, non_blocking=True))


def judge(found: Sequence[OfRank], size: Size, bytes_per_s: float) -> list[Verdict]:
    """Return the verdicts on what all ranks found, which is given in the order of the ranks."""
    return [_equality(found, size), _memory(found, size), *_times(found, size, bytes_per_s)]


def _named(what: str, size: Size) -> str:
    return f"{what}: {size.num_ranks} ranks {TITLE}"


def _equality(found: Sequence[OfRank], size: Size) -> Verdict:
    names = [PLAIN, *balanced_of(size.num_ranks)]
    problems = [f"{name}: nothing moved, so that nothing was tested" for name in names[1:] if not found[0].moved[name]]
    numbers: dict[str, Any] = {}
    for name in names:
        differences = [of_rank.differences[name] for of_rank in found]
        numbers[f"differing, {name}"] = sum(one.num_differing for one in differences)
        problems += [problem for rank, one in enumerate(differences) for problem in one.problems(f"rank {rank}, {name}")]
    numbers["tensors"] = sum(of_rank.differences[PLAIN].num_tensors for of_rank in found)
    return judged(_named("equality", size), EQUAL, problems, numbers)


def _memory(found: Sequence[OfRank], size: Size) -> Verdict:
    problems: list[str] = []
    numbers: dict[str, Any] = {}
    for name in [PLAIN, *balanced_of(size.num_ranks)]:
        seen = [of_rank.memory[name] for of_rank in found]
        problems += [problem for rank, one in enumerate(seen) for problem in one.problems(f"rank {rank}, {name}")]
        fullest = max(seen, key=lambda one: one.said_bytes)
        numbers |= {f"{key} of the fullest rank, {name}": value for key, value in fullest._asdict().items()}
    lowest = min(max(of_rank.memory[name].allocated_bytes for of_rank in found) for name in balanced_of(size.num_ranks))
    plain = max(of_rank.memory[PLAIN].allocated_bytes for of_rank in found)
    if lowest >= plain and size.num_ranks >= FEWEST_TO_BALANCE:
        problems.append(f"balancing lowers nothing: the fullest rank allocates {show_bytes(lowest)}, and plain {show_bytes(plain)}")
    return judged(_named("memory", size), HELD, problems, numbers)


def _times(found: Sequence[OfRank], size: Size, bytes_per_s: float) -> list[Verdict]:
    """Judge the waits for evictions and the step time; a miss is not held against bpipe where a copy is slower than a forward."""
    balanced = balanced_of(size.num_ranks)[0]
    transfer_s = max(of_rank.evicted_bytes for of_rank in found) / bytes_per_s
    forward_s = median(of_rank.forward_s for of_rank in found)
    exposed = _share(found, balanced, "evictions_s")
    over_plain = median(one / other for one, other in zip(_steps(found, balanced), _steps(found, PLAIN), strict=True))
    numbers = {
        "step_s, plain": median(_steps(found, PLAIN)),
        "step_s, balanced": median(_steps(found, balanced)),
        "balanced over plain": over_plain,
        "share of a step that waits for evictions": exposed,
        "share of a step that waits for messages, plain": _share(found, PLAIN, "messages_s"),
        "share of a step that waits for messages, balanced": _share(found, balanced, "messages_s"),
        "forward_s": forward_s,
        "transfer_s": transfer_s,
        "link, bytes per second": bytes_per_s,
        "steps": len(_steps(found, PLAIN)),
    }
    slow = f"a transfer by itself takes {show_seconds(transfer_s)}, a forward {show_seconds(forward_s)}: it cannot be hidden"
    verdicts = []
    for what, meaning, value, most in (
        ("exposed transfer time", EXPOSED, exposed, MOST_EXPOSED),
        ("step time", AS_FAST, over_plain, MOST_OVER_PLAIN),
    ):
        name = _named(what, size)
        problem = _too_much(value, most)
        if problem and value is not None and transfer_s > forward_s:
            verdicts.append(not_applicable(name, f"{slow}; {problem}", numbers))
        else:
            verdicts.append(judged(name, meaning, [problem] * bool(problem), numbers))
    return verdicts


def _too_much(value: float | None, most: float) -> str:
    if value is None:
        return "no rank's device said how long it waited"
    return "" if value <= most else f"it is {value:.3f}, and should be at most {most}"


def _steps(found: Sequence[OfRank], name: str) -> list[float]:
    """Return the seconds of each step, which lasts until its slowest rank is done."""
    of_ranks = [[step["step_s"] for step in of_rank.steps[name]] for of_rank in found]
    return [max(of_step) for of_step in zip(*of_ranks, strict=True)]


def _share(found: Sequence[OfRank], name: str, key: str) -> float | None:
    """Return the share of a step that the longest-waiting rank waits: its median over steps with known waits, None without any."""
    shares = [[s[key] / s["step_s"] for s in of_rank.steps[name] if s[key] is not None] for of_rank in found]
    return max((median(of_rank) for of_rank in shares if of_rank), default=None)
