"""Run the tests of all others in a copy of this repository in which bpipe has no such room."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.deletion.rooms import ROOMS, copy_without


def run_without(room: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    with tempfile.TemporaryDirectory() as folder:
        copy = copy_without(room, Path(folder) / "copy")
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "tests.deletion.plugin", "-q", *arguments]
        return subprocess.run(command, cwd=copy, env={**os.environ, "BPIPE_WITHOUT": room, "PYTHONPATH": str(copy)}, text=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.deletion", description=__doc__)
    parser.add_argument("room", choices=ROOMS)
    chosen, arguments = parser.parse_known_args()
    return run_without(chosen.room, arguments or ["--tier", "test", "--ignore", "tests/deletion"]).returncode


if __name__ == "__main__":
    sys.exit(main())
