"""The oracle's commands: `python -m tests.oracle make OUT [--root CHECKOUT]` and `python -m tests.oracle compare A B`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import tests.oracle
from tests.oracle.comparing import report
from tests.oracle.plan_files import ROOT, plans_of, read, write


def main() -> int:
    parser = ArgumentParser(prog="python -m tests.oracle", description=tests.oracle.__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, dest="command")
    make = commands.add_parser("make", help="ask a checkout for its plans")
    make.add_argument("out", type=Path, help="a .json or .json.xz")
    make.add_argument("--root", type=Path, default=ROOT, help="the checkout; default: this one")
    compare = commands.add_parser("compare", help="compare the plans of two files or checkouts; status 1 if they are unequal")
    compare.add_argument("both", type=Path, nargs=2, metavar="FILE_OR_CHECKOUT")
    compare.add_argument("--most", type=int, default=20, help="the unequal cases to show (%(default)s)")
    given = parser.parse_args()
    if given.command == "make":
        write(given.out, plans_of(given.root.resolve()))
        return 0
    lines, num_unequal = report(*map(_plans, given.both), most=given.most)
    print(*lines, sep="\n")
    return int(num_unequal > 0)


def _plans(place: Path) -> dict[str, Any]:
    return plans_of(place.resolve()) if place.is_dir() else read(place)


if __name__ == "__main__":
    sys.exit(main())
