"""What runs on the simulated device, each file in a process of its own, into which the device is loaded before torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.accelerator.build import LIBRARY, built, why_not

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (Path(__file__).parent / "on_device").glob("test_*.py"))
WHY_NOT = why_not()

pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or ""),
    pytest.mark.skipif(LIBRARY in os.environ, reason="this is the simulated device's own process"),
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_device(path: Path) -> None:
    command = [sys.executable, "-m", "tests.accelerator", "-q", "--no-header", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {LIBRARY: str(built())}, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-2000:]
