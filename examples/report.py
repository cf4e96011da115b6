"""Report a run's measurements: gather every rank's numbers, then write a table, a picture and a JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy
import torch
import torch.distributed as dist
from files import write_json
from picture import draw_memory, fullest_of
from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["Measurements", "Summary", "write_report"]

MIB = 1024**2

# What is kept of a schedule's stats, and how many steps' values become one.
REDUCED = {
    "device_peak_bytes": max,
    "predicted_device_peak_bytes": max,
    "static_bytes": max,
    "peak_bytes": max,
    "predicted_peak_bytes": max,
    "peak_slots": max,
    "held_bytes": max,
    "remote_buffer_bytes": max,
    "evicted_bytes": median,
    "loaded_bytes": median,
    "wait_forward_s": median,
    "wait_backward_s": median,
    "wait_evict_s": median,
    "wait_load_s": median,
    "step_s": median,
}

# Of each rank, plain and balanced: the most its device holds of all, that as predicted, and the most of it that is activations.
HEADINGS = (
    "rank",
    "plain\ndevice",
    "pre-\ndicted",
    "activ-\nations",
    "bal.\ndevice",
    "pre-\ndicted",
    "activ-\nations",
    "micro-\nbatches",
    "evict-\ned",
    "plain\ns",
    "bal.\ns",
)

# One rank's numbers: of each schedule, the keys above.
Summary = dict[str, dict[str, float]]


class Measurements:
    """This rank's stats of every step, by the name of the schedule that took it.

    Args:
        names: of the schedules.
    """

    def __init__(self, *names: str) -> None:
        self.steps: dict[str, list[dict[str, float]]] = {name: [] for name in names}

    def add(self, name: str, stats: Mapping[str, float]) -> None:
        """Keep what one step measured."""
        self.steps[name].append({key: float(stats[key]) for key in REDUCED})

    def gather(self, device: torch.device) -> list[Summary]:
        """Return a summary of each rank; none where a schedule took no step, for then there is nothing to compare.

        Collective.
        """
        num_compared = min(len(steps) for steps in self.steps.values())
        if num_compared == 0:
            return []
        mine = [value for steps in self.steps.values() for value in summarise(steps, num_compared)]
        row = torch.tensor(mine, dtype=torch.float64, device=device)
        rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, row)
        return [self._named(row.tolist()) for row in rows]

    def _named(self, row: list[float]) -> Summary:
        values = iter(row)
        return {name: {key: next(values) for key in REDUCED} for name in self.steps}


def summarise(steps: list[dict[str, float]], num_compared: int) -> list[float]:
    """Reduce the steps of one schedule to one number per key: the highest of all steps, or the median.

    Medians are over the steps that all schedules took in turns, so that none had the quieter machine. They leave
    out the first step, because it also agrees on shapes.
    """
    compared = steps[1:num_compared] or steps
    return [reduce([step[key] for step in (steps if reduce is max else compared)]) for key, reduce in REDUCED.items()]


def write_report(folder: Path, ranks: list[Summary], about: dict[str, Any]) -> None:
    """Print the table and write memory.png and report.json into `folder`. For one rank."""
    if ranks:
        Console().print(memory_table(ranks))
        print(told_of_fullest(ranks))
        if not any(rank["balanced"]["evicted_bytes"] for rank in ranks):
            print("Nothing was evicted: with so few stages or microbatches, plain 1F1B is within balanced 1F1B's bound.")
        draw_memory(folder / "memory.png", ranks)
        print(f"picture     {folder / 'memory.png'}")
    write_json(folder / "report.json", {**about, "ranks": ranks, "machine": machine()})
    print(f"numbers     {folder / 'report.json'}")
    print(f"checkpoint  {folder / 'checkpoint'}, continue from it with --resume", flush=True)


def memory_table(ranks: list[Summary]) -> Table:
    """Lay out the most memory of each rank, measured and predicted, and its step time, plain beside balanced."""
    title = "Peak memory of each device, of all and of activations, in MiB,\nand seconds per step: plain and balanced 1F1B"
    table = Table(box=box.SIMPLE_HEAD, padding=0, title=title)
    for heading in HEADINGS:
        table.add_column(heading, justify="right")
    for index, rank in enumerate(ranks):
        table.add_row(str(index), *cells(rank["plain"], rank["balanced"]))
    return table


def cells(plain: dict[str, float], balanced: dict[str, float]) -> list[str]:
    """Return a rank's row, as `HEADINGS` names it."""
    shown = ("device_peak_bytes", "predicted_device_peak_bytes", "peak_bytes")
    return [
        *(f"{schedule[key] / MIB:.1f}" for schedule in (plain, balanced) for key in shown),
        f"{plain['peak_slots']:.0f} -> {balanced['peak_slots']:.0f}",
        f"{balanced['evicted_bytes'] / MIB:.1f}",
        f"{plain['step_s']:.2f}",
        f"{balanced['step_s']:.2f}",
    ]


def told_of_fullest(ranks: list[Summary]) -> str:
    """Name the rank with the fullest device, plain and balanced, because that device runs out of memory first."""
    fullest = {name: fullest_of(ranks, name) for name in ("plain", "balanced")}
    peaks = {name: ranks[rank][name]["device_peak_bytes"] for name, rank in fullest.items()}
    told = ", ".join(f"{name} rank {rank} with {peaks[name] / MIB:.1f} MiB" for name, rank in fullest.items())
    if peaks["balanced"] <= peaks["plain"]:
        return f"fullest     {told}"
    return f"fullest     {told}: more than plain. bpipe.Balanced(schedule, budget='lowest') counts static memory, too"


def machine() -> dict[str, Any]:
    """Describe the machine and the versions, because the numbers depend on them."""
    return {
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads_per_rank": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
