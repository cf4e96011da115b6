"""How many bytes the balance pass moves, compared with the fewest that any pass can: random small problems, solved exactly.

Writes benchmarks/results/bytes_moved.csv: every problem on which the pass moves more than the bound, and a line on all.

    .venv/bin/python -m benchmarks.bytes_moved 1000
"""

from __future__ import annotations

import sys
from random import Random
from statistics import mean

from benchmarks.study import write_csv
from tests.schedules.instances import Instance, some


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
    found.sort(key=lambda one: one[0], reverse=True)
    rows = [[*instance, moved, fewest, f"{gap:.3f}"] for gap, instance, moved, fewest in found if gap]
    write_csv("bytes_moved", [[*Instance._fields, "moved", "fewest", "gap"], *rows, [told(found)]])


def told(found: list[tuple[float, Instance, int, int]]) -> str:
    """All gaps in one line."""
    gaps = [gap for gap, *_ in found]
    over = sum(gap > 0.1 for gap in gaps)
    return f"{len(gaps)} problems: the mean gap is {mean(gaps):.2%}, the largest {max(gaps):.1%}, {over} above 10%"


if __name__ == "__main__":
    main()
