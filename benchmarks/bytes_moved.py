"""How many bytes the balance pass moves, compared with the fewest that any pass can: random small problems, solved exactly.

Writes benchmarks/results/bytes_moved.csv: every problem on which the pass moves more than the bound, and a line on all.

    .venv/bin/python -m benchmarks.bytes_moved 1000
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from random import Random
from statistics import mean

from tests.schedules.instances import Instance, some

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    """Solve as many problems as the command line asks for."""
    number, random = int(sys.argv[1]), Random(2026)
    found: list[tuple[float, Instance, int, int]] = []
    while len(found) < number:
        instance = some(random)
        moved, fewest = (0, 0) if instance is None else instance.bytes_moved()
        if instance is not None and fewest:
            found.append((moved / fewest - 1, instance, moved, fewest))
            if len(found) % 50 == 0:
                print(told(found), flush=True)
    with (RESULTS / "bytes_moved.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*Instance._fields, "moved", "fewest", "gap"])
        for gap, instance, moved, fewest in sorted(found, key=lambda one: one[0], reverse=True):
            if gap:
                writer.writerow([*instance, moved, fewest, f"{gap:.3f}"])
        writer.writerow([told(found)])


def told(found: list[tuple[float, Instance, int, int]]) -> str:
    """All gaps in one line."""
    gaps = [gap for gap, *_ in found]
    over = sum(gap > 0.1 for gap in gaps)
    return f"{len(gaps)} problems: the mean gap is {mean(gaps):.2%}, the largest {max(gaps):.1%}, {over} above 10%"


if __name__ == "__main__":
    main()
