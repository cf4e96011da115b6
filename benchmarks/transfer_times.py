"""What balanced 1F1B costs over plain 1F1B when an eviction takes longer than a forward: simulated, p = 4 to 32.

A backward takes two forwards; tx is one eviction, or one load, in forwards. Writes benchmarks/results/transfer_times.csv.

    .venv/bin/python -m benchmarks.transfer_times
"""

from __future__ import annotations

from benchmarks.study import write_csv
from bpipe.schedules import Costs, Link, build, simulate

TIMES = (0.5, 1.0, 1.25, 1.5, 2.0, 3.0)


def main() -> None:
    """Simulate every size with every transfer time."""
    sizes = [(p, m) for p in range(4, 33) for m in (2 * p, 4 * p)]
    heading = ["stages", "microbatches", *(f"tx={tx}" for tx in TIMES)]
    write_csv("transfer_times", [heading, *([p, m, *ratios(p, m)] for p, m in sizes)])


def ratios(p: int, m: int) -> list[str]:
    """Balanced step over plain step, for each transfer time."""
    plain = simulate(build("1f1b", p, m), Costs()).makespan_s
    balanced = build("balanced_1f1b", p, m)
    costs = (Costs(saved_bytes=1, link=Link(bytes_per_s=1 / tx)) for tx in TIMES)
    return [f"{simulate(balanced, each).makespan_s / plain:.4f}" for each in costs]


if __name__ == "__main__":
    main()
