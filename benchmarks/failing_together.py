"""What it costs a healthy step that ranks fail together: calls counted, and their CPU time measured, beside the step's own.

Trains the model of `make train` over four processes. The control thread's CPU time is read from its own clock; the caller's
part is measured around each call, and for what is done at every action, by itself. Prints a table and writes
benchmarks/results/failing_together.csv.

    .venv/bin/python benchmarks/failing_together.py
"""

from __future__ import annotations

import csv
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

import bpipe
from bpipe.comm.health.activity import Activity
from bpipe.comm.health.control_plane import ControlPlane, NullControlPlane

HERE = Path(__file__).parent
RESULTS = HERE / "results"
P, M, SEQUENCES, STEPS, REPEATS = 4, 8, 32, 12, 5
COLUMNS = ("rank", "step_cpu_ms", "control_thread_us", "calls", "calls_us", "actions", "actions_us", "share_percent")

Row = dict[str, float]


class Meter:
    """Counts the collective calls of a transport's line, and their CPU time on the caller's thread."""

    def __init__(self, control: ControlPlane) -> None:
        self.num_calls, self.seconds = 0, 0.0
        self._exchange = control.exchange
        control.exchange = self  # type: ignore[assignment, method-assign]

    def __call__(self, *args: Any) -> Any:
        began = time.thread_time()
        try:
            return self._exchange(*args)
        finally:
            self.seconds += time.thread_time() - began
            self.num_calls += 1


def measured(rank: int, num_steps: int = STEPS) -> Row:
    """What some steps of a rank cost, and what of it is for failing together. Collective."""
    sys.path.insert(0, str(HERE.parent / "examples"))
    from gpt import GPTConfig, build_stage

    config = GPTConfig()
    stage = bpipe.PipelineStage(build_stage(config, rank, P, device=torch.device("cpu"), seed=0), rank, P, "cpu")
    schedule = bpipe.BalancedOneFOneB(stage, M, loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    words = torch.randint(256, (SEQUENCES, config.sequence_length))
    schedule.step(words, target=words, return_outputs=False)
    control: Any = schedule.session.context.transport.control
    meter, clock = Meter(control), time.pthread_getcpuclockid(control._thread.ident)
    began, thread_began = time.process_time(), time.clock_gettime(clock)
    for _ in range(num_steps):
        schedule.step(words, target=words, return_outputs=False)
    step_s, thread_s = (time.process_time() - began) / num_steps, (time.clock_gettime(clock) - thread_began) / num_steps
    num_actions = len(schedule.plan.actions[rank]) + len(schedule.plan.served[rank])
    actions_s = num_actions * seconds_per_action()
    schedule.close()
    return {
        "rank": rank,
        "step_cpu_ms": 1e3 * step_s,
        "control_thread_us": 1e6 * thread_s,
        "calls": meter.num_calls / num_steps,
        "calls_us": 1e6 * meter.seconds / num_steps,
        "actions": num_actions,
        "actions_us": 1e6 * actions_s,
        "share_percent": 100 * (thread_s + meter.seconds / num_steps + actions_s) / step_s,
    }


def seconds_per_action(num_actions: int = 20_000) -> float:
    """What it takes to note where a rank is, and to look whether something has failed; the median of some runs."""
    activity, control, lane = Activity(), NullControlPlane(), [None] * num_actions
    times = []
    for _ in range(REPEATS):
        began = time.thread_time()
        for _action in lane:
            pass
        between = time.thread_time()
        for activity.position, _action in enumerate(lane):
            if control.failure is not None:
                control.check()
        times.append((time.thread_time() - between) - (between - began))
    return sorted(times)[REPEATS // 2] / num_actions


def process(rank: int, port: int, results: Any) -> None:
    """One rank."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", port, is_master=False), rank=rank, world_size=P)
    results[rank] = measured(rank)
    dist.barrier()
    dist.destroy_process_group()


def lines(rows: list[Row]) -> Iterator[str]:
    """The table."""
    yield " | ".join(f"{column:>18}" for column in COLUMNS)
    for row in rows:
        yield " | ".join(f"{row[column]:>18.3g}" for column in COLUMNS)


def main() -> None:
    """Measure all ranks, print and keep the table."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = mp.Manager().dict()
    mp.spawn(process, (store.port, results), nprocs=P)
    rows: list[Row] = [results[rank] for rank in range(P)]
    print("\n".join(lines(rows)))
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "failing_together.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({column: f"{row[column]:.4g}" for column in COLUMNS} for row in rows)


if __name__ == "__main__":
    main()
