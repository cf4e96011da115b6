"""Print docs/torch-pipelining.md, write it, or record the signatures of another version of torch from its sources."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.torch_names.page import PAGE, page
from tests.torch_names.signatures import record


def main() -> None:
    """Do what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m tests.torch_names", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/torch-pipelining.md instead")
    kinds = ("VERSION", "FOLDER")
    parser.add_argument("--record", nargs=2, metavar=kinds, help="add a version of torch, from the sources of its pipelining")
    given = parser.parse_args()
    if given.record:
        record(given.record[0], Path(given.record[1]))
    if given.write:
        PAGE.write_text(page(), encoding="utf-8")
        print(f"wrote docs/{PAGE.name}")
    elif not given.record:
        print(page())


if __name__ == "__main__":
    main()
