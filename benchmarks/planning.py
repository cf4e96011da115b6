"""What planning, proving and simulating cost as plans grow: a curve up to 1024 stages and 4096 microbatches.

Every size runs in a process of its own, so that its memory is its own. Writes benchmarks/results/planning.csv and .png.

    .venv/bin/python benchmarks/planning.py                # all sizes: some twenty minutes and 6 GB
    .venv/bin/python benchmarks/planning.py --largest 512  # up to 512 stages: some ten minutes and 3 GB
    .venv/bin/python benchmarks/planning.py --largest 64   # up to 64 stages: half a minute
"""

from __future__ import annotations

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from matplotlib.figure import Figure

from bpipe.schedules import Costs, Link, build, simulate

SIZES = [(8, 64), (16, 256), (32, 512), (64, 1024), (128, 2048), (256, 2048), (512, 4096), (1024, 4096)]
RESULTS = Path(__file__).parent / "results"
COSTS = Costs(saved_bytes=1, output_bytes=1, link=Link(bytes_per_s=2.0))


def main() -> None:
    """Measure each size, one after the other, and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=int, default=1024, help="most stages (default: 1024)")
    parser.add_argument("--one", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    rows = []
    for p, m in SIZES:
        if p <= options.largest:
            print(f"p = {p}, m = {m} ...", flush=True)
            command = [sys.executable, __file__, "--one", str(p), str(m)]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
            print("   ", ", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
    write(rows)


def measure(p: int, m: int) -> dict[str, float]:
    """Plan and simulate balanced 1F1B once; seconds are of this process's CPU time."""
    start = time.process_time()
    plan = build("balanced_1f1b", p, m)
    planned = time.process_time()
    simulate(plan, COSTS)
    simulated = time.process_time()
    return {
        "stages": p,
        "microbatches": m,
        "actions": sum(map(len, (*plan.actions, *plan.served))),
        "plan_and_prove_s": round(planned - start, 2),
        "simulate_s": round(simulated - planned, 2),
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def write(rows: list[dict[str, float]]) -> None:
    """Write the table and its picture."""
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "planning.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    actions = [row["actions"] for row in rows]
    for name, marker in (("plan_and_prove_s", "o"), ("simulate_s", "s")):
        micros = [1e6 * row[name] / row["actions"] for row in rows]
        time_axes.semilogx(actions, micros, marker=marker, label=name.removesuffix("_s").replace("_", " "))
    time_axes.set(xlabel="actions of the plan", ylabel="CPU µs an action", ylim=(0, None))
    time_axes.legend(frameon=False)
    memory_axes.loglog(actions, [row["peak_rss_mib"] / 1024 for row in rows], "o-")
    memory_axes.loglog(actions, [140 * count / 2**30 for count in actions], "k:", label="140 bytes an action")
    memory_axes.set(xlabel="actions of the plan", ylabel="peak GiB of the process")
    memory_axes.legend(frameon=False)
    figure.savefig(RESULTS / "planning.png", dpi=120)


if __name__ == "__main__":
    main()
