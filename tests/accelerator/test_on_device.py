"""What runs on the simulated device, in processes of its own, into which the device is loaded before torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import LIBRARY, MAKE, built, why_not

ROOT = Path(__file__).parents[2]
PARTS = 3  # of the larger folder: a process takes seconds to load torch, the device and what its ranks need
A_PART = ("tests/accelerator/on_device/test_equality.py", "-k", "bytes and (test_loopback or True)")  # a loopback, and NCCL
WHY_NOT = why_not()

pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.skipif(LIBRARY in os.environ, reason="this is the simulated device's own process"),
]


def files(folder: str, part: int = 0, parts: int = 1) -> list[str]:
    every = sorted((Path(__file__).parent / folder).glob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in every[part::parts]]


def test_a_part_on_device() -> None:
    run("cuda", [*A_PART])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_on_device(part: int) -> None:
    run("cuda", files("on_device", part, PARTS))


@pytest.mark.timeout(1800)
def test_on_second_make() -> None:
    run("accel", files("on_second_make"))


def run(make: str, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "tests.accelerator", "-q", "--no-header", "--tier", "every", *arguments]
    # Not a part of this run: its tests would wait for their turn behind whoever waits for this one to end (tests/conftest.py).
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = ours | {MAKE: make, LIBRARY: str(built(make))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
