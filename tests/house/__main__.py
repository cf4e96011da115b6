"""Print the figures of this checkout, or of one at ROOT."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from tests.house.figures import COMPARABLE, REMEDY, TABLE, beyond, figures, limits, lower, remarks
from tests.house.imports import arrows, circles
from tests.house.source import HERE, Source
from tests.house.walk import walk


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.house", description=__doc__)
    parser.add_argument("root", nargs="?", type=Path, default=HERE, metavar="ROOT")
    parser.add_argument("--lower", action="store_true", help=f"write the figures that fell to ROOT's {TABLE}; none is raised")
    parser.add_argument("-v", action="store_true", help="name the private attributes, the dicts, and what a step meets")
    chosen = parser.parse_args()
    if chosen.lower and not COMPARABLE:
        parser.error("the ratchets are of Python 3.11; later ones cut f-strings into tokens")
    root = chosen.root.resolve()
    sys.path.insert(0, str(root))
    source = Source(root)
    walked = walk(source)
    found = figures(source, importlib.import_module("bpipe"), walked)
    known = limits(root) if (root / TABLE).exists() else {}
    for name, figure in found.items():
        print(f"{name:60} {figure:8}", f" of at most {known[name]}" if known.get(name, figure) != figure else "")
    print("\nNo ratchets, because moving things or writing documentation changes them:")
    for name, figure in remarks(source, walked).items():
        print(f"{name:60} {figure:8}")
    for group in circles(arrows(source.package)):
        print("circle:", ", ".join(group))
    if chosen.v:
        print(*source.reaches(), *source.dicts_by_microbatch(), sep="\n")
        print(*sorted(walked.files_met), *map(" ".join, sorted(walked.classes_met)), sep="\nmet: ")
    if chosen.lower:
        lower(root, found)
    if known and (wrong := beyond(found, known)):
        print(*wrong, REMEDY, sep="\n")


main()
