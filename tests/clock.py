"""A clock for tests of what is measured: time passes where the test sleeps, and hardly anywhere else."""

from __future__ import annotations

import time

import pytest


class Clock:
    """What stands in place of the module `time`, or by `patch_all` of its clock of computations and its sleep everywhere."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def patch_all(self, patch: pytest.MonkeyPatch) -> None:
        for name in ("sleep", "perf_counter", "perf_counter_ns"):
            patch.setattr(time, name, getattr(self, name))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def perf_counter(self) -> float:
        self.now_s += 1e-8  # nothing takes no time
        return self.now_s

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.perf_counter())
