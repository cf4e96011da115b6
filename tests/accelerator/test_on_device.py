"""What runs on the simulated device, each file in a process of its own, into which the device is loaded before torch."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import LIBRARY, MAKE, built, why_not

ROOT = Path(__file__).parents[2]
FOLDERS = {"on_device": "cuda", "on_second_make": "accel"}  # with the make of device on which their files run
FILES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (Path(__file__).parent / folder).glob("test_*.py"))
EXHAUSTIVE = [path for path in FILES if {"exhaustive", "thinned"} & set(re.findall(r"\w+", (ROOT / path).read_text()))]
WHY_NOT = why_not()

pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.skipif(LIBRARY in os.environ, reason="this is the simulated device's own process"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_device(path: Path) -> None:
    run(path)


@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.parametrize("path", EXHAUSTIVE, ids=lambda path: path.stem)
def test_all_on_device(path: Path) -> None:
    run(path, "-m", "exhaustive")


def run(path: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "tests.accelerator", "-q", "--no-header", str(path), *arguments]
    make = FOLDERS[path.parent.name]
    # Not a part of this run: its tests would wait for their turn behind whoever waits for this one to end (tests/conftest.py).
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = ours | {MAKE: make, LIBRARY: str(built(make))}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
