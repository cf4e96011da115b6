"""Without any one of its rooms, tests of the others pass; `python -m tests.deletion ROOM` runs all others of `make test`."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.deletion.rooms import ROOMS, ROOT

SOME = (  # of each feature, and of what all of them stand on
    *("tests/test_freed.py", "tests/test_loopback.py", "tests/test_evict_or_recompute.py", "tests/test_loss_scale.py"),
    *("tests/skips/test_random.py", "tests/slices/test_losses.py", "tests/relaxed/test_local_plan.py"),
)


@pytest.mark.parametrize("room", ROOMS)
def test_the_others_pass(room: str) -> None:
    command = [sys.executable, "-m", "tests.deletion", room, "--tier", "test", *SOME]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout.splitlines()[-1]
