"""The rooms that bpipe does without, and which tests belong to each.

A test belongs to a room if it is in its folder, tests/ROOM/, or if the room is named in its file or its parameters, by one of the
words below, and it asks for the room: it fails because there is no such module. A test that names no room may need none.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = {  # by name, the words by which tests name it
    "fill": "fill",
    "overlap": "overlap",
    "recomputation": "recomput",
    "relaxed": r"relaxed|local|Local|Routes|routed|Stream",
    "skips": r"skip",
    "slices": r"slice|Seq1F1B|TeraPipe",
    "twins": r"twin|direction|BitPipe|Chimera|chimera|bitpipe",
}
LEFT_OUT = (".git", ".venv*", "runs", "build", "dist", "site", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


SITE = """# Of a copy: an editable installation of another tree would give it the room that it lacks.
import sys

sys.meta_path = [finder for finder in sys.meta_path if "editable" not in f"{finder}".lower()]
"""


def only_from(folder: str) -> None:
    """Import bpipe from this folder alone; an editable installation of another tree would give it the room that it lacks."""
    exec(SITE)
    sys.path.insert(0, folder)


def copy_without(room: str, to: Path) -> Path:
    """A copy of the repository in which bpipe has no such room."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.rmtree(to / "bpipe" / room)
    (to / "sitecustomize.py").write_text(SITE)
    return to


def belongs(room: str, test: str, why: str) -> bool:
    """Does a failed test belong to a room that is not there? `test` is its name, with its file and parameters."""
    path = Path(test.partition("::")[0])
    names = path.parts[:2] == ("tests", room) or re.search(ROOMS[room], test) or re.search(ROOMS[room], path.read_text())
    return bool(names) and f"No module named 'bpipe.{room}" in why
