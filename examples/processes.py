"""Start the processes of a run, add numbers over them after each step, and stop them together."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

import torch
import torch.distributed as dist

__all__ = ["Stop", "add_over_ranks", "start_processes"]


def start_processes() -> torch.device:
    """Join the process group that torchrun describes and return this rank's device.

    A GPU for each process of this machine and NCCL where there are as many, else the CPU and gloo.
    """
    if "LOCAL_RANK" not in os.environ:
        sys.exit(f"start it with torchrun, one process per stage: torchrun --nproc-per-node 4 {sys.argv[0]}")
    local_rank, num_local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < num_local:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device


def add_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Add each of `values` over all ranks, for numbers that one rank knows and the others give as zero. Collective."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    numbers: list[float] = total.tolist()
    return numbers


class Stop:
    """Turn Ctrl-C, and torchrun's request to end, into a flag to look at between two steps.

    A rank that stopped at once would leave the others waiting in the middle of a step; so all finish the step, agree
    that one was asked to stop, save, and leave.
    """

    def __init__(self) -> None:
        self.is_asked = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
