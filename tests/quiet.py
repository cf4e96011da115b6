"""Whether this machine is quiet and how fast it is, for tests that measure time: on a busy machine these decide nothing."""

from __future__ import annotations

import os
import subprocess
import sys
import time

QUIET = 0.95  # of a core's time, for a program that only counts
SPIN_S = 0.5
SPIN = f"""
import time
end, begun = time.monotonic() + {SPIN_S}, time.process_time()
while time.monotonic() < end:
    pass
print(time.process_time() - begun)
"""
LOOPS = 400_000
REFERENCE_S = 0.042  # what `_count` takes on the machine that the bounds in seconds are from


def why_busy() -> str:
    """Return why nothing can be measured here now; an empty text on a quiet machine. It takes a second: all cores count."""
    command = [sys.executable, "-c", SPIN]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    counting = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(cores)]
    shares = [float(process.communicate()[0]) / SPIN_S for process in counting]
    if min(shares) >= QUIET:
        return ""
    return f"this machine is busy, and decides nothing: a program that only counts gets {min(shares):.0%} of a core's time"


def here(seconds: float) -> float:
    """Return a bound for this machine's processor, if that is slower than the one that the bounds are from."""
    return seconds * max(1.0, min(_count() for _ in range(5)) / REFERENCE_S)


def _count() -> float:
    begun = time.process_time()
    table: dict[int, int] = {}
    for number in range(LOOPS):
        table[number % 1000] = table.get(number % 1000, 0) + number
    return time.process_time() - begun
