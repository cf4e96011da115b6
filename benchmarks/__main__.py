"""Run the studies, and write RESULTS.md from what they found.

make bench                          # all studies
make bench STUDIES="growth ..."     # some of them
make bench STUDIES=none             # only write RESULTS.md and draw its pictures again

A study that takes what is not here, such as a GPU, is left out, and what is known of it stays.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.studies import STUDIES
from benchmarks.study import Study, section

RESULTS = Path(__file__).parent / "RESULTS.md"
HEAD = """# What bpipe costs, measured

Written by `make bench` from the JSON files in `results/`; no figure in here was typed by hand. Ratios with "from" and "to" are
medians over rounds in which both ran in turns, in the same processes, with the 95% interval of the median. Where only the interval
reaches a target, the table says so. `NOTES.md` tells how the figures came to be.
"""


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("studies", nargs="*", metavar="study", help=f"of {', '.join(s.name for s in STUDIES)} (default: all)")
    names = parser.parse_args().studies
    unknown = set(names) - {study.name for study in STUDIES} - {"none"}
    if unknown:
        sys.exit(f"there is no study {', '.join(sorted(unknown))}: choose of {', '.join(s.name for s in STUDIES)}")
    torch.set_num_threads(1)
    run(chosen(names))
    for study in STUDIES:
        study.save_picture()
    RESULTS.write_text("\n".join([HEAD, *(line for study in STUDIES for line in section(study))]), encoding="utf-8")
    print(f"wrote {RESULTS.relative_to(Path.cwd()) if RESULTS.is_relative_to(Path.cwd()) else RESULTS}")


def chosen(names: Sequence[str]) -> list[Study]:
    """The studies of some names, or all that can be measured here, saying of each other one why not.

    Raises:
        SystemExit: one was asked for by name and cannot be measured.
    """
    asked = [study for study in STUDIES if not names or study.name in names]
    missing = {study.name: needs for study in asked if (needs := study.needs())}
    told = [f"{name} is not measured: {needs}" for name, needs in missing.items()]
    if names and told:
        sys.exit("\n".join(told))
    print(*told, sep="\n", end="\n" if told else "")
    return [study for study in asked if study.name not in missing]


def run(studies: Sequence[Study]) -> None:
    """Run studies one after the other, and say of each case that it begins."""
    began = time.monotonic()
    for study in studies:
        study.run(lambda case, study=study: print(f"{time.monotonic() - began:5.0f} s  {study.name}: {case}", flush=True))


if __name__ == "__main__":
    main()
