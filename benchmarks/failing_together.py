"""What it costs a healthy step that ranks fail together: calls counted, and their CPU time measured, beside the step's own.

Trains the model of `make train` over four processes. The control thread's CPU time is read from its own clock; the caller's
part is measured around each call, and for what is done at every action, by itself. Prints a table and writes
benchmarks/results/failing_together.csv.

    .venv/bin/python -m benchmarks.failing_together
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

import bpipe
from benchmarks.study import write_csv
from bpipe.comm.health.activity import Activity
from bpipe.comm.health.control_plane import ControlPlane, NullControlPlane
from tests.ranks import run_ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
P, M, SEQUENCES, STEPS, REPEATS = 4, 8, 32, 12, 5
NUM_ACTIONS = 20_000

Row = dict[str, float]


@contextmanager
def metered(control: ControlPlane) -> Iterator[list[float]]:
    """Give the CPU seconds of each collective call of a transport's line, on the caller's thread."""
    exchange, seconds = control.exchange, list[float]()

    def timed(*args: Any) -> Any:
        began = time.thread_time()
        try:
            return exchange(*args)
        finally:
            seconds.append(time.thread_time() - began)

    control.exchange = timed  # type: ignore[method-assign]
    yield seconds
    control.exchange = exchange  # type: ignore[method-assign]


def measured(rank: int, num_steps: int = STEPS) -> Row:
    """What some steps of a rank cost, and what of it is for failing together. Collective."""
    sys.path.insert(0, str(EXAMPLES))
    from gpt import GPTConfig, build_stage

    config = GPTConfig()
    stage = bpipe.PipelineStage(build_stage(config, rank, P, device=torch.device("cpu"), seed=0), rank, P, "cpu")
    schedule = bpipe.BalancedOneFOneB(stage, M, loss_fn=lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten()))
    words = torch.randint(256, (SEQUENCES, config.sequence_length))
    schedule.step(words, target=words, return_outputs=False)
    control: Any = schedule.session.context.transport.control
    clock = time.pthread_getcpuclockid(control._thread.ident)
    began, thread_began = time.process_time(), time.clock_gettime(clock)
    with metered(control) as calls:
        for _ in range(num_steps):
            schedule.step(words, target=words, return_outputs=False)
    step_s, thread_s = (time.process_time() - began) / num_steps, (time.clock_gettime(clock) - thread_began) / num_steps
    calls_s = sum(calls) / num_steps
    num_actions = len(schedule.plan.actions[rank]) + len(schedule.plan.served[rank])
    actions_s = num_actions * seconds_per_action()
    schedule.close()
    return {
        "rank": rank,
        "step_cpu_ms": 1e3 * step_s,
        "control_thread_us": 1e6 * thread_s,
        "calls": len(calls) / num_steps,
        "calls_us": 1e6 * calls_s,
        "actions": num_actions,
        "actions_us": 1e6 * actions_s,
        "share_percent": 100 * (thread_s + calls_s + actions_s) / step_s,
    }


def seconds_per_action() -> float:
    """What it takes to note where a rank is, and to look whether something has failed; the median of some runs."""
    activity, control, lane = Activity(), NullControlPlane(), [None] * NUM_ACTIONS
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
    return median(times) / NUM_ACTIONS


def main() -> None:
    """Measure all ranks, print and keep the table."""
    found = run_ranks(measured, P, timeout_s=600.0)
    table = [list(found[0]), *([f"{cell:.4g}" for cell in row.values()] for row in found)]
    for row in table:
        print(" | ".join(f"{cell:>18}" for cell in row))
    write_csv("failing_together", table)


if __name__ == "__main__":
    main()
