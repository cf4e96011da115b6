"""Without any one of its rooms bpipe is imported, and trains with everything else to the same bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deletion.rooms import ROOMS, ROOT

WHOLE = "nothing"


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """By the room that is not there, what each step of the program returned."""
    folder = tmp_path_factory.mktemp("without")
    for room in (WHOLE, *ROOMS):
        shutil.copytree(ROOT / "bpipe", folder / room / "bpipe", ignore=shutil.ignore_patterns("__pycache__", room))
    command = [sys.executable, "-m", "tests.deletion.forks", *(str(folder / room) for room in (WHOLE, *ROOMS))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, str]] = {}
    for line in done.stdout.splitlines():
        path, step, shown = line.split(" ", 2)
        found.setdefault(Path(path).name, {})[step] = shown
    return found


def test_every_room_has_a_step(said: dict[str, dict[str, str]]) -> None:
    assert said[WHOLE].keys() == {"plain", *ROOMS} and not any("refused" in shown for shown in said[WHOLE].values())
    assert said[WHOLE]["plain"].endswith(" 3 evictions")


@pytest.mark.parametrize("room", ROOMS)
def test_all_else_is_as_before(room: str, said: dict[str, dict[str, str]]) -> None:
    """Only what the room is for is refused, and says which module there is none of."""
    refusal = said[room].pop(room)
    assert refusal.startswith("refused: ") and f"'bpipe.{room}" in refusal
    assert said[room] == {step: shown for step, shown in said[WHOLE].items() if step != room}
